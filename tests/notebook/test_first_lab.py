"""What the first lab claims is so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.labs import text_of


@pytest.fixture
def lab(executed):
    """The cells of the lab by name, after a run of all of them."""
    return {cell.id: cell for cell in executed("01_ranks").cells}


def test_every_rank_has_what_one_process_finds_alone(lab):
    digits = load_digits()
    left = json.loads(text_of(lab["left-behind"]))
    assert left["counts"] == [np.bincount(digits.target).tolist()] * 4
    assert len(left["means"]) == 4
    np.testing.assert_allclose(left["means"], [digits.images.mean(axis=0)] * 4, rtol=1e-12)


def test_a_rank_that_died_has_no_words_of_earlier_cells(lab):
    earlier = {line.partition("│ ")[2] for cell in lab.values() for line in lines_before(cell, lab)}
    told = text_of(lab["death"])
    assert [words for words in earlier if words and words in told] == []


def lines_before(cell, lab):
    """What a cell has printed, where it stands before the one in which a rank dies."""
    names = list(lab)
    before = names.index(cell.id) < names.index("death")
    return text_of(cell).splitlines() if before and cell.cell_type == "code" else []
