"""Variables that are the same on every rank. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import ProcessSet, global_process_set
from allranks.errors import UsageError
from allranks.records.ranks import label
from allranks.tensorflow.crossing import Array, cross, like
from allranks.tensorflow.failures import CollectiveMismatch

FOR_VERSION_1 = (
    "A script for TensorFlow 1 runs after %env ALLRANKS_TENSORFLOW=1 and %distributed restart in "
    "the notebook, or with ALLRANKS_TENSORFLOW=1 before the command in a shell."
)
"""What to type where a graph of TensorFlow 1 was expected, and TensorFlow executes eagerly."""


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Every rank's variables have the root's values.

    Args:
        variables: of TensorFlow or Keras, as many, of the same shapes and dtypes, on every rank.
        root_rank: a rank of the world, the same on every rank.
        process_set: whose ranks take part.
        inplace: accepted: variables keep their identity in any case.

    Returns:
        None when eager; in a graph the operation that does it.

    Raises:
        CollectiveMismatch: the variables differ between ranks; the text names them.
        UsageError: they are no variables.

    Collective over the process set.
    """
    return _broadcast_together(_listed(variables), int(root_rank), process_set, None)


def _listed(variables: Any) -> list[Any]:
    """The variables, where all are some; a single one has rows, over which Python iterates."""
    one = hasattr(variables, "assign") or not isinstance(variables, Iterable)
    found = [] if one else list(variables)
    wrong = [variables] if one else [each for each in found if not hasattr(each, "assign")]
    if wrong:
        raise UsageError(
            f"broadcast_variables needs a list of variables: found {type(wrong[0]).__name__}"
            f"{'' if one else ' in it'}. Type for example: "
            "broadcast_variables(model.variables, root_rank=0)"
        )
    return found


def _broadcast_together(
    found: list[Any], root: int, process_set: ProcessSet, name: str | None
) -> Any:
    seen = [_described(variable) for variable in found]

    def move(*arrays: Array) -> list[Array]:
        _check(seen, process_set)
        return _broadcast(arrays, root, process_set)

    sources = [tf.convert_to_tensor(variable) for variable in found]
    if not sources:
        _check_now(seen, process_set)
        return None if tf.executing_eagerly() else tf.no_op()
    specs = [like(source) for source in sources]
    if name is None:
        # In a session it matches the other ranks' by its name, which is that of what it moves.
        name = "broadcast_" + (seen[0][0] if len(seen) == 1 and seen[0][0] else "variables")
    made = cross(move, sources, specs, name, process_set)
    if tf.executing_eagerly() or tf.inside_function():
        for variable, value in zip(found, made, strict=True):
            variable.assign(value)
        return None
    return tf.group(
        *(
            tf.compat.v1.assign(variable, value)
            for variable, value in zip(found, made, strict=True)
        ),
    )


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As `broadcast_variables`; returns the variables.

    Args:
        name: of the operation, which matches the other ranks' in a session.
    """
    found = _listed(variables)
    done = _broadcast_together(found, int(root_rank), process_set, name)
    if done is None:
        return found
    with tf.control_dependencies([done]):
        return [tf.identity(variable) for variable in found]


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives every global variable of a TensorFlow 1 graph the root's value.

    Raises:
        RuntimeError: there is no such graph, as TensorFlow executes eagerly.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph of TensorFlow 1, and TensorFlow executes "
            "eagerly: there are no global variables. Use "
            "broadcast_variables(model.variables, root_rank=0), or in model.fit() the callback "
            f"BroadcastGlobalVariablesCallback(0). {FOR_VERSION_1}"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def _broadcast(arrays: Sequence[Array], root: int, process_set: ProcessSet) -> list[Array]:
    """All arrays of a dtype travel as one."""
    outs: list[Any] = [None] * len(arrays)
    kinds: dict[str, list[int]] = {}
    for index, array in enumerate(arrays):
        kinds.setdefault(array.dtype.name, []).append(index)
    for where in kinds.values():
        flat = np.concatenate([arrays[index].reshape(-1) for index in where])
        whole = collectives.broadcast(flat, root, process_set=process_set)
        start = 0
        for index in where:
            end = start + arrays[index].size
            outs[index] = whole[start:end].reshape(arrays[index].shape)
            start = end
    return outs


def _described(variable: Any) -> tuple[str, tuple[int, ...], str]:
    name = getattr(variable, "path", None) or getattr(variable, "name", "")
    dtype = variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name
    return str(name).removesuffix(":0"), tuple(map(int, variable.shape)), dtype.removesuffix("_ref")


def _check_now(seen: list[Any], process_set: ProcessSet) -> None:
    if tf.executing_eagerly():
        _check(seen, process_set)


def _check(seen: list[Any], process_set: ProcessSet) -> None:
    every = collectives.allgather_object(seen, process_set=process_set)
    counts = {len(one) for one in every}
    brought: dict[str, list[int]] = {}
    for rank, one in zip(process_set.ranks, every, strict=True):
        if len(counts) > 1:
            what = f"{len(one)} variables"
        else:
            at = next((i for i in range(len(one)) if len({e[i][1:] for e in every}) > 1), None)
            if at is None:
                return
            name, shape, dtype = one[at]
            what = f"{name} of shape {shape} and dtype {dtype} at place {at}"
        brought.setdefault(what, []).append(rank)
    if len(brought) > 1:
        said = ", ".join(f"{label(ranks)} {what}" for what, ranks in brought.items())
        raise CollectiveMismatch(
            f"broadcast_variables needs the same variables on every rank: found {said}. "
            "Build the model and its optimizer on every rank before the broadcast."
        )
