"""One collective call of one rank, from its arrival to its end. Runs in every rank.

A call agrees in one place, `Call.moved`; then its transport moves data.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol, TypeVar

from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.guard import Spec
from allranks.collectives.calls.offer import NOTHING, Offer
from allranks.collectives.calls.wait import Steps
from allranks.records.ranks import label

T = TypeVar("T")
EPOCH_SHIFT = 40
"""Counters hold the epoch in their upper bits: what an old epoch left counts as not arrived."""
Prepared = tuple[Offer, Steps[T]]
"""What a transport has laid out of a move, and the rest of it, to be driven once all have come."""


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

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has come with the same fingerprint; notes all their offers.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """

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
    ordered = True
    """False for send and recv, which take no part in the group's order of calls."""

    # What most calls never set stands here: making a call is on the shortest path there is.
    steps: Steps[Any]
    epoch = sequence = stage = 0
    last = ended = 0.0
    last_rank = -1
    left_at = -1.0
    transport = ""
    deadlock = ""
    posted = moving = done = False
    ready: Any = None
    """For arrays on a GPU an event, which happens when the caller's stream has made them."""
    device_seconds: float | None = None
    """How long a GPU was at it, by its own clock; None where no GPU was."""
    light = False
    """True where the call holds no arrays, so that it may be kept for the records."""
    result: Any = None
    held: Any = None
    """Arrays that other members may write to."""
    error: BaseException | None = None
    offers: list[Offer]
    """What each member has offered, once all have agreed."""

    def __init__(
        self, agreement: Agreement, spec: Spec, site: Site, name: str, nbytes: int
    ) -> None:
        self.agreement, self.spec, self.site = agreement, spec, site
        self.members = agreement.members
        self.name, self.nbytes = name, nbytes
        self.started = perf_counter()

    def moved(self, prepared: Prepared[T]) -> Steps[T]:
        """Ends when all have agreed and a transport has moved what it had prepared.

        A call whose transport moves several things one after the other agrees on the first.
        """
        offer, steps = prepared
        if self.posted:
            yield from self.agreement.meet(self)
        else:
            yield from self.agreement.agree(self, offer)
        return (yield from steps)

    def agreed(self) -> Steps[None]:
        """Ends when all have agreed, where nothing is to be moved."""
        yield from self.agreement.agree(self, NOTHING)

    @property
    def number(self) -> int:
        """Its number among its group's calls, unique over epochs."""
        return (self.epoch << EPOCH_SHIFT) + self.sequence

    @property
    def needs(self) -> str:
        """Whom it cannot do without."""
        return f"every one of {label(self.members.ranks)}"

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


class PointCall(Call):
    """A send or a receive: it waits for one rank, or for any."""

    grace = 0.1
    ordered = False

    def __init__(
        self,
        agreement: Agreement,
        spec: Spec,
        site: Site,
        name: str,
        nbytes: int,
        peers: tuple[int, ...],
    ) -> None:
        super().__init__(agreement, spec, site, name, nbytes)
        self.peers = peers

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
