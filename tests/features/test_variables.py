"""Descriptions of variables on a rank, which the notebook compares."""

from __future__ import annotations

import time

import numpy as np

from allranks.features.toolbar.notebook import compare
from allranks.features.toolbar.rank import describe


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
    late = time.monotonic() + 60
    assert [describe(value, late) for value, _ in values] == [(kind, "", "") for _, kind in values]


def test_small_values_are_compared():
    late = time.monotonic() + 60
    found = [describe(value, late) for value in ({"a": [1, (2.5, None)]}, np.ones(2), True)]
    assert [kind for kind, _, _ in found] == ["dict", "ndarray float64 (2,)", "bool"]
    assert all(digest for _, _, digest in found)
    (row,) = compare({0: {"x": describe(1, late)}, 1: {"x": describe(2, late)}})
    assert row["state"] == "different"
