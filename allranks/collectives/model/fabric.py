"""What connects the ranks, in numbers: latencies in seconds, bandwidths in bytes a second."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Latency:
    """α of one algorithm: what is paid once, and what each message on the path adds."""

    base: float = 0.0
    """Seconds, once per allreduce."""
    inside: float | None = 0.0
    """Seconds per message between two ranks of one host; None: unknown."""
    between: float | None = 0.0
    """Seconds per message between two hosts; None: unknown."""


@dataclass(frozen=True)
class Share:
    """The part of a link's bandwidth that reaches the data."""

    inside: float = 1.0
    """Fraction, when all ranks are on one host."""
    between: float = 1.0
    """Fraction, on several hosts."""
    most_inside: float = inf
    """Bytes a second that are never exceeded on one host."""
    most_between: float = inf
    """Bytes a second that are never exceeded on several hosts."""

    def of(self, bandwidth: float, hosts: int) -> float:
        """Bytes of data a second over a link of ``bandwidth``."""
        if hosts == 1:
            return min(self.inside * bandwidth, self.most_inside)
        return min(self.between * bandwidth, self.most_between)


@dataclass(frozen=True)
class Protocol:
    """How bytes are put on the wire; each algorithm has its own latency and share."""

    name: str
    latency: dict[str, Latency]
    """Keyed by algorithm; an algorithm that is missing does not use this protocol."""
    share: dict[str, Share]


@dataclass(frozen=True)
class Fabric:
    """Links and protocols; ``predict`` and ``predict_step`` take one."""

    name: str
    """What it is and where its numbers come from: every prediction repeats it."""
    protocols: tuple[Protocol, ...]
    inside_bandwidth: float | None
    """Bytes a second and direction of one rank inside its host; None: unknown."""
    between_bandwidth: float | None
    """Bytes a second and direction of one host, all its network cards together; None: unknown."""
    pipelined_tree: bool = False
    """True for NCCL's two pipelined trees; False for whole arrays going up and down one tree."""
    relative_error: float | None = None
    """Root mean square of (fit - measured) / measured; None for a fabric that was not fitted."""

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that at least one protocol carries."""
        names = (name for protocol in self.protocols for name in protocol.latency)
        return tuple(dict.fromkeys(names))
