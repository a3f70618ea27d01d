"""Which reduction is meant: ``op``, or Horovod's former ``average``. Runs in every rank."""

from __future__ import annotations

import warnings
from typing import Any

from allranks.collectives import Average, ReduceOp, Sum


def chosen_op(op: ReduceOp | None, average: bool | None) -> Any:
    """The reduction to carry out, as `meant` has it.

    Raises:
        ValueError: both are given.
    """
    if average is None:
        return Average if op is None else meant(op)
    if op is not None:
        raise ValueError("op= and average= say the same thing: found both. Pass op= alone.")
    warnings.warn("average= is deprecated: pass op=Average or op=Sum.", DeprecationWarning, 3)
    return Average if average else Sum


def meant(op: Any) -> Any:
    """A reduction, by its number too; what is none is named by the call, inside a graph as well."""
    try:
        return ReduceOp(op)
    except ValueError:
        return op
