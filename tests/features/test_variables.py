"""Descriptions of variables on a rank, which the notebook compares."""

from __future__ import annotations

import numpy as np
import pytest

from allranks.features.toolbar.notebook import compare
from allranks.features.toolbar.rank import describe

#: When it is too late to describe a value.
NEVER = float("inf")


class Fails:
    dtype = "float64"

    @property
    def shape(self):
        raise RuntimeError

    def __repr__(self):
        raise ValueError


class FailingInteger(Fails, int):
    pass


class Lazy:
    """Stands for a file, or a computation that has not run."""

    shape, dtype, nbytes = (2, 3), "float64", 48

    def __array__(self, *_):
        raise AssertionError("it was read")


def test_values_that_are_long_or_raise_are_not_compared():
    itself: list[object] = []
    itself.append(itself)
    values = [
        (Fails(), "Fails"),
        (FailingInteger(3), "FailingInteger"),
        (Lazy(), "Lazy float64 (2, 3)"),
        (1 << 100_000, "int"),
        ("x" * 10**8, "str"),
        (["x" * 10**7] * 900, "list"),
        (list(range(10**6)), "list"),
        (itself, "list"),
        (np.zeros(10**9, bool), "ndarray bool (1000000000,)"),
        (np.zeros(2, dtype=[("a", object)]), "ndarray [('a', 'O')] (2,)"),
    ]
    assert [describe(value, NEVER) for value, _ in values] == [(kind, "", "") for _, kind in values]


def test_small_values_are_compared():
    found = [describe(value, NEVER) for value in ({"a": [1, (2.5, None)]}, np.ones(2), True)]
    assert [kind for kind, _, _ in found] == ["dict", "ndarray float64 (2,)", "bool"]
    assert all(digest for _, _, digest in found)
    assert describe(np.float64(2.5), NEVER)[1] == "np.float64(2.5)"
    (row,) = compare({0: {"x": describe(1, NEVER)}, 1: {"x": describe(2, NEVER)}})
    assert row["state"] == "different"


def changed(array):
    array = np.array(array)
    array[-1] += 1
    return array


ROWS = np.arange(6.0)


@pytest.mark.parametrize(
    ("here", "there", "state"),
    [
        ([1, 2, 3], [1, 2, 4], "different"),
        (["a", "b"], ["ab"], "different"),
        ([[1], 2], [[1, 2]], "different"),
        ({"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1}, "same"),
        ({"a": 1}, {"a": 1.0}, "different"),
        ("text", "Text", "different"),
        ({"weights": ROWS}, {"weights": ROWS.copy()}, "same"),
        ({"weights": ROWS}, {"weights": changed(ROWS)}, "different"),
        (ROWS, changed(ROWS), "same shape, different values"),
        (ROWS, ROWS[::-1][::-1], "same"),
        (ROWS, ROWS.astype("float32"), "different types or shapes"),
        (Lazy(), Lazy(), "same shape"),
        (object(), object(), "same type"),
        ([object()], [object()], "same type"),
        ({(1, 2): 3}, {(1, 2): 4}, "different"),
        ({object(): 1}, {object(): 1}, "same type"),
        (np.zeros(25_000_000), np.zeros(25_000_000), "same shape"),
        (nothing := Fails(), nothing, "same type"),
    ],
)
def test_a_value_of_two_ranks_is_called_same_or_different_or_is_not_compared(here, there, state):
    (row,) = compare({0: {"x": describe(here, NEVER)}, 1: {"x": describe(there, NEVER)}})
    assert row["state"] == state
