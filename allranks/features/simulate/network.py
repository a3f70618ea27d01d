"""Simulated time: what a message and a collective cost on a named network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

import numpy as np

from allranks.errors import UsageError

_US, _GB = 1e-6, 1e9


@dataclass(frozen=True)
class NetworkLink:
    """A message takes ``latency`` seconds, and its bytes at ``bandwidth`` bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


Curve = tuple[tuple[float, float], ...]
"""Pairs of a size and what was measured for it."""


@dataclass(frozen=True)
class MeasuredLink:
    """As `NetworkLink`, from measured times of some sizes: others lie on lines between them."""

    curve: Curve

    @property
    def latency(self) -> float:
        return self.curve[0][1]

    def seconds(self, nbytes: float) -> float:
        sizes, times = zip(*self.curve, strict=True)
        if nbytes <= sizes[-1]:
            return float(np.interp(nbytes, sizes, times))
        return float(
            times[-1] + (nbytes - sizes[-1]) * (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        )


@dataclass
class Network:
    """Hosts of ``ranks_each`` ranks below a fat tree of switches.

    Two ranks of a host use ``inside``. All messages of a host to other hosts share its link, and
    so do those that come. With ``oversubscribed`` above 1, the hosts below a switch share links to
    the other switches that have this many times less bandwidth than their own links together.
    """

    name: str
    inside: NetworkLink | MeasuredLink
    between: NetworkLink | MeasuredLink | None = None
    ranks_each: int = 0
    """The number of ranks on each host; 0 for one host."""
    hosts_each: int = 16
    """The number of hosts below one switch."""
    oversubscribed: float = 1.0
    eager_nbytes: int = 4096
    """Messages up to this size are buffered: a send of them ends at once."""
    computing_each: int = 0
    """The number of ranks that share the cores of a machine; 0 for one machine. Several hosts may
    be containers of one."""
    slowdowns: tuple[tuple[int, Curve], ...] = ()
    """By numbers of ranks of a machine that compute at once, how much longer that takes than on one
    rank alone, for some lengths of it in seconds. Empty if ranks do not slow each other down."""
    allreduce: MeasuredLink | None = None
    """The time of an allreduce, if it was measured."""
    objects: MeasuredLink | None = None
    """As ``inside``, of a message that is a pickled object, if it was measured."""
    objects_between: MeasuredLink | None = None
    _free_at: dict[object, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    """When each shared link has carried its last message."""

    def host(self, rank: int) -> int:
        return rank // self.ranks_each if self.ranks_each else 0

    def hosts(self, size: int) -> tuple[int, ...]:
        return tuple(map(self.host, range(size)))

    def machines(self, size: int) -> tuple[int, ...]:
        return tuple(
            rank // self.computing_each if self.computing_each else 0 for rank in range(size)
        )

    def arrival(
        self, source: int, dest: int, nbytes: int, began: float, *, pickled: bool = False
    ) -> float:
        """Returns when a message that is sent at ``began`` has arrived."""
        inside, between = self.inside, self.between
        if pickled and self.objects is not None:
            inside, between = self.objects, self.objects_between
        here, there = self.host(source), self.host(dest)
        if here == there or between is None:
            return began + inside.seconds(nbytes)
        taken = between.seconds(nbytes) - between.latency
        shared: list[tuple[object, float]] = [(("out", here), taken), (("in", there), taken)]
        up, down = here // self.hosts_each, there // self.hosts_each
        if up != down:
            share = taken * self.oversubscribed / self.hosts_each
            shared += [(("up", up), share), (("down", down), share)]
        start = max(began, *(self._free_at[link] for link, _ in shared))
        for link, seconds in shared:
            self._free_at[link] = start + seconds
        return start + between.latency + max(seconds for _, seconds in shared)

    def slowdown(self, ranks: int, seconds: float) -> float:
        """Returns by how much computing takes longer if several ranks of a machine compute."""
        if ranks == 1 or not self.slowdowns:
            return 1.0
        known, factors = [1], [1.0]
        for number, curve in self.slowdowns:
            lengths, found = zip(*curve, strict=True)
            known.append(number)
            factors.append(float(np.interp(np.log(seconds), np.log(lengths), found)))
        # More ranks than were measured share the same cores.
        return float(np.interp(ranks, known, factors)) * max(1.0, ranks / known[-1])

    def collective_seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Returns the time from the last arrival to the end of a collective.

        If allreduces were measured, their time; other collectives move half as much. Otherwise
        a message for each round of a tree, and the bytes of a reduce-scatter and an allgather.
        """
        size, reduces = len(ranks), "allreduce" in op.lower()
        if size == 1:
            return 0.0
        if self.allreduce is not None:
            moved = self.allreduce.seconds(nbytes) - self.allreduce.latency
            return self.allreduce.latency + (moved if reduces else moved / 2)
        hosts = {self.host(ranks[0]), self.host(ranks[-1])}
        link = self.between if len(hosts) > 1 and self.between is not None else self.inside
        total = nbytes * (2.0 if reduces else 1.0) * (size - 1) / size
        if link is self.between and "all" in op.lower():
            total *= min(size, self.ranks_each)  # the ranks of a host share its link
        return ceil(log2(size)) * link.latency + link.seconds(total) - link.latency


HERE = "here"
"""The network that is measured on this machine."""
DEFAULT = "laptop"

NETWORKS = {
    network.name: network
    for network in (
        Network(DEFAULT, NetworkLink(1 * _US, 5 * _GB)),
        Network("ethernet", NetworkLink(1 * _US, 5 * _GB), NetworkLink(25 * _US, 1.25 * _GB), 8),
        # The links of lessons.model: hosts of 8 H100 with 8 x 400 Gb/s, and of 4 P100 with 25 Gb/s.
        Network(
            "h100",
            NetworkLink(0.6 * _US, 18 * 20.6 * _GB),
            NetworkLink(2.7 * _US, 8 * 400 / 8 * _GB),
            8,
            eager_nbytes=8192,
        ),
        Network("p100", NetworkLink(5.7 * _US, 12 * _GB), NetworkLink(14 * _US, 25 / 8 * _GB), 4),
        Network(
            "fat-tree",
            NetworkLink(1 * _US, 10 * _GB),
            NetworkLink(2 * _US, 25 * _GB),
            8,
            oversubscribed=4.0,
        ),
    )
}


def check_name(name: str) -> None:
    if name not in (*NETWORKS, HERE):
        known = " | ".join([*NETWORKS, HERE])
        raise UsageError(f"expected a network, found {name!r}. Type one of: --network {known}")


def network_of(options: Mapping[str, Any]) -> Network:
    """Returns the network of a cell's options, with nothing on its way."""
    measured = options.get("measured")
    if measured:
        links = {
            name: MeasuredLink(tuple(map(tuple, found)))
            for name, found in measured["curves"].items()
        }
        return Network(
            HERE,
            links["inside"],
            links.get("between"),
            measured["ranks_each"],
            computing_each=measured["computing_each"],
            slowdowns=tuple((k, tuple(map(tuple, found))) for k, found in measured["slowdowns"]),
            allreduce=links["allreduce"],
            objects=links.get("inside objects"),
            objects_between=links.get("between objects"),
        )
    return replace(NETWORKS[options.get("network") or DEFAULT], _free_at=defaultdict(float))
