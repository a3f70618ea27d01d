"""The α-β cost model of an allreduce: fit it, predict a time, predict how a step scales.

The model counts the messages on the longest path and the bytes on the narrowest link.

Every algorithm's time is linear in the same five numbers, ``base + inside · α_inside + between ·
α_between + inside_nbytes / B_inside + between_nbytes / B_between``: prediction multiplies, fitting
solves for the α and B. Congestion, stragglers and the cost of the additions are not modelled
(fitting counts the additions in 1 / B).

Source of the latencies (seconds) and bandwidths (bytes a second): NCCL 2.30, src/graph/tuning.cc
(baseLatencies, hwLatencies, llMaxBws, nvlsEfficiency, and the shares of LL, LL128 and Simple) and
src/graph/topo.h (SM90_NVLINK_BW). Omitted: caps per channel, the corrections for medium sizes, and
the plateau factor for rings over a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from math import ceil, inf, log2

import numpy as np
from numpy.typing import NDArray

from allranks.lessons.records import Prediction, StepPrediction

__all__ = [
    "HGX_H100",
    "P100_25GBE",
    "Fabric",
    "Measurement",
    "Prediction",
    "StepPrediction",
    "fit",
    "fit_overlap",
    "predict",
    "predict_step",
]

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


# Share of a step in which gradients appear: a backward pass costs two forward passes.
BACKWARD_SHARE = 2 / 3

# Horovod's fusion buffer when its figures were published (HOROVOD_FUSION_THRESHOLD).
FUSION_NBYTES = 64 * 2**20


@dataclass(frozen=True)
class Terms:
    """The counts of one allreduce, on the rank that finishes last."""

    # Messages between ranks of one host, one after the other.
    inside: float = 0.0
    # Messages between hosts, one after the other.
    between: float = 0.0
    # Bytes a rank moves inside its host; 0 if this is not the narrowest link.
    inside_nbytes: float = 0.0
    # Bytes a host sends to the network; 0 if this is not the narrowest link.
    between_nbytes: float = 0.0


def terms(
    algorithm: str, nbytes: float, ranks: int, hosts: int, pipelined_tree: bool = False
) -> Terms:
    if not 1 <= hosts <= ranks:
        raise ValueError(
            f"each host needs at least one rank: found {ranks} ranks on {hosts} hosts. "
            "Give the total number of ranks, not the number per host."
        )
    if ranks == 1:
        return Terms()
    count = {
        "ring": ring,
        "recursive doubling": recursive_doubling,
        "tree": double_tree if pipelined_tree else binary_tree,
        "nvls": in_switch,
    }.get(algorithm)
    if count is None:
        raise ValueError(
            "the model knows ring, recursive doubling, tree and nvls: "
            f"found {algorithm!r}. Use algorithm='best' to have it choose."
        )
    return count(nbytes, ranks, hosts)


def ring(nbytes: float, ranks: int, hosts: int) -> Terms:
    """2 (p - 1) messages, 2 (n - 1) of them between hosts; 2 (p - 1) / p of the array moves.

    Source: NCCL 2.30, src/graph/tuning.cc (nsteps, nInterSteps); Patarasuk and Yuan (2009).
    """
    steps, crossing = 2 * (ranks - 1), 2 * (hosts - 1)
    moved = steps / ranks * nbytes
    if hosts == 1:
        return Terms(inside=steps, inside_nbytes=moved)
    return Terms(inside=steps - crossing, between=crossing, between_nbytes=moved)


def double_tree(nbytes: float, ranks: int, hosts: int) -> Terms:
    """2 (p / n - 1) messages in a host's chain, 2 log2(n) between hosts; the array moves twice.

    Pipelined in small pieces, with two trees that share the array, so that no level waits for
    a whole array.

    Source: NCCL 2.30, src/graph/tuning.cc; Sanders, Speck and Träff, "Two-tree algorithms for
    full bandwidth broadcast, reduction and scan", Parallel Comput. 35 (2009).
    """
    inside, between = 2 * (ranks / hosts - 1), 2 * int(log2(hosts))
    if hosts == 1:
        return Terms(inside=inside, inside_nbytes=2 * nbytes)
    return Terms(inside=inside, between=between, between_nbytes=2 * nbytes)


def binary_tree(nbytes: float, ranks: int, hosts: int) -> Terms:
    """At most 4 floor(log2 p) messages of the whole array: two per level, up and then down.

    The children of rank r are ``2r + 1`` and ``2r + 2``, and ranks fill one host after the other.
    So the top of the tree lies in the first host. Each level below crosses the network, and all
    ranks of a host share its network cards.
    """
    levels = ranks.bit_length() - 1
    messages = 4 * levels if ranks > 2 else 2
    if hosts == 1:
        return Terms(inside=messages, inside_nbytes=messages * nbytes)
    per_host = ceil(ranks / hosts)
    inside = min(4 * (per_host.bit_length() - 1), messages)
    between = max(messages - inside, 2)
    return Terms(inside, between, inside * nbytes, between * per_host * nbytes)


def recursive_doubling(nbytes: float, ranks: int, hosts: int) -> Terms:
    """log2(p) exchanges of the whole array, two messages more when p is no power of two.

    Ranks fill one host after the other: the first log2(p / n) exchanges stay inside a host; in
    the others all ranks of a host share its network cards.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), section 4.5:
    T = log2(p) (α + n β + n γ). Its authors' reduce-scatter and allgather by recursive halving
    and doubling moves as little as a ring in 2 log2(p) messages; it is not modelled here.
    """
    rounds = ranks.bit_length() - 1
    folding = 0 if ranks == 1 << rounds else 2
    if hosts == 1:
        return Terms(inside=rounds + folding, inside_nbytes=(rounds + folding) * nbytes)
    per_host = ceil(ranks / hosts)
    inside = per_host.bit_length() - 1
    between = rounds - inside + folding
    return Terms(inside, between, inside * nbytes, between * per_host * nbytes)


def in_switch(nbytes: float, ranks: int, hosts: int = 1) -> Terms:
    """One message: the switch adds and copies; a rank sends and receives (p + 1) / p arrays.

    Each rank owns one p-th of the array. It reads that part, summed by the switch, and writes it
    back to all ranks. Meanwhile the switch reads the whole array from every rank.

    Source: the traffic follows from multimem.ld_reduce and multimem.st (PTX ISA); that it is
    p + 1 where a ring needs 2 p is NVIDIA's own account of NVLink SHARP.
    """
    return Terms(inside=1, inside_nbytes=(ranks + 1) / ranks * nbytes)


def predict(
    nbytes: int,
    ranks: int,
    hosts: int = 1,
    algorithm: str = "best",
    fabric: Fabric = HGX_H100,
    protocol: str = "best",
) -> Prediction:
    """The predicted time of an allreduce; every text made from it contains "simulated".

    Args:
        nbytes: bytes of the array on each rank.
        ranks: number of ranks in all; any number, since the model is a formula.
        hosts: number of hosts; the ranks are spread evenly over them.
        algorithm: "ring", "tree", "recursive doubling" or "nvls", or "best": the fastest that
            the fabric has.
        fabric: what connects the ranks; published ones are in ``fabrics``, ``fit`` makes one.
        protocol: a protocol of the fabric, or "best".

    Raises:
        ValueError: the fabric has no such algorithm or protocol, or has never been measured
            over the links that these hosts need.
    """
    found = list(_candidates(nbytes, ranks, hosts, algorithm, fabric, protocol))
    if not found:
        raise ValueError(
            f"this fabric carries {', '.join(fabric.algorithms)} "
            f"({', '.join(p.name for p in fabric.protocols)}): found algorithm {algorithm!r}, "
            f"protocol {protocol!r} on {hosts} hosts. Use 'best' to have the model choose."
        )
    return min(found, key=lambda prediction: prediction.seconds)


def _candidates(
    nbytes: int, ranks: int, hosts: int, algorithm: str, fabric: Fabric, protocol: str
) -> Iterator[Prediction]:
    for wire in fabric.protocols:
        if protocol not in ("best", wire.name):
            continue
        for name, latency in wire.latency.items():
            if algorithm not in ("best", name) or (name == "nvls" and hosts > 1):
                continue
            counts = terms(name, nbytes, ranks, hosts, fabric.pipelined_tree)
            yield Prediction(
                algorithm=name,
                protocol=wire.name,
                nbytes=nbytes,
                ranks=ranks,
                hosts=hosts,
                latency_seconds=_waiting(counts, latency, fabric) if ranks > 1 else 0.0,
                transfer_seconds=_moving(counts, wire.share[name], hosts, fabric),
                fabric=fabric.name,
            )


def _waiting(counts: Terms, latency: Latency, fabric: Fabric) -> float:
    inside = counts.inside, latency.inside, "latency inside a host"
    between = counts.between, latency.between, "latency between hosts"
    return latency.base + sum(
        count * _known(each, what, fabric) for count, each, what in (inside, between) if count
    )


def _moving(counts: Terms, share: Share, hosts: int, fabric: Fabric) -> float:
    inside = counts.inside_nbytes, fabric.inside_bandwidth, "bandwidth inside a host"
    between = counts.between_nbytes, fabric.between_bandwidth, "bandwidth between hosts"
    return sum(
        nbytes / share.of(_known(link, what, fabric), hosts)
        for nbytes, link, what in (inside, between)
        if nbytes
    )


def _known(value: float | None, what: str, fabric: Fabric) -> float:
    if value is None:
        raise ValueError(
            f"a prediction needs the {what}: {fabric.name} does not have it. Fit measurements "
            "that use such links, at small and large sizes."
        )
    return value


def predict_step(
    alone_seconds: float,
    gradient_nbytes: int,
    ranks: int,
    hosts: int = 1,
    fabric: Fabric = HGX_H100,
    *,
    overlap: float = 0.0,
    tensors: int | None = None,
    fusion_nbytes: int | None = FUSION_NBYTES,
    algorithm: str = "best",
) -> StepPrediction:
    """The predicted time of a step on all ranks; every text made from it contains "simulated".

    The time is that of the step alone, plus the communication that is not hidden. The backward
    pass hides the fraction ``overlap`` of the communication, at most as long as the pass lasts.

    Args:
        alone_seconds: a step on one rank, same batch per rank.
        gradient_nbytes: bytes of all gradients.
        ranks: number of ranks in all.
        hosts: number of hosts; the ranks are spread evenly over them.
        fabric: what connects the ranks.
        overlap: from 0 (reduce after the backward pass) to 1 (hide as much as possible). It
            is a property of model and framework: fit it with ``fit_overlap``.
        tensors: number of gradients; None: enough to fill every fusion buffer.
        fusion_nbytes: gradients are packed into allreduces of this size; None: one each.
        algorithm: as for ``predict``.

    Raises:
        ValueError: ``overlap`` is not between 0 and 1.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(
            f"overlap is the hidden fraction of the communication, 0 to 1: found {overlap}."
        )
    count = allreduces(gradient_nbytes, tensors, fusion_nbytes)
    one = predict(round(gradient_nbytes / count), ranks, hosts, algorithm, fabric)
    communication = count * one.seconds
    hidden = min(overlap * communication, BACKWARD_SHARE * alone_seconds)
    return StepPrediction(
        ranks=ranks,
        hosts=hosts,
        alone_seconds=alone_seconds,
        communication_seconds=communication,
        exposed_seconds=communication - hidden,
        allreduces=count,
        allreduce=one,
    )


