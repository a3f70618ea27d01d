"""Broadcasts the variables of a model, after a comparison on all ranks. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks import collectives
from allranks.collectives import ProcessSet, global_process_set
from allranks.errors import CollectiveMismatch
from allranks.records.ranks import label

Array = NDArray[Any]


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Assigns the root's values to the variables of every rank, on any backend of Keras 3.

    Args:
        variables: of Keras; the same number, shapes and dtypes on every rank.
        root_rank: a rank of the world, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        CollectiveMismatch: the variables differ between ranks; the message names them.

    Collective over the process set.
    """
    from allranks.keras.versions import keras  # it takes seconds

    found = list(variables)
    check_alike([describe(variable) for variable in found], process_set)
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in found]
    made = broadcast_arrays(arrays, root_rank, process_set)
    for variable, value in zip(found, made, strict=True):
        variable.assign(value)


def broadcast_arrays(arrays: Sequence[Array], root: int, process_set: ProcessSet) -> list[Array]:
    # All arrays of a dtype as one, because a model has hundreds of small ones.
    outs: list[Any] = [None] * len(arrays)
    by_dtype: dict[str, list[int]] = {}
    for index, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype.name, []).append(index)
    for indices in by_dtype.values():
        flat = np.concatenate([arrays[index].reshape(-1) for index in indices])
        whole = collectives.broadcast(flat, root, process_set=process_set)
        ends = np.cumsum([arrays[index].size for index in indices])
        for index, part in zip(indices, np.split(whole, ends[:-1]), strict=True):
            outs[index] = part.reshape(arrays[index].shape)
    return outs


def describe(variable: Any) -> tuple[str, tuple[int, ...], str]:
    name = getattr(variable, "path", None) or getattr(variable, "name", "")
    dtype = variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name
    # TensorFlow 1 has names such as "w:0" and dtypes such as "float32_ref".
    return str(name).removesuffix(":0"), tuple(map(int, variable.shape)), dtype.removesuffix("_ref")


def check_alike(
    described: list[Any], process_set: ProcessSet, title: str = "broadcast_variables"
) -> None:
    # Collective.
    every = collectives.allgather_object(described, process_set=process_set)
    counts = {len(one) for one in every}
    ranks_by_text: dict[str, list[int]] = {}
    for rank, one in zip(process_set.ranks, every, strict=True):
        if len(counts) > 1:
            text = f"{len(one)} variables"
        else:
            at = next((i for i in range(len(one)) if len({e[i][1:] for e in every}) > 1), None)
            if at is None:
                return
            name, shape, dtype = one[at]
            text = f"{name} of shape {shape} and dtype {dtype} at place {at}"
        ranks_by_text.setdefault(text, []).append(rank)
    if len(ranks_by_text) > 1:
        found = ", ".join(f"{label(ranks)} {text}" for text, ranks in ranks_by_text.items())
        raise CollectiveMismatch(
            f"{title} needs the same variables on every rank: found {found}. "
            "Build the model and its optimizer on every rank before the broadcast."
        )
