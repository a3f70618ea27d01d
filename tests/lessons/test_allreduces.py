"""The three allreduces agree with numpy for all sizes, lengths, dtypes and reductions."""

from __future__ import annotations

import enum
import functools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import CollectiveError, RankLeft
from allranks.lessons.ring import (
    ALGORITHMS,
    LoopbackLinks,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)

ALLREDUCES = [ring_allreduce, recursive_doubling_allreduce, tree_allreduce]
NUMPY = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}

every_allreduce = pytest.mark.parametrize("allreduce", ALLREDUCES, ids=list(ALGORITHMS))


def run(allreduce, arrays, op="sum"):
    links = LoopbackLinks(len(arrays), timeout_seconds=60)
    return links.run(lambda link: allreduce(arrays[link.rank], link, op))


def expected(arrays, op="sum"):
    return functools.reduce(NUMPY[op], arrays)


@every_allreduce
@settings(max_examples=50)
@given(
    size=st.integers(1, 9),
    length=st.integers(0, 50),
    dtype=st.sampled_from(INTEGERS),
    op=st.sampled_from(list(NUMPY)),
    seed=st.integers(0, 2**32 - 1),
)
def test_integers_are_exact(allreduce, size, length, dtype, op, seed):
    limits, random = np.iinfo(dtype), np.random.default_rng(seed)
    arrays = [
        random.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True)
        for _ in range(size)
    ]
    for result in run(allreduce, arrays, op):
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, expected(arrays, op))


@every_allreduce
@settings(max_examples=30)
@given(
    size=st.integers(1, 9),
    length=st.integers(0, 50),
    dtype=st.sampled_from(list(FLOATS)),
    op=st.sampled_from(list(NUMPY)),
    seed=st.integers(0, 2**32 - 1),
)
def test_floats_are_close_and_bitwise_equal_on_every_rank(allreduce, size, length, dtype, op, seed):
    random = np.random.default_rng(seed)
    arrays = [random.uniform(0.5, 2.0, length).astype(dtype) for _ in range(size)]
    results = run(allreduce, arrays, op)
    np.testing.assert_allclose(results[0], expected(arrays, op), rtol=FLOATS[dtype])
    assert len({result.tobytes() for result in results}) == 1


WHOLE = np.arange(24).reshape(4, 6)
KINDS = {
    **{f"shape {s}": [np.full(s, r) for r in range(3)] for s in [(), (1,), (2, 3), (4, 0)]},
    "three dimensions": [np.full((2, 3, 5), rank) for rank in range(3)],
    "complex": [np.array([rank + 2j, 1.0]) for rank in range(5)],
    "not contiguous": [WHOLE[:, ::2], WHOLE[:, 1::2]],
}


@every_allreduce
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_every_kind_keep_their_shape_and_are_left_as_they_are(allreduce, kind):
    copies = [array.copy() for array in KINDS[kind]]
    for array in KINDS[kind]:
        array.flags.writeable = False
    for result in run(allreduce, KINDS[kind]):
        assert result.shape == copies[0].shape
        np.testing.assert_array_equal(result, sum(copies))
    np.testing.assert_array_equal(KINDS[kind], copies)


def test_an_op_may_be_any_object_with_a_known_name():
    Reduction = enum.Enum("Reduction", ["Sum", "Max"])
    arrays = [np.array([1, 9]), np.array([5, 2])]
    np.testing.assert_array_equal(run(ring_allreduce, arrays, Reduction.Max)[0], [5, 9])
    with pytest.raises(ValueError, match="one of sum, min, max, product: found 'average'"):
        run(ring_allreduce, [np.ones(2)] * 2, "average")


def test_ranks_that_wait_for_a_failed_rank_are_freed_at_once():
    seen = []

    def one_rank(link):
        if link.rank == 1:
            raise KeyError("no data")
        try:
            ring_allreduce(np.ones(4), link)
        except RankLeft as error:
            seen.append(str(error))
            raise

    # The failure ends the waits, long before the timeout.
    with pytest.raises(KeyError, match="no data"):
        LoopbackLinks(3, timeout_seconds=3600).run(one_rank)
    assert "rank 2 expected an array from rank 1: rank 1 raised KeyError" in " ".join(seen)
    assert "allreduce" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_that_never_sends_is_given_up():
    links = LoopbackLinks(2, timeout_seconds=0.05)
    with pytest.raises(CollectiveError, match="none came in"):
        links.run(lambda link: ring_allreduce(np.ones(2), link) if link.rank == 0 else None)
