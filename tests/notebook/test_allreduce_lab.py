"""What the lab on allreduce claims is so."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.labs import text_of


@pytest.fixture
def lab(executed):
    """The cells of the lab by name, after a run of all of them."""
    return {cell.id: cell for cell in executed("02_allreduce").cells}


@pytest.mark.parametrize("cell", ["ring", "doubling", "tree"])
def test_every_algorithm_adds_up_the_counts_of_all_images(lab, cell):
    counts = tuple(np.bincount(load_digits().target)[:4].tolist())
    assert text_of(lab[cell]).endswith(f"every rank has {counts}\n")


def test_what_was_fitted_is_told_from_what_was_foretold(lab):
    head, *rows = text_of(lab["fit"]).splitlines()
    assert head.split()[-1] == "simulated"
    assert [row.endswith("(fitted to this one)") for row in rows] == [1, 0, 0, 0, 1] * 3
