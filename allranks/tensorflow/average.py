"""Which reduction is meant: ``op``, or Horovod's former ``average``. Runs in every rank."""

from __future__ import annotations

import warnings

from allranks.collectives import Average, ReduceOp, Sum
from allranks.collectives.ops.reducing import op_of
from allranks.tensorflow.failures import UsageError, published


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction to carry out.

    Raises:
        UsageError: both are given, or it is no reduction.
    """
    if average is None:
        with published():
            return Average if op is None else op_of("allreduce", op)
    if op is not None:
        raise UsageError("op= and average= say the same thing: found both. Pass op= alone.")
    warnings.warn("average= is deprecated: pass op=Average or op=Sum.", DeprecationWarning, 3)
    return Average if average else Sum
