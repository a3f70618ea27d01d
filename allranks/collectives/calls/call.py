"""One collective call of one rank, from its arrival to its end.

A call agrees in one place, `Call.moved`; then its transport moves data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from functools import wraps
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from allranks.collectives.calls.callsite import SITES, Site, find
from allranks.collectives.calls.guard import Packed, Spec, pack
from allranks.collectives.calls.wait import LONGEST_SLEEP, Steps
from allranks.records.ranks import label

T = TypeVar("T")
P = ParamSpec("P")
EPOCH_SHIFT = 40
"""Counters hold the epoch in their upper bits: what an old epoch left counts as not arrived."""
_PATIENCE_SECONDS, _SLOWEST_BYTES_A_SECOND = 2.0, 5e6
Place = tuple[int, int, int]
"""Segments of the window, offset of the input, offset of the output; segment 0 is none."""
NOWHERE: Place = (0, 0, 0)


class Offer(NamedTuple):
    """How much a member brings and where it lies, as its transport says before all have come."""

    nbytes: int = 0
    place: Place = NOWHERE
    """Where its in- and output lie in its window."""
    copied: bool = False
    """Whether what it brings is copied, chunk by chunk, to where its output lies."""
    answered: int = 0
    """Of a rank that has joined: how many calls of the others it has taken part in since."""


NOTHING = Offer()
Prepared = tuple[Offer, Steps[T] | Callable[[], T]]
"""What a transport has laid out of a move, and the rest of it for when all have come: steps, or a
function where nothing more has to be waited for."""
Move = Generator[Any, None, T]
"""A move as it is written: it yields its `Offer` first, and goes on as steps."""


def prepared(move: Callable[P, Move[T]]) -> Callable[P, Prepared[T]]:
    """Makes of a `Move` what takes it as far as its offer."""

    @wraps(move)
    def prepare(*arguments: P.args, **options: P.kwargs) -> Prepared[T]:
        steps = move(*arguments, **options)
        return next(steps), steps

    return prepare


class Members:
    """The ranks of a group, seen from one of them."""

    __slots__ = ("me", "number", "rank", "ranks", "size")

    def __init__(self, number: int, ranks: tuple[int, ...], rank: int) -> None:
        self.number, self.ranks, self.rank = number, ranks, rank
        self.me, self.size = ranks.index(rank), len(ranks)
        """This rank's place among the members, and how many there are."""


class Agreement(Protocol):
    """How the members of a group find out that all have come to the same call."""

    members: Members

    def come(self, call: Call, offer: Offer) -> bool:
        """Lays out what this rank brings; True where all have come, and agree, within moments.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Where they had not: ends when every member has come with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered, once all have agreed."""

    def meet(self, call: Call) -> Steps[None]:
        """Ends when what the members laid out after they agreed may be read."""

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not come where this one is."""

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not said that they have done their part, where all have come."""

    def sites(self, call: Call) -> dict[int, Site]:
        """Where each member that has come called from."""

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""

    def renew(self) -> None:
        """A new epoch has begun: calls are counted anew."""


