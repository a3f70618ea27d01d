"""Latencies (seconds) and bandwidths (bytes a second) of networks; two published networks.

Source: NCCL 2.30, src/graph/tuning.cc (baseLatencies, hwLatencies, llMaxBws, nvlsEfficiency, and
the shares of LL, LL128 and Simple) and src/graph/topo.h (SM90_NVLINK_BW). Omitted: caps per
channel, the corrections for medium sizes, and the plateau factor for rings over a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_US = 1e-6
_GB = 1e9

# The bandwidth of a tree, as a fraction of the bandwidth of a ring.
TREE_SHARE = 0.92

# nvlsEfficiency of Hopper.
NVLS_EFFICIENCY = 0.85


@dataclass(frozen=True)
class Latency:
    """The α of one algorithm: once per allreduce, and for each message on the path."""

    # Seconds, once per allreduce.
    base: float = 0.0
    # Seconds per message between two ranks of one host; None: unknown.
    inside: float | None = 0.0
    # Seconds per message between two hosts; None: unknown.
    between: float | None = 0.0


@dataclass(frozen=True)
class Share:
    """The part of a link's bandwidth that reaches the data."""

    # Fraction, when all ranks are on one host.
    inside: float = 1.0
    # Fraction, on several hosts.
    between: float = 1.0
    # Bytes a second that are never exceeded on one host.
    most_inside: float = inf
    # Bytes a second that are never exceeded on several hosts.
    most_between: float = inf

    def of(self, bandwidth: float, hosts: int) -> float:
        """Returns the bytes of data a second over a link of ``bandwidth``."""
        if hosts == 1:
            return min(self.inside * bandwidth, self.most_inside)
        return min(self.between * bandwidth, self.most_between)


@dataclass(frozen=True)
class Protocol:
    """A format of bytes on the wire; each algorithm has its own latency and share."""

    name: str
    # Keyed by algorithm; an algorithm that is missing does not use this protocol.
    latency: dict[str, Latency]
    share: dict[str, Share]


@dataclass(frozen=True)
class Fabric:
    """Links and protocols; ``predict`` and ``predict_step`` take one."""

    # The fabric, and the source of its numbers; every prediction repeats this text.
    name: str
    protocols: tuple[Protocol, ...]
    # Bytes a second and direction of one rank inside its host; None: unknown.
    inside_bandwidth: float | None
    # Bytes a second and direction of one host, all its network cards together; None: unknown.
    between_bandwidth: float | None
    # True for NCCL's two pipelined trees; False for whole arrays going up and down one tree.
    pipelined_tree: bool = False
    # Root mean square of (fit - measured) / measured; None for a fabric that was not fitted.
    relative_error: float | None = None

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that at least one protocol carries."""
        names = (name for protocol in self.protocols for name in protocol.latency)
        return tuple(dict.fromkeys(names))


def _latency(base: float, inside: float, between: float) -> Latency:
    return Latency(base * _US, inside * _US, between * _US)


# 18 NVLinks of 20.6 GB/s a GPU (the rate after protocol, as NCCL counts it); line rate outside.
HGX_H100 = Fabric(
    name="hosts of 8 H100, 8 x 400 Gb/s each; NCCL 2.30 tuner constants",
    protocols=(
        Protocol(
            "LL",
            {"ring": _latency(6.6, 0.6, 2.7), "tree": _latency(6.8, 0.6, 5.0)},
            {
                "ring": Share(0.5, 0.5, 141 * _GB, 35 * _GB),
                "tree": Share(TREE_SHARE / 3.8, TREE_SHARE / 3.8, 141 * _GB, 35 * _GB),
            },
        ),
        Protocol(
            "LL128",
            {"ring": _latency(14.0, 1.9, 4.0), "tree": _latency(14.0, 1.25, 8.5)},
            {
                "ring": Share(0.92, 0.92),
                "tree": Share(TREE_SHARE * 7 / 9, TREE_SHARE * 120 / 128),
            },
        ),
        Protocol(
            "Simple",
            {
                "ring": _latency(8.4, 3.4, 14.0),
                "tree": _latency(8.4, 4.0, 14.0),
                "nvls": _latency(0.0, 25.0, 0.0),
            },
            {
                "ring": Share(),
                "tree": Share(TREE_SHARE, TREE_SHARE),
                "nvls": Share(NVLS_EFFICIENCY),
            },
        ),
    ),
    inside_bandwidth=18 * 20.6 * _GB,
    between_bandwidth=8 * 400 / 8 * _GB,
    pipelined_tree=True,
)

# The machines of Horovod's published runs. Rings only: NCCL had no trees before 2.4 (2019).
P100_25GBE = Fabric(
    name="hosts of 4 P100 over PCIe, one 25 Gb/s card each; NCCL 2.30 tuner constants",
    protocols=(Protocol("Simple", {"ring": _latency(8.4, 5.7, 14.0)}, {"ring": Share()}),),
    inside_bandwidth=12 * _GB,
    between_bandwidth=25 / 8 * _GB,
)
