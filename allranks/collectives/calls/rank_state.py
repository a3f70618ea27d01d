"""The state of a rank, and its view of the other ranks.

Ranks publish their state on a board in shared memory: a page for each rank, written by its owner
(except for `ASKED` to `ROUND`, and `DEAD`) and read by all. A read needs no action of the owner, so
it works for ranks that compute, that are in a C call, and that have left. Pages of ranks on other
hosts are copies.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.thread import _worker
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from allranks.collectives.calls.frames import frames_of_threads
from allranks.collectives.calls.sites import Site, with_source
from allranks.records.ranks import RUNNING, Activity, compact, label

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call, Steps


PAGE = 12288
# `REFUSED` is the number of a call, `REFUSED_OF` its group's number + 1.
ENTERED, LEFT, FAILED, BROKEN, REFUSED, REFUSED_OF = 0, 1, 2, 3, 4, 5
BEGINS, USED = 6, 7
"""Of requests of clients: the epoch that the rank begins, or has begun, for the next one, and the
last epoch in which it has used a communicator, + 1."""
ASKED, LOST, ROUND = 8, 9, 10
"""Written by other ranks: a question, that the host cannot be reached, and on the page of a host's
first rank the number of complete exchanges between all hosts."""
SILENT, ENDED = 1, 2
"""How a host was lost: it does not answer, or its first rank has ended."""
ANSWERED, TICKET, EDGE, BEAT, PID, CLOSED, ASKING, IDLE = range(16, 24)
"""`ASKING` is whether the rank waits for a person; its text `ASKS` is how."""
PORTS, REQUEST, RENEWING, OTHER_TAG, WANTED_TAG, RENEWALS = range(24, 30)
"""The ports on which the rank's MPI listens, 16 bits each; the last request of a client that has
failed there, or was not run, as `RankState.request` has it; the epoch + 1 from which the rank waits
for the next one. Of a receive that waits: the source, + 1, and in the lower 32 bits the tag of a
message with another tag that has come, and the tag for which it waits. How often the rank has begun
to make the communicator of a next epoch, times 2, and 1 more once it has ended the last one."""
ENDED_PARTS = range(32, 48)
"""The `RankState.part` of the last blocking call of each client whose request has ended there, the
newest first. More clients than words do not block at the same time."""
REASON, WHERE, LINE, WAITING, BROKE, ASKS = range(6)
"""Texts. They name lines by file and number (`Site.place`), because pages of other hosts cross the
network; readers add the source (`with_source`)."""
_DIRECTORY, _FD_BITS = 512, 32
_PROGRESS, _GROUPS = 1024, 170
"""Three words for each of this many groups: its number + 1, and this rank's progress in it."""
EPOCH_SHIFT = 40
"""Counters hold the epoch in their upper bits: what an old epoch left counts as not arrived."""
GONE = 1 << 62
"""A scope number above all others: the rank has left for good."""
DEAD = GONE + 1
"""The same for a rank that has died: another rank of its host marks it."""

_TEXTS, _TEXT = 512, 712
_PLACES = *((_TEXTS + kind * _TEXT, _TEXT) for kind in range(ASKS)), (8 * ENDED_PARTS.stop, 128)
"""Where each text begins, and its bytes. The last one is short, and lies before the others."""
BLOCK, PAGE_BYTES = 256, PAGE - 8 * (_PROGRESS - _DIRECTORY)
"""Pages of other hosts are copied in blocks. No other host needs the directory."""
_OTHERS = 8 * ASKED, 8 * ANSWERED
_FIRST = 8 * EDGE


