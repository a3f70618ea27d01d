"""What an allreduce costs, counted: messages on the longest path, and bytes on the narrowest link.

Every algorithm's time is linear in the same five numbers, ``base + inside · α_inside + between ·
α_between + inside_nbytes / B_inside + between_nbytes / B_between``: prediction multiplies, fitting
solves for the α and B. Nothing here knows congestion, stragglers or the cost of the additions
themselves (fitting takes the additions into 1 / B).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2


@dataclass(frozen=True)
class Terms:
    """The counts of one allreduce, for the rank that finishes last."""

    inside: float = 0.0
    """Messages between ranks of one host, one after the other."""
    between: float = 0.0
    """Messages between hosts, one after the other."""
    inside_nbytes: float = 0.0
    """Bytes a rank moves inside its host, where that is what takes the time."""
    between_nbytes: float = 0.0
    """Bytes a host sends to the network, where that is what takes the time."""


def terms(
    algorithm: str, nbytes: float, ranks: int, hosts: int, pipelined_tree: bool = False
) -> Terms:
    """The counts of an allreduce of ``nbytes`` per rank; ranks are spread evenly over hosts.

    Raises:
        ValueError: the algorithm is unknown, or there are more hosts than ranks.
    """
    if not 1 <= hosts <= ranks:
        raise ValueError(
            f"each host needs at least one rank: found {ranks} ranks on {hosts} hosts. "
            "Give the total number of ranks, not the number per host."
        )
    if ranks == 1:
        return Terms()
    if algorithm == "ring":
        return ring(nbytes, ranks, hosts)
    if algorithm == "recursive doubling":
        return recursive_doubling(nbytes, ranks, hosts)
    if algorithm == "tree":
        return (double_tree if pipelined_tree else binary_tree)(nbytes, ranks, hosts)
    if algorithm == "nvls":
        return in_switch(nbytes, ranks)
    raise ValueError(
        "the model knows ring, recursive doubling, tree and nvls: "
        f"found {algorithm!r}. Use algorithm='best' to have it choose."
    )


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

    Children are ``2r + 1`` and ``2r + 2``, ranks fill one host after the other: the top of the
    tree lies in the first host, each level below crosses the network, with all ranks of a host
    sharing its cards.
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

    Ranks fill one host after the other: the first log2(p / n) exchanges stay inside, in the
    others all ranks of a host share its network cards.

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


def in_switch(nbytes: float, ranks: int) -> Terms:
    """One message: the switch adds and copies; a rank sends and receives (p + 1) / p arrays.

    Each rank owns one p-th of the array: it reads that part, summed by the switch, and writes
    it back to all; the switch meanwhile reads the whole array from every rank.

    Source: the traffic follows from multimem.ld_reduce and multimem.st (PTX ISA); that it is
    p + 1 where a ring needs 2 p is NVIDIA's own account of NVLink SHARP.
    """
    return Terms(inside=1, inside_nbytes=(ranks + 1) / ranks * nbytes)