def allreduces(gradient_nbytes: int, tensors: int | None, fusion_nbytes: int | None) -> int:
    # One per full fusion buffer, or one per tensor.
    if fusion_nbytes is None:
        return tensors or 1
    buffers = max(1, ceil(gradient_nbytes / fusion_nbytes))
    return buffers if tensors is None else max(1, min(tensors, buffers))


def fit_overlap(efficiency: float, unhidden: StepPrediction) -> float:
    """Returns the overlap that explains a measured efficiency.

    Args:
        efficiency: measured; 1.0 is perfect scaling.
        unhidden: the same step, predicted with ``overlap=0``.

    Returns:
        Between 0 and 1. At either end, or if the backward pass is too short to hide that much, no
        overlap explains the measurement.
    """
    if not unhidden.communication_seconds:
        return 0.0
    exposed = unhidden.alone_seconds * (1 / efficiency - 1)
    return min(max(1 - exposed / unhidden.communication_seconds, 0.0), 1.0)


FITTED = ("ring", "recursive doubling", "tree")


@dataclass(frozen=True)
class Measurement:
    """One timed allreduce."""

    nbytes: int
    seconds: float
    ranks: int
    hosts: int = 1
    # The algorithm that ran, or the one that the model uses for it.
    algorithm: str = "ring"


