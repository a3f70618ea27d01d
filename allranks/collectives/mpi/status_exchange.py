"""Copies of the board's pages between hosts.

The first rank of each host has a thread, the `StatusExchange`. It sends the changes of its ranks'
pages, and writes what it receives to its host's board. It has one TCP connection to the first rank
of all, which forwards what it receives. It needs neither MPI nor any rank's cooperation. The
kernels of both ends notice a host that is cut off.

Pages have no lines of source code: every rank has the source that it runs, and looks a line up by
file and number.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import selectors
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.rank_state import Board
from allranks.errors import ClusterError

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.calls.rank_state import RankState

_PERIOD_SECONDS, _IDLE_SECONDS = 0.05, 0.5
_LOST_SECONDS = 10
_HEAD = struct.Struct("=BIQI")
_PAGE, _ASK, _ASK_ELSE, _ROUND, _DONE, _LOST = range(6)
_ASKS = {_ASK: fields.ASKED, _ASK_ELSE: fields.ASKED_ELSE}


class StatusMessage(NamedTuple):
    """A message: its kind, the rank that it is about, a number, and a page."""

    kind: int
    rank: int = 0
    number: int = 0
    data: bytes = b""


class HostLink:
    """A connection to another host's first rank, and the ranks that are behind it."""

    def __init__(self, connection: socket.socket, behind: Sequence[int]) -> None:
        watch_over(connection)
        connection.setblocking(False)
        self.connection, self.behind = connection, frozenset(behind)
        self.lost = 0
        """`SILENT` or `ENDED` once the connection is lost."""
        self.round = 0
        """The last round that the other end has completed."""
        self.stale: set[int] = set()
        """The ranks of whose pages the other end has an old copy."""
        self.asked: dict[tuple[int, int], int] = {}
        self._in, self._out = bytearray(), bytearray()

    def send(self, message: StatusMessage) -> None:
        """Sends a message, or as much of it as the socket takes now."""
        self._out += _HEAD.pack(message.kind, message.rank, message.number, len(message.data))
        self._out += message.data
        self.flush()

    def flush(self) -> bool:
        """Sends what is left; True if nothing is left afterwards."""
        try:
            while self._out:
                del self._out[: self.connection.send(self._out)]
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error)
        return True

    def _lose(self, error: OSError) -> None:
        silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        self.lost = fields.SILENT if silent else fields.ENDED

    def receive(self) -> list[StatusMessage]:
        try:
            data = self.connection.recv(1 << 20)
            self.lost = 0 if data else fields.ENDED
        except BlockingIOError:
            return []
        except OSError as error:
            data = b""
            self._lose(error)
        self._in += data
        found = []
        while len(self._in) >= _HEAD.size:
            kind, rank, number, size = _HEAD.unpack_from(self._in)
            if len(self._in) < _HEAD.size + size:
                break
            found.append(StatusMessage(kind, rank, number, bytes(self._in[_HEAD.size :][:size])))
            del self._in[: _HEAD.size + size]
        return found


class StatusExchange(threading.Thread):
    """The thread of one host's first rank, with a link to the first rank of all; that rank has one
    to each other host.
    """

    def __init__(
        self, board: Board, first: int, near: Sequence[int], links: list[HostLink]
    ) -> None:
        super().__init__(name="allranks-status", daemon=True)
        self.board, self.first, self.near, self.links = board, first, tuple(near), links
        self._round, self._began = 0, 0.0
        self._news = True
        self._pages: dict[int, bytes] = {}
        """The last pages of this host's ranks."""
        self._messages: dict[int, bytes] = {}
        """The form in which pages are sent, of this host's ranks and of those of other hosts."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Sends changes at once instead of after the poll interval."""
        try:
            os.write(self._woken, b"\0")
        except OSError:
            return  # the thread is about to read the board anyway

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
            while self.links:
                for key, _ in selector.select(_PERIOD_SECONDS):
                    if key.data is None:
                        os.read(self._wake, 4096)
                        continue
                    for message in key.data.receive():
                        self._receive(key.data, message)
                self._read_board()
                for link in self.links:
                    self._send_changes(link)
                for link in [link for link in self.links if link.lost]:
                    selector.unregister(link.connection)
                    self._lose(link)
                if self.first == 0:
                    self._begin_round()

    def _receive(self, link: HostLink, message: StatusMessage) -> None:
        kind, rank, number, data = message
        if kind == _PAGE:
            self.board.show(rank, zlib.decompress(data))
            self._pass_on(rank, data)
        elif kind in _ASKS:
            # Only the newest question is answered, whichever host it comes from.
            if number > self.board.get(rank, _ASKS[kind]):
                self.board.ask(rank, number, _ASKS[kind])
            link.asked[(rank, kind)] = number
        elif kind == _ROUND:
            # All messages from before the round are on the board by now, and are answered here.
            self.board.put(fields.ROUND, number)
            self._read_board()
            self._send_changes(link, must=True)
            link.send(StatusMessage(_DONE, number=number))
        elif kind == _DONE:
            link.round = number
        elif kind == _LOST:
            self.board.ask(rank, number, fields.LOST)

    def _read_board(self) -> None:
        for rank in self.near:
            page = self.board.page(rank)
            if page != self._pages.get(rank):
                self._pages[rank] = page
                self._pass_on(rank, zlib.compress(page, 1))

    def _pass_on(self, rank: int, data: bytes) -> None:
        self._news = True
        self._messages[rank] = data
        for link in self.links:
            if rank not in link.behind:
                link.stale.add(rank)

    def _send_changes(self, link: HostLink, *, must: bool = False) -> None:
        """Sends the changes that the other end lacks, if the socket takes data, or if it must."""
        if not link.flush() and not must:
            return
        while link.stale:
            rank = link.stale.pop()
            link.send(StatusMessage(_PAGE, rank, data=self._messages[rank]))
        for rank in link.behind:
            for kind, word in _ASKS.items():
                asked = self.board.get(rank, word)
                if asked != link.asked.get((rank, kind), 0):
                    link.asked[(rank, kind)] = asked
                    link.send(StatusMessage(kind, rank, asked))

    def _begin_round(self) -> None:
        now = time.monotonic()
        quiet = _PERIOD_SECONDS if self._news else _IDLE_SECONDS
        if now - self._began < quiet or any(link.round < self._round for link in self.links):
            return
        self._began, self._news = now, False
        self._round += 1
        self.board.put(fields.ROUND, self._round)
        self._read_board()
        for link in self.links:
            self._send_changes(link, must=True)
            link.send(StatusMessage(_ROUND, number=self._round))

    def _lose(self, link: HostLink) -> None:
        self.links.remove(link)
        link.connection.close()
        for rank in link.behind:
            self.board.ask(rank, link.lost, fields.LOST)
            for other in self.links:
                other.send(StatusMessage(_LOST, rank, link.lost))


