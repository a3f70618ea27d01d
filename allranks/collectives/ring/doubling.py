"""Recursive doubling: partners twice as far apart in each round, done after log2(size) rounds."""

from __future__ import annotations

from allranks.collectives.ring.link import Array, Link
from allranks.collectives.ring.pieces import Op, Pieces, Recorder


def recursive_doubling_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Every rank has the reduction of all ranks' arrays.

    In round k a rank swaps its whole array with the partner whose number differs in bit k, and
    both reduce: groups of 2, 4, 8 … ranks agree. That takes ``log2(size)`` rounds, few messages
    for small arrays, but a rank sends its whole array in each.

    Sizes that are no power of two fold first: with ``core`` the largest power of two that
    fits, each rank from ``core`` up gives its array to the rank ``core`` below it, sits out
    the doubling, and is given the result at the end: two rounds more.

    Args:
        array: any shape and numeric dtype, the same on every rank; left as it is.
        link: this rank's link to the others.
        op: "sum", "min", "max" or "product", or an object with such a name.
        recorder: when given, keeps each step; without one nothing is recorded or copied.

    Returns:
        A new array of the same shape and dtype, the same on every rank: partners combine the
        same two operands, and these operations do not mind their order.

    Collective: every rank of the link calls this, in the same order.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), section 4.5.
    """
    rank, size = link.rank, link.size
    pieces = Pieces(array, link, count=1, algorithm="recursive doubling", op=op, recorder=recorder)
    rounds = size.bit_length() - 1
    core = 1 << rounds
    folded = 1 if core < size else 0

    if rank >= core:
        link.send(rank - core, pieces[0])
        result = link.receive(rank - core)
        pieces.replace(0, result, number=folded + rounds, phase="unfold", sender=rank - core)
        return pieces.result()

    extra = rank + core
    if extra < size:
        pieces.combine(0, link.receive(extra), number=0, phase="fold", sender=extra)

    for k in range(rounds):
        partner = rank ^ (1 << k)
        received = link.exchange(partner, pieces[0], partner)
        pieces.combine(0, received, number=folded + k, phase="double", sender=partner)

    if extra < size:
        link.send(extra, pieces[0])
    return pieces.result()