def fit(
    measurements: Iterable[Measurement | tuple[int, float]],
    ranks: int | None = None,
    hosts: int = 1,
    algorithm: str = "ring",
    name: str = "this cluster",
) -> Fabric:
    """Returns the fabric whose α and β fit the measurements best, by relative error.

    The error is relative, so that 20 µs at 4 B count as much as 20 ms at 64 MB. A latency or a
    time per byte is never negative (non-negative least squares). If long arrays took no longer
    than short ones, the fitted time per byte is 0; ``relative_error`` measures how well that fits.

    Args:
        measurements: records, or pairs (nbytes, seconds) that share the arguments below. Two
            sizes are enough; a few from 4 B to 64 MB are better. Take the shortest of several
            times, because other load on the host only adds time.
        ranks: number of ranks the pairs were measured with.
        hosts: number of hosts the pairs were measured with.
        algorithm: the one that ran when the pairs were measured, or one to use for it.
        name: the fabric's name in predictions.

    Returns:
        A fabric with its ``relative_error``. Links that the measurements did not use are
        unknown, and ``predict`` raises if it needs them.

    Raises:
        ValueError: there are fewer than two measurements, or only measurements of single ranks.
    """
    records = [_record(item, ranks, hosts, algorithm) for item in measurements]
    counts = [terms(m.algorithm, m.nbytes, m.ranks, m.hosts) for m in records]
    table = np.array(
        [(c.inside, c.between, c.inside_nbytes, c.between_nbytes) for c in counts], np.float64
    ).reshape(-1, 4)
    seconds = np.array([m.seconds for m in records])
    if len(records) < 2 or not table.any() or (seconds <= 0).any():
        raise ValueError(
            "a fit needs at least two positive times of allreduces over two or more ranks: "
            f"found {len(records)} measurements. Time a small and a large array."
        )
    relative = table / seconds[:, None]
    solution = nonnegative_least_squares(relative, np.ones(len(records)))
    error = float(np.sqrt(np.mean((relative @ solution - 1) ** 2)))
    alpha_inside, alpha_between, beta_inside, beta_between = solution.tolist()
    latency = Latency(
        inside=alpha_inside if table[:, 0].any() else None,
        between=alpha_between if table[:, 1].any() else None,
    )
    return Fabric(
        name=f"{name}, fitted to {len(records)} measurements within {error:.1%}",
        protocols=(
            Protocol("measured", dict.fromkeys(FITTED, latency), dict.fromkeys(FITTED, Share())),
        ),
        inside_bandwidth=_bandwidth(beta_inside) if table[:, 2].any() else None,
        between_bandwidth=_bandwidth(beta_between) if table[:, 3].any() else None,
        relative_error=error,
    )


