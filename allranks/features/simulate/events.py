"""What a simulated cell records: messages, receives, and the events of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from allranks.collectives.calls.sites import Site
from allranks.collectives.world.world import Group

ANY = -1
"""The source or the tag of a receive that takes any."""


@dataclass(eq=False, slots=True)
class SimulatedMessage:
    """A message on its way. Ranks are those of the world; ``group`` is the communicator."""

    number: int
    group: Group
    source: int
    dest: int
    tag: int
    data: Any
    nbytes: int
    began: float
    buffered: bool
    """Whether the send has ended, or waits for the receive."""
    site: Site
    title: str
    arrives: float = 0.0
    receive: PostedReceive | None = None

    @property
    def pickled(self) -> bool:
        """Whether it is an object: as in mpi4py, the methods of buffers begin with a capital."""
        return self.title.removeprefix("comm.")[:1].islower()


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that was posted, and the message that it got."""

    rank: int
    group: Group
    source: int
    tag: int
    began: float
    site: Site
    title: str
    message: SimulatedMessage | None = None
    races: bool = False
    """Whether it could also have got another message."""

    def takes(self, message: SimulatedMessage) -> bool:
        return (
            self.group.agreement.key == message.group.agreement.key  # type: ignore[attr-defined]
            and self.source in (ANY, message.source)
            and self.tag in (ANY, message.tag)
        )


class RankEvent(NamedTuple):
    """A part of a rank's simulated time: ``begin`` to ``end``, in seconds since the cell began.

    ``kind`` is ``send``, ``receive`` or ``collective``; between its events a rank computes.
    ``ready`` is when waiting ended and transfer began. ``peer`` is the other rank, of a collective
    the one that arrived last.
    ``number`` is the same in both events of a message, and in all events of a collective with the
    same ``group``. ``races`` is whether a receive could also have got another message, ``payload``
    the pickled object of a receive, if it is short.
    """

    rank: int
    kind: str
    title: str
    begin: float
    ready: float
    end: float
    peer: int = -1
    nbytes: int = 0
    tag: int = 0
    number: int = 0
    group: int = 0
    site: Site | None = None
    races: bool = False
    payload: bytes = b""
