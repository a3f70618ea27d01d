"""Which reduction an argument ``op`` means."""

from __future__ import annotations

import enum

import numpy as np
import pytest

from allranks.collectives.arrays.reductions import Average, Product, ReduceOp, Sum
from allranks.collectives.ops.reducing import op_of
from allranks.errors import UsageError


class RedOpType(enum.Enum):
    """Has the names and the numbers of torch's enumeration, and is equal to these numbers."""

    SUM, AVG, PRODUCT, MIN, MAX, BAND = range(6)

    def __eq__(self, other: object) -> bool:
        return other == self.value

    def __hash__(self) -> int:
        return hash(self.value)


class WrappedOp:
    """As torch.distributed.ReduceOp(ReduceOp.SUM)."""

    def __init__(self, op: RedOpType) -> None:
        self.op = op


RedOpType.__module__ = WrappedOp.__module__ = "torch._C._distributed_c10d"
OF_TORCH = [RedOpType.AVG, RedOpType.SUM, RedOpType.MIN, RedOpType.MAX, RedOpType.PRODUCT]


def test_a_number_means_the_reduction_with_this_value():
    assert [op_of("allreduce", n) for n in (0, np.int64(1), Product)] == [Average, Sum, Product]


def test_an_operation_of_torch_means_the_reduction_with_its_name():
    ours = [Average, Sum, ReduceOp.Min, ReduceOp.Max, Product]
    assert [op_of("allreduce", op) for op in OF_TORCH] == ours
    wrapped = [op_of("allreduce", WrappedOp(op)) for op in OF_TORCH]
    assert wrapped == ours


@pytest.mark.parametrize("op", [True, False, 99, -1, None, "sum", RedOpType.BAND])
def test_what_is_no_reduction_is_refused(op: object):
    with pytest.raises(UsageError, match="expected op Sum, Average, Min, Max or Product"):
        op_of("allreduce", op)