def watch_over(connection: socket.socket) -> None:
    """Lets the kernel end a connection whose other end has not answered for ten seconds."""
    # The other end's kernel answers: a rank that computes, or is stopped for long, does not count
    # as lost.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": _LOST_SECONDS // 2 - 1,
        "TCP_USER_TIMEOUT": 1000 * _LOST_SECONDS,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_SIOCGIFADDR = 0x8915
_TRY_SECONDS, _ALL_SECONDS = 2.0, 30.0
_TOKEN_BYTES = 16


def connect_hosts(own: RankState, base: MPI.Intracomm) -> None:
    """Connects the first ranks of all hosts, and starts a `StatusExchange` on each. Rank 0 listens
    only until all have connected. Each connection has to present a random number that rank 0 has
    sent by MPI. Collective over ``base``.
    """
    rank, firsts = own.rank, sorted(set(own.shares))
    listening = None
    offer: tuple[list[str], int, bytes] | None = None
    if rank == 0:
        listening = socket.create_server(("", 0), backlog=len(firsts))
        offer = addresses(), listening.getsockname()[1], os.urandom(_TOKEN_BYTES)
    where, port, token = base.bcast(offer)
    near = [other for other, first in enumerate(own.shares) if first == own.shares[rank]]
    links, problem = [], ""
    try:
        if listening is not None:
            links = _accept(listening, token, firsts[1:], own.shares)
        elif rank in firsts:
            behind = [other for other in range(own.size) if other not in near]
            links = [HostLink(_connect(where, port, token, rank), behind)]
    except OSError as error:
        problem = f"rank {rank}, on {socket.gethostname()}: {error}"
    finally:
        if listening is not None:
            listening.close()
    problems = [each for each in base.allgather(problem) if each]
    if problems:
        raise ClusterError(
            "expected that the first rank of each host can connect to rank 0's host, by one of its "
            f"addresses {', '.join(where)}; {problems[0]}. Let hosts connect to each other's ports."
        )
    own.host_names = tuple(base.allgather(socket.gethostname()))
    if rank in firsts:
        exchange = StatusExchange(own.board, rank, near, links)
        own.wake_exchange = exchange.wake
        exchange.start()


def _accept(
    listening: socket.socket, token: bytes, firsts: Sequence[int], shares: Sequence[int]
) -> list[HostLink]:
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _ALL_SECONDS
    while len(found) < len(firsts):
        listening.settimeout(max(0.01, end - time.monotonic()))
        connection, _ = listening.accept()
        connection.settimeout(_TRY_SECONDS)
        with suppress(OSError):
            presented = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            first = struct.unpack("=I", presented[_TOKEN_BYTES:])[0] if len(presented) > 19 else -1
            if hmac.compare_digest(presented[:_TOKEN_BYTES], token) and first in firsts:
                connection.sendall(token)
                found[first] = connection
                continue
        connection.close()
    behind = {first: [r for r, of in enumerate(shares) if of == first] for first in found}
    return [HostLink(connection, behind[first]) for first, connection in sorted(found.items())]


def _connect(where: Sequence[str], port: int, token: bytes, rank: int) -> socket.socket:
    problem: OSError = OSError("it has no address")
    for address in where:
        try:
            connection = socket.create_connection((address, port), _TRY_SECONDS)
            connection.sendall(token + struct.pack("=I", rank))
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
                return connection
            problem = OSError(f"{address} is somebody else's")
        except OSError as error:
            problem = error
    raise problem


def addresses() -> list[str]:
    """This host's addresses, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
