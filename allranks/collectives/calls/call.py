"""One collective call of one rank, from its arrival to its end, and the transport that moves its
data.

An operation is a generator that yields whenever it must wait (`Steps`). `drive` decides how to
spend that time, reacts to Ctrl-C between two steps, and asks the watch whether the wait can still
end. All moves of a call go through `Call.moved`: the transport prepares, all ranks agree, and the
transport moves the data.

The schedule of a wait (spin 50 µs, yield the core until 1 ms, then sleep 5 % of the time waited,
between 50 µs and 2 ms) was measured: 1.0–1.5 times the time of a blocking call if no rank is late,
4 % of a core while one is (8 % with sleeps of at most 0.5 ms). Sleeping at once costs 8–35 times,
unless the awaited rank ends the sleep (`Awaited.sleep`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from time import perf_counter, sleep
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.deadlocks import OtherTag
from allranks.collectives.calls.sites import SITES, Site, find
from allranks.collectives.calls.specs import Packed, Spec, pack
from allranks.records.ranks import label

T = TypeVar("T")

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 1e-3
ATTEND_SECONDS = 0.02
SHORTEST_SLEEP, LONGEST_SLEEP, SHARE = 5e-5, 2e-3, 0.05


class Awaited(Protocol):
    """The object that an operation yields."""

    stage: int
    """Changes with each new wait, which then spins again."""
    longest_sleep: float
    """Seconds; short while MPI moves data, because MPI progresses only within its calls."""
    sleep: Callable[[float], None] | None
    """Sleeps until the awaited rank arrives, for at most these seconds; None where it cannot be
    ended so."""


Steps = Generator[Awaited, None, T]
Attend = Callable[[Awaited, float], None]
"""Called every 20 ms of a long wait with the awaited object and the seconds waited so far; raises
if the wait can never end."""

# macOS has no sched_yield.
yield_core = getattr(os, "sched_yield", lambda: sleep(0))


class Pause:
    """The schedule of one wait; each call spends a moment of it."""

    __slots__ = ("_began", "_spin_seconds")

    def __init__(self, spin_seconds: float = SPIN_SECONDS) -> None:
        self._spin_seconds = spin_seconds
        self._began = perf_counter()

    def __call__(
        self, longest_sleep: float = LONGEST_SLEEP, until: Callable[[float], None] | None = None
    ) -> float:
        """Spins, yields the core or sleeps; returns the seconds waited before. ``until`` is a
        sleep that another rank ends, which replaces the yields too.
        """
        waited = perf_counter() - self._began
        if waited > (YIELD_SECONDS if until is None else self._spin_seconds):
            (until or sleep)(min(longest_sleep, max(SHORTEST_SLEEP, waited * SHARE)))
        elif waited > self._spin_seconds:
            yield_core()
        return waited


def drive(steps: Steps[T], attend: Attend, spin_seconds: float = SPIN_SECONDS) -> T:
    try:
        awaited = next(steps)
        while True:
            stage, attended, pause = awaited.stage, 0.0, Pause(spin_seconds)
            while awaited.stage == stage:
                waited = pause(awaited.longest_sleep, awaited.sleep)
                if waited - attended > ATTEND_SECONDS:
                    attended = waited
                    attend(awaited, waited)
                awaited = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


P = ParamSpec("P")
_PATIENCE_SECONDS, _SLOWEST_BYTES_A_SECOND = 2.0, 5e6
ARRAY_TAGS = 1 << 14
"""Added to the tags of `send` and `recv`: receives of any tag on `comm` do not match them."""
Place = tuple[int, int, int]
"""Segments of the window, offset of the input, offset of the output; segment 0 is none."""
NOWHERE: Place = (0, 0, 0)


class Offer(NamedTuple):
    """One member's contribution to a move: computed by its transport before the ranks agree."""

    nbytes: int = 0
    place: Place = NOWHERE
    """Where its input and output are in its window."""
    copied: bool = False
    """Whether its input is copied to its output, chunk by chunk, before it is reduced."""
    answered: int = 0
    """On a rank that has joined: the calls of other ranks that it has taken part in since."""


NOTHING = Offer()
Prepared = tuple[Offer, Steps[T] | Callable[[], T]]
"""The offer of a prepared move, and the rest of it: steps, or a function if it never waits."""
Move = Generator[Any, None, T]
"""A move in one generator: it yields its `Offer` first, and continues as steps."""


def prepared(move: Callable[P, Move[T]]) -> Callable[P, Prepared[T]]:
    """Turns a `Move` into a function that runs it up to its offer."""

    @wraps(move)
    def prepare(*arguments: P.args, **options: P.kwargs) -> Prepared[T]:
        steps = move(*arguments, **options)
        return next(steps), steps

    return prepare


