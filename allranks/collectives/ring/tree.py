"""Binary tree: arrays are reduced from the leaves to rank 0, and the result is handed down."""

from __future__ import annotations

from allranks.collectives.ring.link import Array, Link
from allranks.collectives.ring.pieces import Op, Pieces, Recorder


def tree_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Every rank has the reduction of all ranks' arrays.

    Rank r has the children ``2r + 1`` and ``2r + 2`` and the parent ``(r - 1) // 2``. A rank
    takes in its left child's array, then its right child's, and sends the reduction up; rank 0
    then has everything, and the result goes down the same edges. The depth grows with
    ``log2(size)``. A rank handles one message at a time, so that each level takes two rounds.

    Args:
        array: any shape and numeric dtype, the same on every rank; left as it is.
        link: this rank's link to the others.
        op: "sum", "min", "max" or "product", or an object with such a name.
        recorder: when given, keeps each step; without one nothing is recorded or copied.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on every rank: rank 0
        completes it, the others copy.

    Collective: every rank of the link calls this, in the same order.
    Source: Thakur, Rabenseifner and Gropp (2005), section 4.3, for trees in MPI; NCCL's tree
    is this idea, pipelined and doubled (Sanders, Speck and Träff, 2009).
    """
    rank, size = link.rank, link.size
    pieces = Pieces(array, link, count=1, algorithm="tree", op=op, recorder=recorder)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    height, depth = levels_below_root(size - 1), levels_below_root(rank)

    for turn, child in enumerate(children):
        number = 2 * (height - depth - 1) + turn
        pieces.combine(0, link.receive(child), number=number, phase="reduce", sender=child)

    if rank > 0:
        link.send(parent, pieces[0])
        turn = (rank + 1) % 2
        number = 2 * height + 2 * (depth - 1) + turn
        pieces.replace(0, link.receive(parent), number=number, phase="broadcast", sender=parent)

    for child in children:
        link.send(child, pieces[0])
    return pieces.result()


def levels_below_root(rank: int) -> int:
    """How many edges lie between ``rank`` and rank 0."""
    return (rank + 1).bit_length() - 1
