"""A lab works with other numbers of ranks than four, and its exercises can be solved there.

ALLRANKS_TEST_LAB_RANKS=2,3,5 runs all labs with 2, 3 and 5 ranks.
"""

import os

import pytest

from tests import labs
from tests.labs import FAILS, LABS

RANKS = [int(word) for word in os.environ.get("ALLRANKS_TEST_LAB_RANKS", "").split(",") if word]
# Three is odd, and no power of two; this short lab names the number of its ranks in many cells.
CASES = [(name, ranks) for ranks in RANKS for name in LABS] or [("05_race", 3)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_lab_works_with_other_numbers_of_ranks(name, ranks, run_lab):
    lab = run_lab(name, labs.with_ranks(labs.solved(name), ranks))
    run = {cell.id: cell for cell in lab.cells}
    assert set(labs.failed(lab)) <= set(labs.tagged(lab, FAILS))
    for exercise in labs.exercises(labs.read(name)):
        assert "not yet: " in labs.error_of(run[f"check-{exercise}"]).evalue
        assert "right: " in labs.text_of(run[f"solved-{exercise}"])
