"""The states of ranks between hosts: the protocol, without connections.

The first rank of each host has a `StatusExchange`. The exchanges form a tree, with the first rank
of all as its root, and each copies pages of its host's ranks to the others' boards. States cross
the network only while a rank waits: then others need them.

Changes pass from host to host. What may end a wait, a question and its answer pass at once; other
changes are collected for a moment. Progress in calls, and the numbers that confirm a deadlock, pass
in rounds. A round goes down the tree and back up: each host sends its changes, and those of the
hosts below it, before it reports that the round is complete; the next round brings them to all.
Without news rounds become rare.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.rank_state import BLOCK, Board, urgent_of, wait_of, waits_in

PERIOD_SECONDS = 0.05
_QUICK_ROUNDS, _SLOWER, _LONGEST_SECONDS = 12, 1.5, 30.0
"""After this many rounds without news, each begins later than the one before, by this factor. Three
rounds without news confirm a deadlock, once all of its ranks have looked."""
_PAUSE, _LONGEST_PAUSE_SECONDS = 4, 0.5
"""A round of many ranks takes long. The pause until the next one is this many times as long."""
_HEAD = struct.Struct("=BIQI")
_PAGE, _ASK, _ROUND, _DONE, _LOST = range(5)
ROUNDS = _ROUND, _DONE
"""The kinds of messages that every round has; their number is that of the round."""
_NO_NEWS, _NEWS, _URGENT = range(3)
CHILDREN = 8
"""Largest number of hosts that a host is connected to further down the tree. A host between others
that is lost separates them, so up to nine hosts have none."""


def children(host: int, hosts: int) -> range:
    """The hosts below one in the tree, by their numbers."""
    first = host * CHILDREN + 1
    return range(first, min(first + CHILDREN, hosts))


def subtree(host: int, hosts: int) -> list[int]:
    found = [host]
    for one in found:
        found += children(one, hosts)
    return found


def spread(leaders: int) -> list[tuple[int, int]]:
    """Returns the messages by which each leader gets the parts of all leaders: of each message, the
    distance to its receiver and its number of parts. A leader receives from the same distance on
    the other side. There are as many messages as the logarithm of the number of leaders.

    Source: Bruck et al., Efficient Algorithms for All-to-All Communications, 1997 (allgather).
    """
    steps, distance = [], 1
    while distance < leaders:
        steps.append((distance, min(distance, leaders - distance)))
        distance *= 2
    return steps


class StatusMessage(NamedTuple):
    """A message: its kind, the rank that it is about, a number, and part of a page."""

    kind: int
    rank: int = 0
    number: int = 0
    data: bytes = b""


class HostLink:
    """One end of the connection to another host in the tree. ``at`` are the ranks of that host,
    ``behind`` all ranks that are reached through it.
    """

    def __init__(self, at: Sequence[int], behind: Sequence[int]) -> None:
        self.at, self.behind = frozenset(at), frozenset(behind)
        self.lost = 0
        """`SILENT` or `ENDED` once the connection is lost."""
        self.round = 0
        """The last round that the other end has completed."""
        self.stale: set[tuple[int, int]] = set()
        """The blocks of ranks' pages of which the other end has an old copy."""
        self.questions: dict[int, int] = {}
        """New questions to ranks behind this link."""
        self.news = _NO_NEWS
        """How soon the changes must be sent."""
        self.sent_at = 0.0
        # One frame for all messages, to keep their order.
        self._out = bytearray()

    def add(self, message: StatusMessage) -> None:
        self._out += _HEAD.pack(message.kind, message.rank, message.number, len(message.data))
        self._out += message.data

    def flush(self) -> None:
        """Sends what was added, unless the other end does not take it now."""
        if self._out and self.send(zlib.compress(self._out, 1)):
            self._out.clear()

    def send(self, data: bytes) -> bool:
        """Sends a frame; False if the other end does not take it now."""
        raise NotImplementedError


def messages_in(frame: bytes) -> Iterator[StatusMessage]:
    data, start = zlib.decompress(frame), 0
    while start < len(data):
        kind, rank, number, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size + size
        yield StatusMessage(kind, rank, number, data[start - size : start])