class Call:
    """A call in flight: what its wait waits for, and what is said when it fails."""

    grace = 0.0
    """Seconds for which a message of a rank that has left may still be on its way."""
    looks = 1
    """So often it is looked for meanwhile, at least: this process may be kept from a core."""
    ordered = every = True
    """False for send and recv, which take no part in the order of calls, and need not everybody."""

    # What most calls never set stands here: making a call is on the shortest path there is.
    steps: Steps[Any]
    transport = ""
    longest_sleep = LONGEST_SLEEP
    number = stage = 0
    """``number`` is its place among its group's calls, unique over epochs."""
    last = ended = 0.0
    last_rank = -1
    began = uncounted = 0.0
    ready_at = -1.0
    attended: tuple[float, float] | None = None
    """Of a call that was under way with others: seconds of waiting and of transfer at it."""
    left_at = -1.0
    looked = 0
    """How often, since ranks that it needs were seen to have left."""
    deadlock = ""
    posted = done = False
    carry: Any = None
    """What goes between hosts together with what they agree on: of small arrays the values."""
    ready: Any = None
    """For arrays on a GPU an event, which happens when the caller's stream has made them."""
    behind: Call | None = None
    """A call of another process set that has to end before this one goes on."""
    device_seconds: float | None = None
    """How long a GPU was at it, by its own clock; None where no GPU was."""
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
        self.started = perf_counter()

    def moved(self, move: Callable[..., Prepared[T]], *arguments: Any, **options: Any) -> Steps[T]:
        """Ends when all have agreed and a transport has made a move; begun when it is driven.

        A call that makes several moves one after the other agrees on the first.
        """
        offer, rest = move(self, *arguments, **options)
        if self.posted:
            yield from self.agreement.meet(self)
        elif not self.agreement.come(self, offer):
            yield from self.agreement.agree(self, offer)
        return rest() if callable(rest) else (yield from rest)

    def waited(self, offer: Offer, rest: Steps[T] | Callable[[], T]) -> Steps[T]:
        """The rest of a move that has been prepared, where not all had come at once."""
        yield from self.agreement.agree(self, offer)
        return rest() if callable(rest) else (yield from rest)

    def agreed(self, offer: Offer = NOTHING) -> Steps[None]:
        """Ends when all have agreed, where nothing is to be moved."""
        if not self.agreement.come(self, offer):
            yield from self.agreement.agree(self, offer)

    @property
    def spec(self) -> Spec:
        """What must be the same on every rank."""
        return self.packed.spec

    @property
    def moving(self) -> bool:
        """Whether all have come and agreed, so that data moves."""
        return self.last_rank >= 0

    @property
    def members(self) -> Members:
        """Who takes part."""
        return self.agreement.members

    @property
    def needs(self) -> str:
        """Whom it cannot do without."""
        return f"all of {label(self.members.ranks)}"

    def missing(self) -> tuple[int, ...]:
        """The ranks that this call still waits for."""
        return self.agreement.missing(self)

    def unfinished(self) -> tuple[int, ...]:
        """The ranks that have not done their part, where everybody has arrived."""
        return self.agreement.unfinished(self)

    def sites(self) -> dict[int, Site]:
        """Where each rank that has arrived called from."""
        return self.agreement.sites(self)

    def speaks(self) -> bool:
        """True on the one rank that tells about the late ones."""
        return min(self.sites(), default=-1) == self.members.rank

    def patience(self) -> float:
        """Seconds after which the rank it waits for counts as holding it up."""
        return 0.0


class PointCall(Call):
    """A send or a receive: it waits for one rank, or for any; or a request, for what it needs."""

    grace = 0.1
    looks = 6
    ordered = every = False
    buffers: tuple[Any, ...] = ()
    """What MPI may be moving."""

    def __init__(
        self, agreement: Agreement, spec: Spec, name: str | None, peers: tuple[int, ...]
    ) -> None:
        super().__init__(agreement, pack(spec), name)
        self.peers = peers

    def moves(self, *buffers: Any) -> None:
        """Notes what MPI may be moving, and its size."""
        self.buffers, self.nbytes = buffers, sum(map(nbytes_of, buffers))

    @property
    def needs(self) -> str:
        """Whom it cannot do without."""
        return f"rank {self.peers[0]}" if len(self.peers) == 1 else "a rank that sends"

    def missing(self) -> tuple[int, ...]:
        """The rank at the other end; any rank, where any may send."""
        return self.peers

    def unfinished(self) -> tuple[int, ...]:
        """The same: a message has no phases."""
        return self.peers

    def sites(self) -> dict[int, Site]:
        """This rank's line."""
        return {self.members.rank: self.site}

    def speaks(self) -> bool:
        """Nobody else waits in this call."""
        return True

    def patience(self) -> float:
        """Ranks between which data is under way look like ranks that wait for each other."""
        if not self.posted:
            return 0.0
        return _PATIENCE_SECONDS + self.nbytes / _SLOWEST_BYTES_A_SECOND


def nbytes_of(buffer: Any) -> int:
    """The size of a buffer as mpi4py takes it, with count and type or without; 0 of all else."""
    first = buffer[0] if isinstance(buffer, list | tuple) and buffer else buffer
    try:
        return memoryview(first).nbytes
    except TypeError:
        return 0
