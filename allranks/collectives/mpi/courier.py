"""What ranks of several hosts know of each other: the board's pages, carried between hosts.

The first rank of each host has a thread that sends what has changed on its ranks' pages and shows
what others send, over one connection to the first rank of all, which passes on what it hears. It
needs no MPI and no rank's cooperation. The kernels of both ends notice a host that is cut off.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.board import Board
from allranks.collectives.mpi.pages import carried, shown

_PERIOD_SECONDS, _IDLE_SECONDS = 0.05, 0.5
_LOST_SECONDS = 10
_HEAD = struct.Struct("=BIQI")
_PAGE, _ASK, _ASK_ELSE, _ROUND, _DONE, _LOST = range(6)
_ASKS = {_ASK: fields.ASKED, _ASK_ELSE: fields.ASKED_ELSE}


class Letter(NamedTuple):
    """A message: what kind, about which rank, a number, and a page."""

    kind: int
    rank: int = 0
    number: int = 0
    data: bytes = b""


class Link:
    """A connection to another host's first rank, and the ranks that are behind it."""

    def __init__(self, connection: socket.socket, behind: Sequence[int]) -> None:
        watch_over(connection)
        connection.setblocking(False)
        self.connection, self.behind = connection, frozenset(behind)
        self.lost = 0
        """`SILENT` or `ENDED` once nothing goes this way any more."""
        self.round = 0
        """The last round that the other end has done its part of."""
        self.stale: set[int] = set()
        """The ranks whose pages the other end does not show as they are."""
        self.asked: dict[tuple[int, int], int] = {}
        self._in, self._out = bytearray(), bytearray()

    def post(self, letter: Letter) -> None:
        """Sends a letter, or as much of it as goes now."""
        self._out += _HEAD.pack(letter.kind, letter.rank, letter.number, len(letter.data))
        self._out += letter.data
        self.flush()

    def flush(self) -> bool:
        """Sends what is left; True where that was all."""
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

    def receive(self) -> list[Letter]:
        """The letters that have come."""
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
            found.append(Letter(kind, rank, number, bytes(self._in[_HEAD.size :][:size])))
            del self._in[: _HEAD.size + size]
        return found


class Courier(threading.Thread):
    """The thread of one host's first rank.

    Args:
        board: the host's.
        first: this rank.
        near: the ranks whose pages are written on this host.
        links: one to the first rank of all; there one to each other host.
    """

    def __init__(self, board: Board, first: int, near: Sequence[int], links: list[Link]) -> None:
        super().__init__(name="allranks-courier", daemon=True)
        self.board, self.first, self.near, self.links = board, first, tuple(near), links
        self._round, self._began = 0, 0.0
        self._news = True
        self._pages: dict[int, bytes] = {}
        """What the ranks of this host have told last."""
        self._letters: dict[int, bytes] = {}
        """The same as it is sent, and what has come of ranks of other hosts."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Has what has changed sent at once."""
        try:
            os.write(self._woken, b"\0")
        except OSError:
            return  # it is about to look anyway

    def run(self) -> None:
        """Carries letters as long as there is anybody to carry them to."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
            while self.links:
                for key, _ in selector.select(_PERIOD_SECONDS):
                    if key.data is None:
                        os.read(self._wake, 4096)
                        continue
                    for letter in key.data.receive():
                        self._take(key.data, letter)
                self._look()
                for link in self.links:
                    self._tell(link)
                for link in [link for link in self.links if link.lost]:
                    selector.unregister(link.connection)
                    self._lose(link)
                if self.first == 0:
                    self._go_round()

    def _take(self, link: Link, letter: Letter) -> None:
        kind, rank, number, data = letter
        if kind == _PAGE:
            self.board.show(rank, shown(zlib.decompress(data)))
            self._pass_on(rank, data)
        elif kind in _ASKS:
            # The newest question is the one to be answered, whichever host it comes from.
            if number > self.board.get(rank, _ASKS[kind]):
                self.board.ask(rank, number, _ASKS[kind])
            link.asked[(rank, kind)] = number
        elif kind == _ROUND:
            # What was sent before the round began is shown by now, and is answered here.
            self.board.put(fields.ROUND, number)
            self._look()
            self._tell(link, must=True)
            link.post(Letter(_DONE, number=number))
        elif kind == _DONE:
            link.round = number
        elif kind == _LOST:
            self.board.ask(rank, number, fields.LOST)

    def _look(self) -> None:
        """Notes what the ranks of this host have told since it looked last."""
        for rank in self.near:
            page = self.board.page(rank)
            if page != self._pages.get(rank):
                self._pages[rank] = page
                self._pass_on(rank, zlib.compress(carried(page), 1))

    def _pass_on(self, rank: int, data: bytes) -> None:
        self._news = True
        self._letters[rank] = data
        for link in self.links:
            if rank not in link.behind:
                link.stale.add(rank)

    def _tell(self, link: Link, *, must: bool = False) -> None:
        """Sends what the other end does not show yet: where it takes anything, or where it must."""
        if not link.flush() and not must:
            return
        while link.stale:
            rank = link.stale.pop()
            link.post(Letter(_PAGE, rank, data=self._letters[rank]))
        for rank in link.behind:
            for kind, word in _ASKS.items():
                asked = self.board.get(rank, word)
                if asked != link.asked.get((rank, kind), 0):
                    link.asked[(rank, kind)] = asked
                    link.post(Letter(kind, rank, asked))

    def _go_round(self) -> None:
        """Begins the next round once all have done their part of the last one."""
        now = time.monotonic()
        quiet = _PERIOD_SECONDS if self._news else _IDLE_SECONDS
        if now - self._began < quiet or any(link.round < self._round for link in self.links):
            return
        self._began, self._news = now, False
        self._round += 1
        self.board.put(fields.ROUND, self._round)
        self._look()
        for link in self.links:
            self._tell(link, must=True)
            link.post(Letter(_ROUND, number=self._round))

    def _lose(self, link: Link) -> None:
        self.links.remove(link)
        link.connection.close()
        for rank in link.behind:
            self.board.ask(rank, link.lost, fields.LOST)
            for other in self.links:
                other.post(Letter(_LOST, rank, link.lost))


def watch_over(connection: socket.socket) -> None:
    """Has the kernel end a connection whose other end has not answered for ten seconds.

    The other end's kernel answers: a rank that computes, or is stopped for long, is not taken for
    one that is lost.
    """
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