def _bandwidth(beta: float) -> float:
    # Long arrays took no longer than short ones: the time per byte was not measurable.
    return 1 / beta if beta else inf


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the x ≥ 0 that minimises |matrix · x - target|, exactly.

    An ordinary least-squares solution of every subset of the columns is tried (16 subsets for four
    columns), because an iteration might not converge.
    """
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float(np.sum(target**2))
    # Columns differ by many powers of ten (a message, a byte), so each is scaled to 1 first.
    scale = np.where(matrix.any(axis=0), np.abs(matrix).max(axis=0, initial=0), 1.0)
    lengths = range(1, columns + 1)
    for subset in chain.from_iterable(combinations(range(columns), n) for n in lengths):
        chosen = matrix[:, subset] / scale[list(subset)]
        part, *_ = np.linalg.lstsq(chosen, target, rcond=None)
        residual = float(np.sum((chosen @ part - target) ** 2))
        if (part >= 0).all() and residual < least * (1 - 1e-12):
            best, least = np.zeros(columns), residual
            best[list(subset)] = part / scale[list(subset)]
    return best


def _record(
    item: Measurement | tuple[int, float], ranks: int | None, hosts: int, algorithm: str
) -> Measurement:
    if isinstance(item, Measurement):
        return item
    if ranks is None:
        raise ValueError(
            "pairs (nbytes, seconds) need the number of ranks they were measured with: "
            "found none. Pass ranks=, or Measurement records."
        )
    return Measurement(*item, ranks, hosts, algorithm)
