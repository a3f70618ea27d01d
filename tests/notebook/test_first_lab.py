"""What the first lab claims is so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.labs import error_of, text_of
from tests.notebook.steady import steady


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


def test_what_all_ranks_say_is_shown_once(lab):
    assert "ranks 0–3 │ Good morning!\n" in text_of(lab["hello"])
    assert "rank 2    │ I am rank 2 of 4\n" in text_of(lab["hello"])


def test_the_shares_are_of_all_images(lab):
    assert text_of(lab["shares"]).splitlines() == [
        "rank 0    │ 450 of 1797 images",
        "ranks 1–3 │ 449 of 1797 images",
    ]


def test_every_rank_and_the_notebook_draw(lab):
    drawn = [output for output in lab["draw-shares"].outputs if "image/png" in output.data]
    assert len(drawn) == 4
    assert any("image/png" in output.get("data", {}) for output in lab["picture"].outputs)


@pytest.mark.parametrize(
    ("cell", "name", "told"),
    [
        ("one-raises", "CellFailed", "rank 2"),
        ("one-raises", "CellFailed", "were waiting at line 5: allreduce(share, op=Sum)"),
        ("syntax-error", "InvalidCell", "the cell was not run on any rank"),
        ("timeout", "CellTimeout", "time.sleep(60)"),
        ("death", "RankDied", "ended with exit code 3"),
    ],
)
def test_what_goes_wrong_on_purpose_is_told(lab, cell, name, told):
    assert error_of(lab[cell]).ename == name
    assert told in steady(text_of(lab[cell]))


def test_ranks_outlive_their_errors(lab):
    assert "ranks 0–3 → array(1797)" in text_of(lab["still-there"])


def test_a_rank_that_died_has_no_words_of_earlier_cells(lab):
    earlier = {line.partition("│ ")[2] for cell in lab.values() for line in lines_before(cell, lab)}
    told = text_of(lab["death"])
    assert [words for words in earlier if words and words in told] == []


def lines_before(cell, lab):
    """What a cell has printed, where it stands before the one in which a rank dies."""
    names = list(lab)
    before = names.index(cell.id) < names.index("death")
    return text_of(cell).splitlines() if before and cell.cell_type == "code" else []


def test_a_rank_that_died_is_replaced_and_the_others_kept_their_variables(lab):
    assert text_of(lab["replaced"]).splitlines() == [
        "ranks 0, 2–3 │ True",
        "rank 1       │ False",
        "ranks 0–3    │ the sum of all ranks is 6",
    ]
