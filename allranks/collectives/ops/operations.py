"""The public functions that move arrays and objects without reducing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.collectives.ops import moving, objects
from allranks.collectives.ops.handles import Handle, first, run
from allranks.collectives.world.process_sets import ProcessSet, group_of


def barrier(process_set: ProcessSet | None = None, name: str | None = None) -> None:
    """Returns on every rank once every rank has called it. Collective over the process set."""
    run(moving.begin_barrier(process_set, name))


def broadcast(array: Any, root: int = 0, **options: Any) -> Any:
    """Every rank gets the root's array.

    Args:
        array: any shape and dtype, the same on every rank; its values count on the root only.
        root: a rank of the world, in a process set too; the same on every rank.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        A new array of the kind, dtype, shape and device of this rank's input.

    Collective over the process set.
    """
    return run(moving.begin_broadcast(array, root, **options))


def broadcast_async(array: Any, root: int = 0, **options: Any) -> Handle:
    """Posts a `broadcast`; `synchronize` returns its result."""
    return Handle(moving.begin_broadcast(array, root, **options))


def allgather(array: Any, **options: Any) -> Any:
    """Every rank gets all ranks' arrays, one after the other along the first dimension.

    Args:
        array: shape (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        Shape (sum of rows, ...), the same on every rank.

    Collective over the process set.
    """
    return run(moving.begin_allgather([array], **options))[0]


def allgather_async(array: Any, **options: Any) -> Handle:
    """Posts an `allgather`; `synchronize` returns its result."""
    return Handle(moving.begin_allgather([array], **options), first)


def grouped_allgather(arrays: Sequence[Any], **options: Any) -> list[Any]:
    """Every rank gets the allgathers of a list of arrays, moved together: one wait for all.

    Collective over the process set.
    """
    if not arrays:
        return []
    result: list[Any] = run(moving.begin_allgather(arrays, kind="grouped_allgather", **options))
    return result


def grouped_allgather_async(arrays: Sequence[Any], **options: Any) -> Handle:
    """Posts a `grouped_allgather` of at least one array; `synchronize` returns its results."""
    return Handle(moving.begin_allgather(arrays, kind="grouped_allgather", **options))


def gather(array: Any, root: int = 0, **options: Any) -> Any:
    """The root gets what `allgather` would give to all; the others get None.

    Collective over the process set.
    """
    return run(moving.begin_allgather([array], kind="gather", root=root, **options))[0]


def gather_async(array: Any, root: int = 0, **options: Any) -> Handle:
    """Posts a `gather`; `synchronize` returns its result."""
    return Handle(moving.begin_allgather([array], kind="gather", root=root, **options), first)


def scatter(array: Any = None, root: int = 0, splits: Any = None, **options: Any) -> Any:
    """Every rank gets its piece of the root's array, cut along the first dimension.

    Args:
        array: shape (rows, ...) on the root; elsewhere None, or an array of the kind and device
            that the piece shall have.
        root: a rank of the world, the same on every rank.
        splits: rows a rank, on the root; equal pieces where it is None.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Collective over the process set.
    """
    return run(moving.begin_scatter(array, root, splits, **options))


def scatter_async(array: Any = None, root: int = 0, splits: Any = None, **options: Any) -> Handle:
    """Posts a `scatter`; `synchronize` returns its result."""
    return Handle(moving.begin_scatter(array, root, splits, **options))


def alltoall(array: Any, splits: Any = None, **options: Any) -> Any:
    """Every rank sends each rank a piece of its array and gets a piece from each.

    Args:
        array: shape (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        splits: how many rows go to each rank, (size,); equal pieces where it is None.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        The pieces in the order of the ranks they come from, (received rows, ...); with
        ``splits`` a pair of that and the number of rows received from each rank.

    Collective over the process set.
    """
    pieces, received = run(moving.begin_alltoall(array, splits, **options))
    return pieces if splits is None else (pieces, received)


def alltoall_async(array: Any, splits: Any = None, **options: Any) -> Handle:
    """Posts an `alltoall`; `synchronize` returns its result."""
    call = moving.begin_alltoall(array, splits, **options)
    return Handle(call, first if splits is None else None)


def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Every rank gets a copy of the root's object; the root gets the object itself.

    Collective over the process set.
    """
    group = group_of(process_set, "broadcast_object")
    index = group.index(root, "broadcast_object")
    return run(objects.broadcast(group, "broadcast_object", value, name, index))


def allgather_object(
    value: Any, *, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Every rank gets the list of all ranks' objects, in the order of the ranks.

    Collective over the process set.
    """
    group = group_of(process_set, "allgather_object")
    result: list[Any] = run(objects.gather(group, "allgather_object", value, name))
    return result
