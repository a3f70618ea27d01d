"""One collective call of one rank, from its arrival to its end. Runs in every rank."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.guard import Spec
from allranks.records.ranks import label

if TYPE_CHECKING:
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.gpu.api import Event
    from allranks.collectives.host.channel import Place
    from allranks.collectives.world.group import Group


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
    ready: Event | None = None
    """For arrays on a GPU: happens when the caller's stream has made them."""
    device_seconds: float | None = None
    """How long a GPU was at it, by its own clock; None where no GPU was."""
    light = False
    """True where the call holds no arrays, so that it may be kept for the records."""
    result: Any = None
    held: Any = None
    """Arrays that other members may write to."""
    error: BaseException | None = None
    extents: list[int]
    places: list[Place]

    def __init__(self, group: Group, spec: Spec, site: Site, name: str, nbytes: int) -> None:
        self.group, self.spec, self.site = group, spec, site
        self.name, self.nbytes = name, nbytes
        self.started = perf_counter()

    @property
    def needs(self) -> str:
        """Whom it cannot do without."""
        return f"every one of {label(self.group.ranks)}"

    def missing(self) -> tuple[int, ...]:
        """The ranks that this call still waits for."""
        return self.group.missing(self)

    def unfinished(self) -> tuple[int, ...]:
        """The ranks that have not done their part, where everybody has arrived."""
        return self.group.unfinished(self)

    def sites(self) -> dict[int, Site]:
        """Where each rank that has arrived called from."""
        return self.group.sites(self)

    def speaks(self) -> bool:
        """True on the one rank that tells about the late ones."""
        return min(self.sites(), default=-1) == self.group.world.rank


class PointCall(Call):
    """A send or a receive: it waits for one rank, or for any."""

    grace = 0.1
    ordered = False

    def __init__(
        self, group: Group, spec: Spec, site: Site, name: str, nbytes: int, peers: tuple[int, ...]
    ) -> None:
        super().__init__(group, spec, site, name, nbytes)
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
        return {self.group.world.rank: self.site}

    def speaks(self) -> bool:
        """Nobody else waits in this call."""
        return True
