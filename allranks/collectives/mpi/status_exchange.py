"""Copies of the board's pages between hosts.

The first rank of each host has a thread, the `StatusExchange`. It sends the changes of its ranks'
pages, and writes what it receives to its host's board. It has one connection to the first rank of
all, which forwards what it receives. The connection is encrypted (CURVE); the ranks exchange their
public keys by MPI. The thread needs neither MPI nor any rank's cooperation. The kernels of both
ends notice a host that is cut off.

While any rank waits, the first rank of all begins rounds: in each one, all hosts send what they
have not sent yet. Progress in calls is sent in rounds only. Rounds become rare if a wait is long
and nothing changes; without a wait there is none.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.rank_state import Board, beat_of, wait_of, without_beat
from allranks.errors import ClusterError
from allranks.records.config import lease_seconds
from allranks.records.ranks import label

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.calls.rank_state import RankState

_PERIOD_SECONDS = 0.05
_QUICK_ROUNDS, _SLOWER, _LONGEST_SECONDS = 8, 1.3, 5.0
"""After this many rounds without news, each begins later than the one before, by this factor. Two
or three rounds without news confirm a deadlock."""
_NEWS_SECONDS = 1.0
_HEAD = struct.Struct("=BIQI")
_PAGE, _ASK, _ROUND, _DONE, _LOST, _BEAT = range(6)


Key = tuple[bytes, bytes]
"""A public key and its secret key."""


class StatusMessage(NamedTuple):
    """A message: its kind, the rank that it is about, a number, and a page."""

    kind: int
    rank: int = 0
    number: int = 0
    data: bytes = b""


class HostLink:
    """A connection to another host's first rank, and the ranks that are behind it.

    ``frame`` is a message that was received from there. ``route`` is its name on a `zmq.ROUTER`.
    """

    def __init__(
        self,
        channel: zmq.Socket[bytes],
        frame: zmq.Frame,
        behind: Sequence[int],
        route: tuple[bytes, ...] = (),
    ) -> None:
        self.channel, self.behind, self.route = channel, frozenset(behind), route
        self.descriptor: int = frame.get(zmq.SRCFD)
        # ZeroMQ closes its descriptor, and then this one still shows how the connection has ended.
        self._tcp = socket.socket(fileno=os.dup(self.descriptor))
        watch_over(self._tcp)
        self.lost = 0
        """`SILENT` or `ENDED` once the connection is lost."""
        self._lost_at = 0.0
        self.round = 0
        """The last round that the other end has completed."""
        self.stale: set[int] = set()
        """The ranks of whose pages the other end has an old copy."""
        self.stale_beats: set[int] = set()
        self.asked: dict[int, int] = {}
        # Messages that the other end does not take yet; one frame, to keep their order.
        self._out = bytearray()

    def add(self, message: StatusMessage) -> None:
        self._out += _HEAD.pack(message.kind, message.rank, message.number, len(message.data))
        self._out += message.data

    def flush(self) -> bool:
        """Sends what was added; False if the other end does not take it now."""
        if self._out:
            try:
                self.channel.send_multipart([*self.route, bytes(self._out)], zmq.NOBLOCK)
            except zmq.ZMQError:
                return False  # its queue is full, or the connection has ended
            self._out.clear()
        return True

    @property
    def is_over(self) -> bool:
        """Whether it is lost; if a rank has ended, the notebook had time to tell how."""
        known = time.monotonic() - self._lost_at > _NEWS_SECONDS
        return self.lost == fields.SILENT or (self.lost == fields.ENDED and known)

    def end(self) -> None:
        silent_ms = 0
        with suppress(OSError, AttributeError, struct.error):
            # `tcpi_last_ack_recv` of linux/tcp.h. The other end's kernel acknowledges also while
            # the rank there computes or is stopped.
            info = self._tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            (silent_ms,) = struct.unpack_from("=I", info, 56)
        self._tcp.close()
        self._lost_at = time.monotonic()
        self.lost = fields.SILENT if silent_ms > 500 * lease_seconds() else fields.ENDED


def _messages_in(data: bytes) -> Iterator[StatusMessage]:
    start = 0
    while start < len(data):
        kind, rank, number, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size + size
        yield StatusMessage(kind, rank, number, data[start - size : start])


class StatusExchange(threading.Thread):
    """The thread of one host's first rank, with a link to the first rank of all; that rank has one
    to each other host.
    """

    def __init__(
        self,
        board: Board,
        first: int,
        near: Sequence[int],
        channel: zmq.Socket[bytes],
        links: Sequence[HostLink],
    ) -> None:
        super().__init__(name="allranks-status", daemon=True)
        self.board, self.first, self.near = board, first, tuple(near)
        self.channel, self.links = channel, list(links)
        self._round, self._began = 0, 0.0
        self._quiet = 0
        """Rounds since a rank has begun or ended a wait, or left."""
        self._pages: dict[int, bytes] = {}
        """The last pages of this host's ranks."""
        self._messages: dict[int, bytes] = {}
        """The form in which pages are sent, of this host's ranks and of those of other hosts."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False

    def wake(self) -> None:
        """Sends changes at once instead of after the poll interval."""
        try:
            os.write(self._woken, b"\0")
        except OSError:
            return  # the thread is about to read the board anyway

    def stop(self) -> None:
        """Returns when nothing more is written to the board."""
        self._stopping = True
        self.wake()
        self.join()

    def run(self) -> None:
        ends = _ends_of(self.channel)
        poller = zmq.Poller()
        for source in (self._wake, self.channel, ends):
            poller.register(source, zmq.POLLIN)
        while self.links and not self._stopping:
            ready = dict(poller.poll(int(_PERIOD_SECONDS * 1000)))
            if self._wake in ready:
                os.read(self._wake, 4096)
            # First, because the last messages of a connection come before its end.
            while ends.poll(0):
                descriptor = recv_monitor_message(ends)["value"]
                for link in self.links:
                    if link.descriptor == descriptor and not link.lost:
                        link.end()
            self._receive_all()
            self._read_board()
            for link in [link for link in self.links if link.is_over]:
                self._lose(link)
            if self.first == 0:
                self._begin_round()
            for link in self.links:
                self._add_changes(link)
                link.flush()
        self.channel.context.destroy()

    def _receive_all(self) -> None:
        links = {link.route: link for link in self.links}
        while True:
            try:
                *route, data = self.channel.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            link = links.get(tuple(route))
            if link is not None:
                for message in _messages_in(data):
                    self._receive(link, message)

    def _receive(self, link: HostLink, message: StatusMessage) -> None:
        kind, rank, number, data = message
        if kind == _PAGE:
            page, before = zlib.decompress(data), self.board.page(rank)
            self.board.show(rank, page)
            self._pass_on(rank, data, news=wait_of(page) != wait_of(before))
        elif kind == _ASK:
            # Only the newest question is answered, whichever host it comes from.
            if number > self.board.get(rank, fields.ASKED):
                self.board.ask(rank, number)
            link.asked[rank] = number
        elif kind == _ROUND:
            # All messages from before the round are on the board by now, and are answered here.
            self.board.put(fields.ROUND, number)
            self._read_board(whole=True)
            self._add_round(link, StatusMessage(_DONE, number=number))
        elif kind == _DONE:
            link.round = number
        elif kind == _BEAT:
            self.board.ask(rank, number, fields.BEAT)
            self._pass_on_beat(rank)
        elif kind == _LOST:
            self.board.ask(rank, number, fields.LOST)

    def _read_board(self, *, whole: bool = False) -> None:
        """Finds the pages of this host's ranks that have changed: ``whole`` also where only numbers
        have changed that matter to a rank that waits.
        """
        for rank in self.near:
            page, before = self.board.page(rank), self._pages.get(rank, b"")
            if without_beat(page, whole) != without_beat(before, whole):
                self._pages[rank] = page
                self._pass_on(rank, zlib.compress(page, 1), news=wait_of(page) != wait_of(before))
            elif whole and page != before:
                # Of the same reading as the rest of the page: the number belongs to that state.
                self._pages[rank] = page
                self._pass_on_beat(rank)

    def _pass_on(self, rank: int, data: bytes, *, news: bool) -> None:
        if news:
            self._quiet = 0
        self._messages[rank] = data
        for link in self.links:
            if rank not in link.behind:
                link.stale.add(rank)

    def _pass_on_beat(self, rank: int) -> None:
        for link in self.links:
            if rank not in link.behind:
                link.stale_beats.add(rank)

    def _add_changes(self, link: HostLink, *, must: bool = False) -> None:
        """Adds the changes that the other end lacks, if it takes data now, or if it must."""
        if not link.flush() and not must:
            return
        while link.stale:
            rank = link.stale.pop()
            link.add(StatusMessage(_PAGE, rank, data=self._messages[rank]))
        for rank in link.behind:
            asked = self.board.get(rank, fields.ASKED)
            if asked != link.asked.get(rank, 0):
                link.asked[rank] = asked
                link.add(StatusMessage(_ASK, rank, asked))

    def _add_round(self, link: HostLink, message: StatusMessage) -> None:
        self._add_changes(link, must=True)
        while link.stale_beats:
            rank = link.stale_beats.pop()
            page = self._pages.get(rank)
            beat = beat_of(page) if page else self.board.get(rank, fields.BEAT)
            link.add(StatusMessage(_BEAT, rank, beat))
        link.add(message)

    def _begin_round(self) -> None:
        if not any(self.board.get(rank, fields.TICKET) for rank in self.board.ranks):
            return
        slower = min(max(0, self._quiet - _QUICK_ROUNDS), 32)
        period = min(_LONGEST_SECONDS, _PERIOD_SECONDS * _SLOWER**slower)
        now = time.monotonic()
        # A round begins once the last one has ended everywhere: then its answers are complete.
        if now - self._began < period or any(link.round < self._round for link in self.links):
            return
        self._began = now
        self._round += 1
        self._quiet += 1
        self.board.put(fields.ROUND, self._round)
        self._read_board(whole=True)
        for link in self.links:
            self._add_round(link, StatusMessage(_ROUND, number=self._round))

    def _lose(self, link: HostLink) -> None:
        self.links.remove(link)
        # The other hosts have no connection to that one, so they learn it from here.
        for rank in link.behind:
            self.board.ask(rank, link.lost, fields.LOST)
            for other in self.links:
                other.add(StatusMessage(_LOST, rank, link.lost))


def watch_over(connection: socket.socket) -> None:
    """Lets the kernel end a connection whose other end has not answered for the lease."""
    # The other end's kernel answers: a rank that computes, or is stopped for long, does not count
    # as lost.
    seconds = int(lease_seconds())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": seconds // 2 - 1,
        # TCP doubles its pauses: a packet that was sent within the lease is sent again by then. An
        # idle connection, too, ends after this time on Linux.
        "TCP_USER_TIMEOUT": 1000 * (2 * seconds + 2),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_SIOCGIFADDR = 0x8915
_ALL_SECONDS = 30


class HostLinks(NamedTuple):
    """A host's connections to other hosts; none on a rank that is not its host's first."""

    host_names: tuple[str, ...]
    channel: zmq.Socket[bytes] | None
    links: list[HostLink]

    def end_before(self, own: RankState) -> None:
        """Ends the exchange on the connections before these, which writes to the same board."""
        if own.stop_exchange is not None:
            own.stop_exchange()
        own.wake_exchange = own.stop_exchange = None

    def start(self, own: RankState) -> None:
        """Starts a `StatusExchange` on them."""
        own.host_names = self.host_names
        if self.channel is not None:
            near = own.sharing(range(own.size))
            here = next(ranks for ranks in near if own.rank in ranks)
            exchange = StatusExchange(own.board, own.rank, here, self.channel, self.links)
            own.wake_exchange, own.stop_exchange = exchange.wake, exchange.stop
            exchange.start()


def connect_hosts(rank: int, shares: Sequence[int], base: MPI.Intracomm) -> HostLinks:
    """Connects the first ranks of all hosts. Rank 0 accepts connections only from these ranks, and
    only until all have connected. Collective over ``base``. ``shares`` has for every rank the first
    rank with which it shares memory.
    """
    firsts = sorted(set(shares))
    near = [other for other, first in enumerate(shares) if first == shares[rank]]
    key = zmq.curve_keypair()
    # Public keys may be read on the network. A program that can change MPI's data can run code on
    # the ranks anyway.
    keys = base.allgather(key[0])
    listening = Listening(key) if rank == 0 else None
    offer = (addresses(), listening.port) if listening is not None else None
    where, port = base.bcast(offer)
    channel, links, problem = None, list[HostLink](), ""
    try:
        if listening is not None:
            behind = {f: [r for r, of in enumerate(shares) if of == f] for f in firsts[1:]}
            channel, links = listening.channel, listening.accept(keys, behind)
        elif rank in firsts:
            far = [other for other in range(len(shares)) if other not in near]
            channel, frame = join(where, port, key, keys[0], rank)
            links = [HostLink(channel, frame, far)]
    except OSError as error:
        problem = f"rank {rank}, on {socket.gethostname()}: {error}"
    problems = [each for each in base.allgather(problem) if each]
    if problems:
        raise ClusterError(
            "expected that the first rank of each host can connect to rank 0's host, by one of its "
            f"addresses {', '.join(where)}; {problems[0]}. Let hosts connect to each other's ports."
        )
    return HostLinks(tuple(base.allgather(socket.gethostname())), channel, links)


def _channel(context: zmq.Context[zmq.Socket[bytes]], kind: int, key: Key) -> zmq.Socket[bytes]:
    channel = context.socket(kind)
    channel.setsockopt(zmq.LINGER, 0)
    channel.curve_publickey, channel.curve_secretkey = key
    _ends_of(channel)
    return channel


def _ends_of(channel: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """The socket that reports the descriptors of connections that have ended."""
    return channel.get_monitor_socket(zmq.EVENT_DISCONNECTED)


class Listening:
    """Accepts the connections of ranks with known public keys."""

    def __init__(self, key: Key) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # ZeroMQ asks here whether to accept a key, and accepts none once this socket is closed.
        self._asks = context.socket(zmq.REP)
        self._asks.bind("inproc://zeromq.zap.01")
        self.channel = _channel(context, zmq.ROUTER, key)
        self.channel.curve_server = True
        self.channel.setsockopt(zmq.ZAP_DOMAIN, b"allranks")
        self.channel.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.channel.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.port = self.channel.bind_to_random_port("tcp://*")

    def accept(self, keys: Sequence[bytes], behind: Mapping[int, Sequence[int]]) -> list[HostLink]:
        """The links to these ranks, once all have joined. ``keys`` are those of all ranks."""
        known, links = {keys[first] for first in behind}, dict[int, HostLink]()
        poller = zmq.Poller()
        poller.register(self._asks, zmq.POLLIN)
        poller.register(self.channel, zmq.POLLIN)
        end = time.monotonic() + _ALL_SECONDS
        while len(links) < len(behind):
            if time.monotonic() > end:
                missing = sorted(behind.keys() - links.keys())
                raise TimeoutError(f"no connection from {label(missing)} in {_ALL_SECONDS} s")
            for source, _ in poller.poll(100):
                if source is self._asks:
                    version, request, *_, key = self._asks.recv_multipart()
                    code = b"200" if z85.encode(key) in known else b"400"
                    self._asks.send_multipart([version, request, code, b"", b"", b""])
                else:
                    name, frame = self.channel.recv_multipart(copy=False)
                    first, route = int(name.bytes), (name.bytes,)
                    links[first] = HostLink(self.channel, frame, behind[first], route)
                    self.channel.send_multipart([*route, b""])
        self._asks.close()
        return list(links.values())


def join(
    where: Sequence[str], port: int, key: Key, server_key: bytes, rank: int
) -> tuple[zmq.Socket[bytes], zmq.Frame]:
    """The connection to one of these addresses, and its first message. Tries all of them at once.

    Only the rank with the key ``server_key`` can answer.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    for address in where:
        channel = _channel(context, zmq.DEALER, key)
        channel.setsockopt(zmq.IDENTITY, str(rank).encode())
        channel.setsockopt(zmq.RECONNECT_IVL, -1)
        channel.curve_serverkey = server_key
        channel.connect(f"tcp://{address}:{port}")
        channel.send(b"")
        poller.register(channel, zmq.POLLIN)
    answered = poller.poll(_ALL_SECONDS * 1000)
    if not answered:
        context.destroy()
        raise TimeoutError(f"no answer in {_ALL_SECONDS} s")
    channel = answered[0][0]
    for other, _ in list(poller.sockets):
        if other is not channel:
            ends = _ends_of(other)
            other.disable_monitor()
            ends.close()
            other.close()
    return channel, channel.recv(copy=False)


def addresses() -> list[str]:
    """This host's addresses, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
