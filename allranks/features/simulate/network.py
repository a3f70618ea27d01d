"""Simulated time: what a message and a collective cost on a named network."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import ceil, log2

from allranks.errors import UsageError

_US, _GB = 1e-6, 1e9


@dataclass(frozen=True)
class Link:
    """The cost of a message: ``latency`` seconds, and its bytes at ``bandwidth`` bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass
class Network:
    """Hosts of ``ranks_each`` ranks below a fat tree of switches.

    Two ranks of a host use ``inside``. Messages between hosts share the link of each host; with
    ``oversubscribed`` above 1 the hosts below a switch share links of so many times less bandwidth.
    """

    name: str
    inside: Link
    between: Link | None = None
    ranks_each: int = 0
    """The number of ranks on each host; 0 for one host."""
    hosts_each: int = 16
    """The number of hosts below one switch."""
    oversubscribed: float = 1.0
    eager_nbytes: int = 4096
    """Messages up to this size are buffered: a send of them ends at once."""
    compute_scale: float = 1.0
    """The computing time on this network's ranks, for one second of this process."""
    _free_at: dict[object, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    """When each shared link has carried its last message."""

    def begin(self) -> None:
        """A cell begins: nothing is on its way."""
        self._free_at.clear()

    def host(self, rank: int) -> int:
        return rank // self.ranks_each if self.ranks_each else 0

    def hosts(self, size: int) -> tuple[int, ...]:
        return tuple(map(self.host, range(size)))

    def arrival(self, source: int, dest: int, nbytes: int, began: float) -> float:
        """Returns when a message that is sent at ``began`` has arrived."""
        here, there = self.host(source), self.host(dest)
        if here == there or self.between is None:
            return began + self.inside.seconds(nbytes)
        taken = nbytes / self.between.bandwidth
        shared: list[tuple[object, float]] = [(("out", here), taken), (("in", there), taken)]
        up, down = here // self.hosts_each, there // self.hosts_each
        if up != down:
            # The links of a switch together carry its hosts' bandwidth, or a part of it.
            share = taken * self.oversubscribed / self.hosts_each
            shared += [(("up", up), share), (("down", down), share)]
        start = max(began, *(self._free_at[link] for link, _ in shared))
        for link, seconds in shared:
            self._free_at[link] = start + seconds
        return start + self.between.latency + max(taken, *(seconds for _, seconds in shared))

    def collective_seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Returns the time from the last arrival to the end of a collective.

        Each round of a tree costs a message; large arrays move twice, in pieces, as in a
        reduce-scatter and an allgather.
        """
        size = len(ranks)
        if size == 1:
            return 0.0
        crosses = self.between is not None and self.host(ranks[0]) != self.host(ranks[-1])
        link = self.between if crosses and self.between is not None else self.inside
        rounds = ceil(log2(size))
        moved = nbytes * (2.0 if "reduce" in op.lower() else 1.0) * (size - 1) / size
        sharing = min(size, self.ranks_each or 1) if crosses else 1
        return (
            rounds * link.latency + moved * (sharing if "all" in op.lower() else 1) / link.bandwidth
        )


NETWORKS = {
    network.name: network
    for network in (
        Network("laptop", Link(1 * _US, 5 * _GB)),
        Network("ethernet", Link(1 * _US, 5 * _GB), Link(25 * _US, 1.25 * _GB), 8),
        Network(
            "infiniband", Link(1 * _US, 10 * _GB), Link(2 * _US, 25 * _GB), 64, eager_nbytes=8192
        ),
        Network(
            "fat-tree",
            Link(1 * _US, 10 * _GB),
            Link(2 * _US, 25 * _GB),
            8,
            hosts_each=16,
            oversubscribed=4.0,
        ),
    )
}


def network_of(name: str) -> Network:
    if name not in NETWORKS:
        raise UsageError(
            f"expected a network, found {name!r}. Type one of: --network {' | '.join(NETWORKS)}"
        )
    return replace(NETWORKS[name], _free_at=defaultdict(float))
