"""Which reduction is meant: ``op``, or Horovod's former ``average``. Runs in every rank."""

from __future__ import annotations

import warnings

from allranks.collectives import Average, ReduceOp, Sum


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction to carry out.

    Raises:
        ValueError: both are given, or the number is no reduction's.
    """
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError("op= and average= say the same thing: found both. Pass op= alone.")
    warnings.warn("average= is deprecated: pass op=Average or op=Sum.", DeprecationWarning, 3)
    return Average if average else Sum
