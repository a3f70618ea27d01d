"""Ring allreduce: every rank talks to its two neighbours only, and every link is always busy."""

from __future__ import annotations

from allranks.collectives.ring.link import Array, Link
from allranks.collectives.ring.pieces import Op, Pieces, Recorder


def ring_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Every rank has the reduction of all ranks' arrays.

    The array is cut into as many chunks as there are ranks. First each chunk travels once
    around the ring and collects every rank's share (reduce-scatter): after ``size - 1`` steps
    each rank owns one chunk that is complete. Then the complete chunks travel around once more
    and replace the incomplete ones (allgather). A rank sends ``2 (size - 1) / size`` times the
    array, however many ranks there are: that is why rings win for large arrays. It waits for
    ``2 (size - 1)`` messages, one after the other: that is why they lose for small ones.

    Args:
        array: any shape and numeric dtype, the same on every rank; left as it is.
        link: this rank's link to the others.
        op: "sum", "min", "max" or "product", or an object with such a name.
        recorder: when given, keeps each step; without one nothing is recorded or copied.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on every rank: each
        chunk is completed on one rank and copied from there.

    Collective: every rank of the link calls this, in the same order.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).
    """
    rank, size = link.rank, link.size
    right, left = (rank + 1) % size, (rank - 1) % size
    pieces = Pieces(array, link, count=size, algorithm="ring", op=op, recorder=recorder)

    for step in range(size - 1):
        mine, theirs = (rank - step) % size, (rank - step - 1) % size
        received = link.exchange(right, pieces[mine], left)
        pieces.combine(theirs, received, number=step, phase="reduce-scatter", sender=left)

    for step in range(size - 1):
        mine, theirs = (rank + 1 - step) % size, (rank - step) % size
        received = link.exchange(right, pieces[mine], left)
        pieces.replace(theirs, received, number=size - 1 + step, phase="allgather", sender=left)

    return pieces.result()