class StatusExchange:
    """One host's part of the protocol. ``near`` are the ranks of the host, ``above`` the link to
    the host above it in the tree; the root has none.
    """

    def __init__(
        self,
        board: Board,
        near: Sequence[int],
        above: HostLink | None,
        below: Sequence[HostLink],
    ) -> None:
        self.board, self.near, self.above, self.below = board, tuple(near), above, list(below)
        self.round, self._began, self._took = 0, 0.0, 0.0
        self._open = False
        """Whether this host has not completed the round."""
        self._quiet = 0
        """Rounds since a rank has begun or ended a wait, or left."""
        self._pages = dict.fromkeys(near, bytes(fields.PAGE_BYTES))
        """The pages of this host's ranks, as last read."""
        self._asked = self.board.column(fields.ASKED).tolist()

    @property
    def links(self) -> list[HostLink]:
        return [*([self.above] if self.above else ()), *self.below]

    def step(self, now: float) -> None:
        """Sends what is due. Called often, and after each frame that was received."""
        for link in [link for link in self.links if link.lost]:
            self._lose(link)
        self._read_news()
        for link in self.links:
            if link.news == _URGENT or (link.news and now - link.sent_at >= PERIOD_SECONDS):
                link.sent_at = now
                self._add_changes(link)
        if self._open and all(link.round >= self.round for link in self.below):
            self._open = False
            self._took = now - self._began
            if self.above:
                self._add_changes(self.above)
                self.above.add(StatusMessage(_DONE, number=self.round))
        if not self.above and not self._open and self._waits():
            self._begin_round(now)
        for link in self.links:
            link.flush()

    def receive(self, link: HostLink, frame: bytes) -> None:
        for message in messages_in(frame):
            self._receive(link, message)

    def _receive(self, link: HostLink, message: StatusMessage) -> None:
        kind, rank, number, data = message
        if kind == _PAGE:
            # Of a page this block comes last, and the others go with it.
            news = self._news_of(self.board.block(rank, 0), data) if number == 0 else _NO_NEWS
            self.board.show(rank, number, data)
            self._pass_on(rank, number, news, link)
        elif kind == _ASK:
            # Only the newest question is answered, whichever host it comes from.
            if number > self.board.get(rank, fields.ASKED):
                self.board.ask(rank, number)
        elif kind == _ROUND:
            # All messages from before the round are on the board by now, and are answered here.
            self._start_round(number)
        elif kind == _DONE:
            link.round = number
        elif kind == _LOST:
            self._publish_lost(rank, number, link)

    def _read_news(self) -> None:
        """Reads this host's pages if another host may need what has changed there."""
        board = self.board
        asked = board.column(fields.ASKED).tolist()
        if asked != self._asked:
            self._pass_on_questions(asked)
        # A rank that has left for good may be awaited outside of any call.
        if not self._waits() and all(board.get(r, fields.LEFT) < fields.GONE for r in self.near):
            return
        for rank in self.near:
            if self._news_of(self._pages[rank], board.block(rank, 0)):
                self._read_page(rank)

    def _news_of(self, before: bytes, after: bytes) -> int:
        """How soon other hosts need a change of a page; the arguments may be its first blocks."""
        waits = wait_of(before) != wait_of(after)
        if waits:
            self._quiet = 0
        if urgent_of(before) != urgent_of(after):
            return _URGENT
        return _NEWS if waits else _NO_NEWS

    def _waits(self) -> bool:
        """Whether any rank waits, as far as this host, or the others of this one, know."""
        board = self.board
        if any(board.column(fields.TICKET)) or any(board.column(fields.RENEWING)):
            return True
        return any(waits_in(page) for page in self._pages.values())

    def _begin_round(self, now: float) -> None:
        slower = min(max(0, self._quiet - _QUICK_ROUNDS), 32)
        period = min(_LONGEST_SECONDS, PERIOD_SECONDS * _SLOWER**slower)
        pause = min(_PAUSE * self._took, _LONGEST_PAUSE_SECONDS)
        if now - self._began >= max(period, pause):
            self._began = now
            self._quiet += 1
            self._start_round(self.round + 1)

    def _start_round(self, number: int) -> None:
        self.round, self._open = number, True
        self.board.put(fields.ROUND, number)
        for rank in self.near:
            self._read_page(rank)
        for link in self.below:
            self._add_changes(link)
            link.add(StatusMessage(_ROUND, number=number))

    def _read_page(self, rank: int) -> None:
        page, known = self.board.page(rank), self._pages[rank]
        self._pages[rank] = page
        news = self._news_of(known, page)
        for at in range(0, len(page), BLOCK):
            if page[at : at + BLOCK] != known[at : at + BLOCK]:
                self._pass_on(rank, at // BLOCK, news)

    def _pass_on_questions(self, asked: list[int]) -> None:
        before, self._asked = self._asked, asked
        for rank, old, new in zip(self.board.ranks, before, asked, strict=True):
            for link in self.links if new != old else ():
                if rank in link.behind:
                    link.questions[rank] = new
                    link.news = _URGENT

    def _pass_on(self, rank: int, block: int, news: int, source: HostLink | None = None) -> None:
        for link in self.links:
            if link is not source:
                link.stale.add((rank, block))
                link.news = max(link.news, news)

    def _add_changes(self, link: HostLink) -> None:
        # Of a page the numbers come last: a rank writes everything else before it publishes that it
        # has left.
        for rank, block in sorted(link.stale, reverse=True):
            link.add(StatusMessage(_PAGE, rank, block, self._block(rank, block)))
        for rank, number in link.questions.items():
            link.add(StatusMessage(_ASK, rank, number))
        link.stale.clear()
        link.questions.clear()
        link.news = _NO_NEWS

    def _block(self, rank: int, block: int) -> bytes:
        if rank in self._pages:
            # Of the same reading as the rest of the page.
            return self._pages[rank][block * BLOCK :][:BLOCK]
        return self.board.block(rank, block)

    def _lose(self, link: HostLink) -> None:
        if link is self.above:
            self.above = None  # what is left below is a tree of its own
        else:
            self.below.remove(link)
        for rank in link.behind:
            through = 0 if rank in link.at else min(link.at) + 1
            self._publish_lost(rank, fields.lost_word(link.lost, through))

    def _publish_lost(self, rank: int, word: int, source: HostLink | None = None) -> None:
        if self.board.get(rank, fields.LOST):
            return
        self.board.ask(rank, word, fields.LOST)
        for link in self.links:
            if link is not source:
                link.add(StatusMessage(_LOST, rank, word))
