"""The numbers that ranks bring to reductions are looked at before they move."""

import math
import sys
import warnings

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import Max, Sum, loopback
from allranks.collectives import world as worlds
from allranks.collectives.calls.numbers import LEAST_NBYTES, InputNumbers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

SIZE = LEAST_NBYTES // 4


def looked_at(calls) -> list[InputNumbers]:
    """The numbers of two ranks that make these calls, as functions of the rank."""

    def program() -> InputNumbers:
        found = worlds.current().numbers = InputNumbers()
        for call in calls:
            call(c.rank())
        return found

    return loopback.run(2, program)


def floats(rank: int, step: int = 1, dtype: str = "f4") -> np.ndarray:
    return np.arange(SIZE, dtype=dtype) * (rank + 2) + step


def with_nan(rank: int, at: int) -> np.ndarray:
    array = floats(rank).reshape(-1, 8)
    array.reshape(-1)[at] = math.nan if rank == 1 else 1.0
    return array


def right(rank: int):
    return c.allreduce(floats(rank).reshape(-1, 8))


@pytest.mark.parametrize("at", [0, SIZE // 2, -1])
def test_the_first_call_with_nan_is_kept_on_the_rank_that_brings_it(at):
    def wrong(rank: int):
        return c.allreduce(with_nan(rank, at))

    first, second = looked_at([right, wrong, wrong])
    assert not first.not_finite
    (found,) = second.not_finite.values()
    assert (found.op, found.call, found.count) == ("allreduce", 2, 2)


def test_a_finite_call_after_it_ends_a_run_of_nan():
    def wrong(rank: int):
        return c.allreduce(with_nan(rank, 0))

    def of_another_shape(rank: int):
        return c.allreduce(floats(rank))

    assert not looked_at([wrong, right])[1].not_finite
    assert looked_at([wrong, of_another_shape])[1].not_finite


@pytest.mark.parametrize(
    "call",
    [
        lambda r: c.grouped_allreduce([floats(r), with_nan(r, -1)]),
        lambda r: c.synchronize(c.allreduce_async(with_nan(r, 0), Sum)),
        lambda r: c.allreduce(with_nan(r, 0), transport="shared"),
    ],
)
def test_all_ways_of_a_reduction_are_looked_at(call):
    assert [len(one.not_finite) for one in looked_at([call])] == [0, 1]


def test_large_sums_minima_integers_and_small_arrays_are_no_nan():
    large = np.full(SIZE, 1.5e308)  # the sum of both ranks is 0
    calls = [
        lambda r: c.allreduce(large if r else -large),
        lambda r: c.allreduce(with_nan(r, 0), Max),
        lambda _: c.allreduce(np.ones(SIZE, np.int64)),
        lambda r: c.allreduce(np.array([math.inf, r])),
    ]
    assert not any(one.not_finite for one in looked_at(calls))


def test_checksums_of_the_same_calls_can_be_compared():
    same = [lambda _, at=at: c.allreduce(floats(0, at)) for at in range(3)]
    differ = [lambda r, at=at: c.allreduce(floats(r, at)) for at in range(3)]
    constant = [lambda _: c.allreduce(np.ones(SIZE, np.float32))]
    first, second = looked_at([*same, *differ, *constant])
    pairs = list(zip(first.brought, second.brought, strict=True))
    assert [a.call for a, _ in pairs] == [b.call for _, b in pairs] == [1, 2, 3, 4, 5, 6, 7]
    assert [a.checksum == b.checksum for a, b in pairs] == [True] * 3 + [False] * 3 + [True]
    assert [a.varied for a, _ in pairs] == [True] * 6 + [False]


def test_equal_arrays_of_other_orders_in_memory_have_the_same_checksum():
    square = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    first, second = looked_at([lambda r: c.allreduce(np.asarray(square, order="CF"[r]))])
    assert first.brought == second.brought


def test_no_number_of_long_double_warns():
    with warnings.catch_warnings(action="error"):
        looked_at([lambda _: c.allreduce(np.full(SIZE, np.inf, np.longdouble))])


def test_of_many_calls_few_have_a_checksum():
    array = np.ones(SIZE, np.float32)
    first, second = looked_at([lambda _: c.allreduce(array)] * 200)
    assert [a.call for a in first.brought] == [*range(1, 65), 128, 192]
    assert [a.call for a in second.brought] == [a.call for a in first.brought]


def test_nan_is_found_between_the_calls_with_a_checksum():
    calls = [right] * 70 + [lambda r: c.allreduce(with_nan(r, 0))] * 3 + [right]
    first, second = looked_at(calls[:-1])
    assert not first.not_finite
    (found,) = second.not_finite.values()
    assert (found.call, found.count) == (71, 3)
    assert not looked_at(calls)[1].not_finite
