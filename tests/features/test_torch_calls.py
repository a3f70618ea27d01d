"""The calls of torch's process groups, without torch: on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from allranks.collectives import loopback, world
from allranks.collectives.arrays.reductions import ReduceOp
from allranks.collectives.calls.specs import Spec
from allranks.errors import CollectiveMismatch
from allranks.features.torch_jax import calls


def as_bytes(array):
    return array.reshape(-1).view(np.uint8)


def summed(count, elements_of=lambda rank: 5):
    def body():
        this = world.current()
        array = np.full(elements_of(this.rank), this.rank + 1.0)
        plan = calls.reduction(this.groups[0], "all_reduce", ReduceOp.Sum, array, "float64")
        try:
            this.run(calls.all_reduce(this.groups[0], plan, array))
        except CollectiveMismatch as error:
            return str(error), array.tolist()
        return "", array.tolist()

    return loopback.run(count, body)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_all_reduce_is_written_in_place(count):
    assert summed(count) == [("", [count * (count + 1) / 2] * 5)] * count


def test_a_mismatch_changes_no_array():
    for rank, (told, values) in enumerate(summed(3, lambda rank: 4 if rank == 1 else 3)):
        assert "all_reduce(SUM) needs the same shape on every rank: rank 1 has (4,)" in told
        assert values == [rank + 1.0] * (4 if rank == 1 else 3)


def test_a_reduction_of_bits_gathers_them():
    def body():
        this = world.current()
        array = np.array([1 << this.rank], np.int64)
        spec = Spec("all_reduce", "BOR", "int64", (1,))

        def combine(parts):
            return as_bytes(np.bitwise_or.reduce([part.view(np.int64) for part in parts]))

        data = as_bytes(array)
        this.run(calls.reduce_by_gathering(this.groups[0], spec, data, combine, data))
        return int(array[0])

    assert loopback.run(3, body) == [7, 7, 7]


@pytest.mark.parametrize("expected", [3, 4])
def test_both_sides_of_an_all_to_all_agree_on_its_pieces(expected):
    def body():
        this = world.current()
        data = np.full(6, this.rank, np.uint8)
        # Rank 1 expects 3 bytes of rank 0, or another number.
        outs = [np.zeros(expected if (this.rank, sender) == (1, 0) else 3, np.uint8)
                for sender in range(2)]  # fmt: skip
        spec = Spec("all_to_all", "", "uint8")
        call = calls.all_to_all(this.groups[0], spec, data, [3, 3], outs, even=False)
        try:
            this.run(call)
        except CollectiveMismatch as error:
            return str(error)
        return [out.tolist() for out in outs]

    found = loopback.run(2, body)
    if expected == 3:
        assert found == [[[0] * 3, [1] * 3]] * 2
    else:
        for told in found:
            assert "rank 0 sends 3 bytes to rank 1, which expects 4" in told


def test_a_limit_of_time_ends_a_call_with_the_ranks_that_did_not_come():
    def body():
        this = world.current()
        call = calls.barrier(this.groups[0])
        if this.rank == 1:
            return ""
        call.steps = calls.limited(call.steps, 0.05, lambda: calls.expired(call, 0.05))
        with pytest.raises(RuntimeError) as raised:
            this.run(call)
        return str(raised.value)

    # Rank 1 ends its program only later, or RankLeft would be raised.
    told = loopback.together(
        loopback.worlds_of(2), lambda own: in_world(own, body), lambda own, error: None
    )
    assert "Timed out waiting 50ms for barrier" in told[0]
    assert "rank 1 did not arrive" in told[0]


def in_world(own, body):
    from allranks.collectives.world.world import set_thread

    set_thread(own)
    own.begin()
    return body()
