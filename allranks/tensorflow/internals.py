"""Names from within Horovod that other packages import. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ReduceOp
from allranks.horovod.common.util import _cache, num_rank_is_power_2
from allranks.tensorflow.average import chosen_op

__all__ = [
    "_cache",
    "_executing_eagerly",
    "_make_subgraph",
    "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "vars_to_refs",
]


def _executing_eagerly() -> bool:
    """Whether an operation is carried out at once."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """The function, compiled."""
    return tf.function(f)


def vars_to_refs(vars: Any) -> Any:
    """References in the place of variables, in tuples in the place of lists."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables again, in lists."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, …."""
    return num_rank_is_power_2(num_rank)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction that ``op`` or the older ``average`` say; Average where neither does.

    Raises:
        ValueError: both say something.
    """
    return chosen_op(op, average) if op is not None or average is not None else Average