class Members:
    """The ranks of a group, as seen by one of them."""

    __slots__ = ("me", "number", "rank", "ranks", "size")

    def __init__(self, number: int, ranks: tuple[int, ...], rank: int) -> None:
        self.number, self.ranks, self.rank = number, ranks, rank
        self.me, self.size = ranks.index(rank), len(ranks)
        """This rank's index among the members, and their number."""


class Agreement(Protocol):
    """Compares the calls of a group's members."""

    members: Members

    def arrive(self, call: Call, offer: Offer) -> bool:
        """Publishes this rank's call; True if all arrive and agree within microseconds. Raises
        `CollectiveMismatch` if the calls differ, before data moves.
        """

    def wait(self, call: Call, offer: Offer) -> Steps[None]:
        """After `arrive` returned False: ends when every member has arrived with the same call.
        Raises `CollectiveMismatch` as `arrive`.
        """

    def offers(self, call: Call) -> list[Offer]:
        """The offers of all members, after all have agreed."""

    def barrier(self, call: Call) -> Steps[None]:
        """Ends when the data that the members published after they agreed can be read."""

    def missing(self, call: Call) -> tuple[int, ...]: ...

    def unfinished(self, number: int) -> tuple[int, ...]:
        """The other ranks that have not finished their part of the call of this number."""

    def sites(self, call: Call) -> dict[int, Site]:
        """The line of each member that has arrived."""

    def finish(self, call: Call) -> None:
        """Records that this rank has done its part of a call."""

    def renew(self) -> None: ...


class Call:
    """One call of one rank: its state, its result, and the texts for its errors."""

    grace = 0.0
    """Seconds in which a message of a rank that has left may still arrive."""
    min_polls = 1
    """The fewest polls for such a message: this process may have been suspended meanwhile."""
    ordered = every = True
    """False for send and recv, which are not part of the order of calls, nor need all ranks."""

    # Class attributes: most calls never set them, and every collective makes a call.
    steps: Steps[Any]
    transport = ""
    longest_sleep = LONGEST_SLEEP
    sleep: Callable[[float], None] | None = None
    number = stage = 0
    """``number`` is its position among the calls of its group, unique over epochs."""
    last = ended = 0.0
    last_rank = -1
    began = uncounted = 0.0
    ready_at = -1.0
    attended: tuple[float, float] | None = None
    """Seconds of waiting and of transfer, for a call that overlapped with others."""
    left_at = -1.0
    polls = 0
    """Polls since a rank that it needs was seen to have left."""
    deadlock = ""
    other_tag: Callable[[], OtherTag | None] | None = None
    """Looks for a message with another tag than the one that a receive waits for."""
    peers: tuple[int, ...] = ()
    """Of a `PointCall`: the rank that can end it, or those of which any may."""
    posted = done = False
    carry: Any = None
    """Data that travels with the agreement between hosts: the values of small arrays."""
    ready: Any = None
    """For arrays on a GPU: the event at which the caller's stream has produced them."""
    late: Any = None
    """The reports about late ranks: `watch.Late`, once there has been a wait."""
    behind: Call | None = None
    """A call of another process set that must end before this one continues."""
    queued: list[Any] | None = None
    """For a call whose end the caller's stream waits for, and not the host: the parts of its work
    on the GPU, as `Device.queue` notes them. Empty once the GPU has ended the call."""
    device_seconds: float | None = None
    """Seconds by the GPU's clock; None without a GPU."""
    result: Any = None
    held: Any = None
    """Arrays that other members may write to."""
    error: BaseException | None = None

    def __init__(
        self, agreement: Agreement, packed: Packed, name: str | None = None, nbytes: int = 0
    ) -> None:
        self.agreement, self.packed, self.name, self.nbytes = agreement, packed, name, nbytes
        try:
            # The user's line is mostly the next but one, where a public function was called.
            above = sys._getframe(2)
            known = SITES.get(id(above.f_code) + above.f_lasti)
        except ValueError:
            known = None
        self.site = known[0] if known else find(sys._getframe(1))
        # Last: the search for the line is no time of the call.
        self.started = perf_counter()

    def moved(self, move: Callable[..., Prepared[T]], *arguments: Any, **options: Any) -> Steps[T]:
        """Prepares a move, waits until all have agreed, and moves the data."""
        offer, rest = move(self, *arguments, **options)
        # A call with several moves agrees on the first only.
        if self.posted:
            yield from self.agreement.barrier(self)
        elif not self.agreement.arrive(self, offer):
            yield from self.agreement.wait(self, offer)
        return rest() if callable(rest) else (yield from rest)

    def waited(self, offer: Offer, rest: Steps[T] | Callable[[], T]) -> Steps[T]:
        """The rest of a prepared move, if not all ranks arrived at once."""
        yield from self.agreement.wait(self, offer)
        return rest() if callable(rest) else (yield from rest)

    def agreed(self, offer: Offer = NOTHING) -> Steps[None]:
        if not self.agreement.arrive(self, offer):
            yield from self.agreement.wait(self, offer)

    @property
    def spec(self) -> Spec:
        return self.packed.spec

    @property
    def moving(self) -> bool:
        return self.last_rank >= 0

    @property
    def members(self) -> Members:
        return self.agreement.members

    @property
    def needs(self) -> str:
        return f"all of {label(self.members.ranks)}"

    def missing(self) -> tuple[int, ...]:
        return self.agreement.missing(self)

    def unfinished(self) -> tuple[int, ...]:
        """The other ranks that have not finished their part, if all have arrived."""
        # A move through shared memory ends with an arrival, which reports that it is done.
        return () if self.transport == "shared" else self.agreement.unfinished(self.number)

    def sites(self) -> dict[int, Site]:
        return self.agreement.sites(self)

    def reports_late(self) -> bool:
        """True on the one rank that reports late ranks."""
        return min(self.sites(), default=-1) == self.members.rank

    def patience(self) -> float:
        """Seconds of waiting after which this call counts as blocked by another rank."""
        return 0.0