class Board:
    """The pages of all ranks. Pages of other hosts are written by this host's first rank."""

    SEGMENTS, BORROWED = 128, 128
    """The most segments that a rank's window can publish at a time: its own, and memory of other
    libraries. Indices of the latter begin at ``SEGMENTS``; each is used once."""

    def __init__(self, memory: mmap.mmap, ranks: tuple[int, ...], rank: int) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.ranks = ranks
        self._page = {other: index * PAGE for index, other in enumerate(ranks)}
        self._word = {other: index * PAGE // 8 for index, other in enumerate(ranks)}
        self.rank = rank
        self._places: dict[int, int] = {}
        self._noted = -1, 0
        """The group whose progress was noted last, and where."""
        self._placing = threading.Lock()
        """Threads that post requests do not share a place."""
        self._mine = self._word[rank]
        self.put(PID, os.getpid())

    @staticmethod
    def nbytes(ranks: int) -> int:
        return PAGE * ranks

    def move(self, memory: mmap.mmap) -> None:
        # This rank's page is empty there.
        ports = self.get(self.rank, PORTS)
        self.memory, self.words = memory, memoryview(memory).cast("Q")
        self._places, self._noted = {}, (-1, 0)
        self.put(PID, os.getpid())
        self.put(PORTS, ports)

    def __contains__(self, rank: int) -> bool:
        return rank in self._page

    def get(self, rank: int, word: int) -> int:
        return self.words[self._word[rank] + word]

    def put(self, word: int, value: int) -> None:
        self.words[self._mine + word] = value

    def ask(self, rank: int, ticket: int, what: int = ASKED) -> None:
        """Asks a rank for its line, or writes another of the words that other ranks write."""
        self.words[self._word[rank] + what] = ticket

    def text(self, rank: int, kind: int) -> str:
        at, nbytes = _PLACES[kind]
        start = self._page[rank] + at
        length = min(int.from_bytes(self.memory[start : start + 2], "little"), nbytes - 2)
        return self.memory[start + 2 : start + 2 + length].decode("utf-8", "replace")

    def write(self, kind: int, text: str) -> None:
        at, nbytes = _PLACES[kind]
        data = text.encode("utf-8", "replace")[: nbytes - 2]
        data = len(data).to_bytes(2, "little") + data
        start = self._page[self.rank] + at
        self.memory[start : start + len(data)] = data

    def note(self, group: int, agreed: int, finished: int) -> None:
        """Publishes this rank's progress in a group that has no memory of its own. It is written
        before the rank publishes that it has left, and read after that: so a reader sees all calls
        that the rank has made.
        """
        words, (noted, at) = self.words, self._noted
        if noted == group:
            words[at + 1], words[at + 2] = agreed, finished
            return
        places = self._places
        with self._placing:
            place = places.pop(group, -1)
            if place < 0:
                # Where there are too many, the place of the group that has been quiet longest.
                place = len(places) if len(places) < _GROUPS else places.pop(next(iter(places)))
            places[group] = place
        at = self._mine + _PROGRESS + 3 * place
        # No reader finds the group before both numbers are written.
        words[at] = 0
        words[at + 1], words[at + 2] = agreed, finished
        words[at] = group + 1
        self._noted = group, at

    def progress(self, rank: int, group: int) -> tuple[int, int]:
        """The last call that a rank has agreed on in a group, and the last that it finished."""
        start = self._word[rank] + _PROGRESS
        for at in range(start, start + 3 * _GROUPS, 3):
            if self.words[at] == group + 1:
                return self.words[at + 1], self.words[at + 2]
        return 0, 0

    def has_every_group(self, rank: int) -> bool:
        """Whether a rank's page has had a place for each group so far."""
        return self.words[self._word[rank] + _PROGRESS + 3 * (_GROUPS - 1)] == 0

    def publish(self, index: int, fd: int, nbytes: int) -> None:
        at = self._entry(self.rank, index)
        self.words[at + 1] = nbytes
        self.words[at] = index + 1 << _FD_BITS | fd

    def withdraw(self, index: int) -> None:
        """Publishes that a borrowed segment has ended."""
        self.words[self._entry(self.rank, index)] = 0

    def is_published(self, rank: int, index: int) -> bool:
        return self.words[self._entry(rank, index)] >> _FD_BITS == index + 1

    def segment(self, rank: int, index: int) -> tuple[str, int]:
        """Path and size of a segment of a rank's window."""
        at = self._entry(rank, index)
        fd = self.words[at] & (1 << _FD_BITS) - 1
        return f"/proc/{self.get(rank, PID)}/fd/{fd}", self.words[at + 1]

    def _entry(self, rank: int, index: int) -> int:
        """The two words of a segment: its number and descriptor, and its bytes."""
        if index >= self.SEGMENTS:
            index = self.SEGMENTS + (index - self.SEGMENTS) % self.BORROWED
        return self._word[rank] + _DIRECTORY + 2 * index

    def column(self, word: int) -> memoryview:
        """A word of all ranks' pages, in the order of ``ranks``."""
        return self.words[word : len(self.ranks) * PAGE // 8 : PAGE // 8]

    def page(self, rank: int) -> bytes:
        """A rank's page without its directory, and without what other ranks wrote there."""
        start = self._page[rank]
        # The numbers are read first: a rank writes everything else before it publishes that it has
        # left.
        head = bytearray(self.memory[start : start + _TEXTS])
        # Each host has its own copy of the words that other ranks write.
        head[slice(*_OTHERS)] = bytes(_OTHERS[1] - _OTHERS[0])
        texts = self.memory[start + _TEXTS : start + 8 * _DIRECTORY]
        return bytes(head) + texts + self.memory[start + 8 * _PROGRESS : start + PAGE]

    def block(self, rank: int, block: int) -> bytes:
        """A block of a page as `page` returns it, but with what other ranks wrote in block 0."""
        start = self._block_start(rank, block)
        return self.memory[start : start + BLOCK]

    def show(self, rank: int, block: int, data: bytes) -> None:
        """Writes a block of the page of a rank of another host. Of a page block 0 is written last,
        and its words in the order in which that rank wrote them.
        """
        start = self._block_start(rank, block)
        if block:
            self.memory[start : start + BLOCK] = data
            return
        for low, high in ((_FIRST, BLOCK), (_OTHERS[1], _FIRST), (0, _OTHERS[0])):
            self.memory[start + low : start + high] = data[low:high]

    def _block_start(self, rank: int, block: int) -> int:
        at = block * BLOCK
        return self._page[rank] + at + (8 * (_PROGRESS - _DIRECTORY) if at >= 8 * _DIRECTORY else 0)


def waits_in(head: bytes) -> bool:
    """Whether a rank waits in a call, or for the next epoch."""
    return any(any(head[8 * word : 8 * word + 8]) for word in (TICKET, RENEWING))


def urgent_of(head: bytes) -> bytes:
    """What of a page's first block may end the wait of another rank: that this one has left, fails
    or refuses a call, or has answered a question.
    """
    return head[8 * LEFT : 8 * ASKED] + head[8 * ANSWERED : 8 * TICKET]


def wait_of(head: bytes) -> bytes:
    """What of a page's first block matters to a deadlock: the cell, whether the rank has left, its
    wait, and whether that is for input.
    """
    renewing = head[8 * RENEWING : 8 * OTHER_TAG]
    return head[: 8 * ASKED] + head[8 * TICKET : 8 * BEAT] + head[8 * ASKING : 8 * IDLE] + renewing


def lost_word(how: int, through: int) -> int:
    """The word `LOST` of a rank: how the host was lost that it is on, or, if ``through`` is not 0,
    that of rank ``through - 1``, through which its states came.
    """
    return how | through << 2


FINISHED = "finished the cell"
"""The reason of a rank that left its cell without an error."""
DIED = "has died"
"""The reason of a rank whose death was not reported."""
INTERRUPTED = "was interrupted"
"""The reason of an interrupted rank: most likely this rank receives the interrupt soon, too."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The cell or program that this rank runs, and the ranks that run it too."""

    name: str
    number: int
    ranks: frozenset[int] | None


_LOST = {
    SILENT: "{} host {} does not answer",
    ENDED: "the first rank of {} host {} has ended",
}
PROCESS = Scope("the program", 0, None)


class InterruptPipe:
    """Makes Ctrl-C visible outside the main thread.

    Python runs signal handlers only in the main thread, between two of its steps. While a library
    runs a graph there is no such step until the graph ends, and the graph may wait for another rank
    in a thread of that library. Python writes signal numbers to a file descriptor at once, if there
    is one.
    """

    def __init__(self) -> None:
        self._read = -1

    def open(self) -> None:
        """Listens from now on, unless another library does."""
        # Python allows set_wakeup_fd in the main thread only.
        if self._read >= 0 or threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        # set_wakeup_fd needs a write end that does not block, and `received` must not wait.
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before >= 0:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._read = read

    def received(self) -> bool:
        """Whether Ctrl-C was pressed since the last call."""
        try:
            return self._read >= 0 and signal.SIGINT in os.read(self._read, 4096)
        except BlockingIOError:
            return False


interrupt_pipe = InterruptPipe()


_SPIN_SECONDS = 50e-6
_SPINS = 300
"""Polls of a peer's counter that take about `_SPIN_SECONDS`."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"[allranks] {text}\n")


class RankState:
    """One rank's number, hosts, scope and epoch, and the state that it publishes on the board."""

    def __init__(self, rank: int, hosts: tuple[int, ...], board: Board) -> None:
        self.rank, self.size = rank, len(hosts)
        self.hosts = hosts
        """The number of each rank's host, counted in the order of the ranks."""
        self.board = board
        self.host_names: tuple[str, ...] = ()
        """The host name of every rank, if there are several hosts."""
        self.died: dict[int, str] = {}
        """How ranks died that have not been replaced, as text that follows the name."""
        self.shares: tuple[int, ...] = (0,) * len(hosts)
        """For every rank the first rank with which it shares memory."""
        self.scope: Scope = PROCESS
        self.request = 0
        """The request of a client that the rank runs, by a number that all ranks have for it: 32
        bits for the client, and 32 that grow with each request. 0 for none."""
        self.part = 0
        """The same, if the client sends nothing else before all ranks have answered. Else 0."""
        self.client = 0
        """The client whose request the main thread runs, by a number that all ranks have for it. 0
        in a cell."""
        self.clients_of_threads = WeakKeyDictionary[threading.Thread, int]()
        """The same for the request in which a thread was started; of those started since the last
        `serve`, and of a pool's that have had no work then, it is `client`."""
        self.epoch = 0
        self.joined_epoch = 0
        """The epoch in which this process took the place of a dead rank; 0 if it did not."""
        self.lacks_variables = False
        """Whether this process has not been asked yet to restore what was kept in its place."""
        self.divided = False
        """Whether all ranks have made groups of some ranks for a library."""
        self.checks = True
        self.late_seconds = 5.0
        self.numbers: Any = None
        """The `InputNumbers` of the cell; None where nothing is to be found out about them."""
        self.doing = RUNNING
        self.waits: tuple[float, int] | None = None
        """The start of this rank's wait, by `perf_counter`, and a missing rank."""
        self.failed = False
        self.offset_seconds = 0.0
        """The first rank's host's clock minus this host's."""
        self.entered = 0.0
        """When this rank entered its scope, by its own clock."""
        self.held_requests: dict[int, list[Any]] = {}
        """Requests of MPI with their buffers: under way, or left by an interrupt."""
        self.dropped_requests: deque[Any] = deque()
        """Requests that a program has dropped before they had ended."""
        self.notice: Callable[[str], None] = _to_stderr
        self._hinted: set[str] = set()
        self.wake_exchange: Callable[[], None] | None = None
        """Sends this rank's new state to other hosts at once."""
        self.stop_exchange: Callable[[], None] | None = None
        """Ends the exchange of states with other hosts, if this rank is its host's first."""
        self.nudge: Callable[[], object] | None = None
        """Lets MPI progress transfers between other ranks: it does so only within its calls."""
        self.main_thread = threading.get_ident()
        self._gone = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        # With more ranks than cores, a spinning rank takes the core from the rank it waits for.
        self.spin_seconds = _SPIN_SECONDS if self.local_size <= cores else 0.0
        self.pending = 0
        """The number of posted calls that have not ended."""
        self.traffic: set[int] = set()
        """The groups whose communicators this rank has used in this epoch: after an error, messages
        of theirs may be on their way."""
        self.spins = _SPINS if self.local_size <= cores else 0

    @property
    def threaded(self) -> bool:
        """Whether another thread of this rank may call collectives too."""
        return False

    @property
    def calls_in_threads(self) -> bool:
        """Whether a thread of the user has made a collective in this cell."""
        return False

    @property
    def local_ranks(self) -> tuple[int, ...]:
        here = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == here)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    def hint(self, text: str) -> None:
        """Sends a notice, the first time only."""
        if text not in self._hinted:
            self._hinted.add(text)
            self.notice(text)

    @property
    def shared_by_all(self) -> bool:
        return not any(self.shares)

    def sharing(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """These ranks, grouped by the memory that they share."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.shares[rank], []).append(rank)
        return tuple(map(tuple, found.values()))

    def snapshot_number(self) -> int:
        """The number of the snapshot of the board that this rank begins now."""
        if self.shared_by_all:
            return self.board.get(self.rank, BEAT) + 1
        # The last complete exchange between all hosts: a rank whose snapshot has its number has
        # seen everything published before that exchange.
        return self.board.get(self.shares[self.rank], ROUND)

    def seen_by(self, snapshot: int, beat: int) -> int:
        """The first snapshot of a rank, after its ``beat``, that contains this rank's own."""
        return beat + 2 if self.shared_by_all else snapshot + 3

    def enter(self, name: str, ranks: tuple[int, ...] | None, number: int) -> None:
        self.scope = Scope(name, number, None if ranks is None else frozenset(ranks))
        self.entered = perf_counter()
        self.board.put(FAILED, 0)
        self.board.put(ENTERED, number + 1)
        # Drop earlier ones. Last, because a cell may have replaced `os.read`: even then this rank
        # is in the scope, and its `leave` releases the others.
        interrupt_pipe.received()

    def begin(self) -> None:
        self.enter(PROCESS.name, None, PROCESS.number)

    def asks(self, doing: Activity) -> None:
        self.doing = doing
        if doing.state.asks:
            self.board.write(ASKS, str(doing))
        self.board.put(ASKING, int(doing.state.asks))

    def leave(self, reason: str, failed: bool, where: str, *, gone: bool = False) -> None:
        self._gone = gone
        self._show_left(GONE if gone else self.scope.number + 1, reason, failed, where)
        self.scope = PROCESS

    def leave_out(self, number: int, reason: str) -> None:
        """Publishes that this rank does not run a cell that others run. In any thread."""
        self._show_left(number + 1, reason, True, "")

    def _show_left(self, left: int, reason: str, failed: bool, where: str) -> None:
        self.board.write(REASON, reason)
        self.board.write(WHERE, where)
        self.board.put(FAILED, int(failed))
        self.board.put(LEFT, left)
        if self.wake_exchange is not None:
            self.wake_exchange()

    @property
    def last_failed(self) -> bool:
        """Whether this rank's last cell has failed."""
        return bool(self.board.get(self.rank, FAILED))

    def others_run(self) -> bool:
        """Whether another rank runs a cell, as far as this host knows."""
        entered, left = self.board.column(ENTERED), self.board.column(LEFT)
        return any(begun > ended for begun, ended in zip(entered, left, strict=True))

    def depart(self, reason: str, failed: bool, where: str) -> None:
        """Leaves for good; the first reason counts."""
        if self._gone:
            return
        self.failed = failed
        self.leave(reason, failed, where, gone=True)

    def give_up(self, why: str, *, deadlock: bool) -> None:
        """Publishes that this rank takes no further part in this epoch."""
        self.board.write(BROKE, why)
        # The lowest bit marks a deadlock; the epoch counts from 1, because 0 stands for "not
        # broken".
        self.board.put(BROKEN, (self.epoch + 1) * 2 + int(deadlock))
        if self.wake_exchange is not None:
            self.wake_exchange()

    def is_lost(self, rank: int) -> bool:
        return self.has_died(rank) or bool(self.board.get(rank, LOST)) or self._is_cut_off(rank)

    def has_died(self, rank: int) -> bool:
        """Whether a rank has died, by a report to this one or a mark on the board."""
        return rank in self.died or self.board.get(rank, LEFT) == DEAD

    def _death(self, rank: int) -> str:
        return self.died.get(rank, DIED)

    def _is_cut_off(self, rank: int) -> bool:
        """Whether the first rank of this host, which received the states of that one, has died."""
        first = self.shares[self.rank]
        return self.has_died(first) and self.shares[rank] != first

    @contextmanager
    def renewing(self, place: str) -> Iterator[None]:
        """Within, this rank waits for the next epoch, in a call of ``renew()`` at a line."""
        self.board.write(WAITING, f"renew() at {place}")
        try:
            self.board.put(RENEWING, self.epoch + 1)
            if self.wake_exchange is not None:
                self.wake_exchange()
            yield
        finally:
            self.board.put(RENEWING, 0)

    def renewal(self, rank: int) -> tuple[int, str] | None:
        """Why a rank makes no further call in this epoch, as `departure`. It may still move data of
        the calls that it has made.
        """
        if self.board.get(rank, RENEWING) != self.epoch + 1:
            return None
        return 2, f"has called {with_source(self.board.text(rank, WAITING))}"

    def has_left(self, rank: int, epoch: int) -> bool:
        """Whether a rank takes no further part in an epoch. If it is over, no rank does."""
        if self._gone or self.epoch != epoch:
            return True  # all ranks have met since
        board = self.board
        broken = board.get(rank, BROKEN) >> 1 == epoch + 1
        return broken or board.get(rank, LEFT) >= GONE or self.is_lost(rank)

    def while_one_has_left(self, call: Call, epoch: int) -> Steps[None]:
        """Ends at once, unless a rank has left the epoch before it had finished its part of a call:
        then the watch ends this wait with `RankLeft`.
        """
        call.stage += 1
        while any(self.has_left(rank, epoch) for rank in call.unfinished()):
            yield call

    def departure(self, rank: int) -> tuple[int, str] | None:
        """Why a rank will never arrive, as text that follows its name; None while it may.

        The number orders reasons: an exception explains more than a later departure because of it.
        """
        # The notebook reports deaths, but it may be what waits for the answer to this request.
        if self.request and rank not in self.died and self._has_ended(rank):
            self.died[rank] = DIED
        if self.has_died(rank):
            return -1, self._death(rank)
        if (left := self.exit_of(rank)) is not None:
            return left
        board = self.board
        if self.has_failed(rank):
            return 0, "has failed in this request, or in one before it"
        if lost := board.get(rank, LOST):
            through = (lost >> 2) - 1
            if through < 0:
                return 0, "cannot be reached: " + _LOST[lost].format("its", self.host_names[rank])
            between = _LOST[lost & 3].format("the", self.host_names[through])
            return 2, f"cannot be reached: {between}, which reported its state"
        if self._is_cut_off(rank):
            first = self.shares[self.rank]
            ended = f"rank {first}, which reported its state, {self._death(first)}"
            return 2, f"cannot be reached: {ended}"
        broken = board.get(rank, BROKEN) >> 1 == self.epoch + 1
        return (2, with_source(board.text(rank, BROKE))) if broken else None

    def exit_of(self, rank: int) -> tuple[int, str] | None:
        """Why a rank is not in this rank's scope, or not any more, as `departure`; None where it
        may still come.
        """
        scope = self.scope
        if scope.ranks is not None and rank not in scope.ranks:
            return 1, f"does not run {scope.name} (-r {compact(scope.ranks, '-').replace(' ', '')})"
        board = self.board
        # Numbers on the board are one higher than the scope's: 0 means "never".
        here = scope.number + 1
        if board.get(rank, LEFT) >= (here if scope.number else GONE):
            reason, where = board.text(rank, REASON), board.text(rank, WHERE)
            if reason == FINISHED:
                cell = scope.name.removeprefix("cell ")
                return 1, FINISHED if cell == "cell" else f"finished {cell}"
            site = Site.of(where)
            at = f" at {site.in_cell if scope.number else site}" if site else ""
            first_line = reason.partition("\n")[0]
            why = f" ({first_line})" if reason else ""
            return 0 if board.get(rank, FAILED) else 1, f"has left {scope.name}{at}{why}"
        if scope.number > 0 and board.get(rank, ENTERED) > here:
            return 1, f"has left {scope.name}"
        return None

    def find_dead(self) -> list[int]:
        """Marks the ranks of this host that have died, as other hosts may have no report of them;
        returns those of all hosts that are known by a mark alone. For any thread.
        """
        # First: if this rank moves to another board meanwhile, no mark may come there.
        marks = self.board.column(LEFT)
        for rank in range(self.size):
            if marks[rank] != DEAD and self._has_ended(rank):
                marks[rank] = DEAD
        return [rank for rank in range(self.size) if rank not in self.died and self.has_died(rank)]

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended, if it is one that this rank can look for."""
        if self.shares[rank] != self.shares[self.rank]:
            return False
        try:
            os.kill(self.board.get(rank, PID), 0)
        except OSError as error:  # another user's process may have its number now
            return isinstance(error, ProcessLookupError)
        return False

    def has_failed(self, rank: int) -> bool:
        """Whether another rank has left the request that this one runs by an error, or drops it."""
        last = self.board.get(rank, REQUEST)
        return self.request > 0 and last >> 32 == self.request >> 32 and last >= self.request

    def serve(self, client: int) -> None:
        """The main thread begins a request of this client; with 0 it has ended it."""
        # Which thread of a pool gets work, or whether another one is started, depends on time.
        tops = ((ident, frame.f_code) for ident, frame in frames_of_threads().items())
        idle = {ident for ident, code in tops if code is _worker.__code__}
        for thread in threading.enumerate():
            if thread.ident in idle:
                self.clients_of_threads.pop(thread, None)
            else:
                self.clients_of_threads.setdefault(thread, self.client)
        self.client = client

    def end_part(self, part: int) -> None:
        """Publishes that this rank has ended its part of a client's blocking call.

        What it runs from now on, for other clients or in a cell, is no part of that call.
        """
        known = [self.board.get(self.rank, word) for word in ENDED_PARTS]
        others = (one for one in known if one >> 32 != part >> 32)
        for word, one in zip(ENDED_PARTS, (part, *others), strict=False):
            self.board.put(word, one)

    def omission(self, rank: int, call: Call) -> tuple[int, str] | None:
        """Why a rank makes no collective call any more for which this one waits in a request of a
        client, as `departure`: it has done its part of the same call.

        A message may come later, and another thread may wait for what an earlier request has begun.
        """
        if not call.every or threading.get_ident() != self.main_thread:
            return None
        parts = (self.board.get(rank, word) for word in ENDED_PARTS)
        return (1, "finished the request") if self.part > 0 and self.part in parts else None

    def has_repeated(self, call: Call) -> bool:
        """Whether a call of the same line has ended in this scope: all members made it too."""
        return False

    def advice(self, rank: int, why: str) -> str:
        """What to do about a rank that will never arrive; "" if it makes other calls.

        ``why`` is the text of its `departure`.
        """
        if self.has_died(rank) or self.has_died(self.shares[rank]):
            return "Run the cell again once the dead rank has been replaced."
        if self.is_lost(rank):
            return "Check that host and its network, and start the ranks again."
        runs = self.scope.ranks
        if runs is not None and rank not in runs:  # it may have failed in an earlier cell
            other = "leave out this call"
            if len(runs) > 1:
                other = "use a process set of the ranks that run it"
            return (
                f"The cell runs on {label(sorted(runs))} only, the other ranks take no part. "
                f"Run it on all ranks (%%distributed without -r), or {other}."
            )
        failed = bool(self.board.get(rank, FAILED)) and not self.request  # in its last cell
        if self.has_failed(rank) or (failed and INTERRUPTED not in why):
            return f"Correct the error of rank {rank}."
        return ""

    def refusal(self, rank: int, call: Call) -> tuple[int, str] | None:
        """Why a rank will not do its part of a call at which it has arrived, as `departure`."""
        board = self.board
        of, number = board.get(rank, REFUSED_OF), board.get(rank, REFUSED)
        refused = of == call.members.number + 1 and number == call.number
        return (0, with_source(board.text(rank, BROKE))) if refused else None

    def deadlocked(self, rank: int) -> str | None:
        deadlocked = self.board.get(rank, BROKEN) == (self.epoch + 1) * 2 + 1
        return self.board.text(rank, BROKE) if deadlocked else None