class Progress(Protocol):
    """How far the ranks are with the requests of one collective."""

    is_persistent: bool
    """Whether ranks start the same request again and again."""

    def missing(self, ranks: Sequence[int], number: int) -> tuple[int, ...]:
        """Those of the ranks that have not made their part of a request."""

    def unfinished(self, ranks: Sequence[int], number: int) -> tuple[int, ...]:
        """Those of the ranks that cannot move the data of their part any more."""


class PointCall(Call):
    """A send, a receive or the wait for a request: it needs one rank, or any."""

    grace = 0.1
    min_polls = 6
    ordered = every = False
    buffers: tuple[Any, ...] = ()
    """Buffers that MPI may read or write."""
    unknown_nbytes = 0
    """An estimate for messages of any length that may be on their way."""
    posts: Progress | None = None
    """Of the wait for a request of a collective: who has made its part; ``request`` is its number
    there."""
    request = 0

    def __init__(
        self, agreement: Agreement, spec: Spec, name: str | None, peers: tuple[int, ...]
    ) -> None:
        super().__init__(agreement, pack(spec), name)
        self.peers = peers

    def moves(self, *buffers: Any) -> None:
        self.buffers, self.nbytes = buffers, sum(map(nbytes_of, buffers))

    @property
    def needs(self) -> str:
        if self.every:
            return super().needs
        return f"rank {self.peers[0]}" if len(self.peers) == 1 else "a rank that sends"

    def missing(self) -> tuple[int, ...]:
        return self.peers if self.posts is None else self.posts.missing(self.peers, self.request)

    @property
    def moving(self) -> bool:
        return self.posts is not None and not self.missing()

    def unfinished(self) -> tuple[int, ...]:
        return self.peers if self.posts is None else self.posts.unfinished(self.peers, self.request)

    def sites(self) -> dict[int, Site]:
        return {self.members.rank: self.site}

    def reports_late(self) -> bool:
        return True

    def patience(self) -> float:
        if not self.posted:
            return 0.0
        # Two ranks with data on its way would otherwise look like a deadlock.
        return _PATIENCE_SECONDS + (self.nbytes + self.unknown_nbytes) / _SLOWEST_BYTES_A_SECOND


def nbytes_of(buffer: Any) -> int:
    """The bytes of a buffer in one of mpi4py's forms; 0 for other objects."""
    first = buffer[0] if isinstance(buffer, list | tuple) and buffer else buffer
    try:
        return memoryview(first).nbytes
    except TypeError:
        return 0


class Transport(Protocol):
    """Moves data between the members of one group.

    A transport prepares one move at a time: it publishes what others will read, describes it in an
    `Offer`, and returns the rest, which runs after all members have agreed. Arrays are contiguous;
    ``out`` overlaps ``source`` only if both are the same array.
    """

    name: str

    @property
    def exact(self) -> bool:
        """Whether it can reduce Python's integers to a result of any size (`ExactArithmetic`)."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array for a result, where this transport writes fastest."""

    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """The reduction of all sources, of any shape; in ``out``, or in a new array."""

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Prepared[None]:
        """Writes the elements bounds[me]:bounds[me + 1] of the reduction to ``out``."""

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        """Makes every member's ``array`` (bytes) the root's; ``root`` is an index of a member."""

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        """All sources (bytes) in order, on every member or on ``root`` only.

        ``lengths`` are the members' sizes; None stands for the sizes that they offered.
        """

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        """The pieces (bytes) that the members, or ``root`` only, cut for this member."""

    def renew(self) -> None: ...


def as_bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


class Cut(list[Any]):
    """Consecutive pieces of an array, and the array itself."""

    def __init__(self, whole: Any, pieces: Iterable[Any]) -> None:
        super().__init__(pieces)
        self.whole = whole


def cut(array: Any, lengths: Sequence[int]) -> Cut:
    """Views of an array's consecutive pieces, whose lengths add up to its own."""
    bounds = accumulate(lengths, initial=0)
    return Cut(array, [array[low:high] for low, high in pairwise(bounds)])
