"""The results that the labs state are right, in a run of all of their cells."""

import json

import numpy as np
import pytest

from tests.labs import text_of


@pytest.fixture
def digits():
    # Here, since each worker of pytest imports this file, and the import takes two seconds.
    from sklearn.datasets import load_digits

    return load_digits()


@pytest.fixture
def said(executed):
    return lambda name: {
        cell.id: text_of(cell) for cell in executed(name).cells if cell.cell_type == "code"
    }


def test_ranks_have_what_one_process_finds_and_a_dead_one_no_words_of_earlier_cells(said, digits):
    left = json.loads(said("01_ranks")["left-behind"])
    assert left["counts"] == [np.bincount(digits.target).tolist()] * 4
    assert len(left["means"]) == 4
    np.testing.assert_allclose(left["means"], [digits.images.mean(axis=0)] * 4, rtol=1e-12)
    texts = said("01_ranks")
    names = list(texts)
    before = [texts[name] for name in names[: names.index("death")]]
    earlier = {line.partition("│ ")[2] for text in before for line in text.splitlines()}
    assert len(earlier) > 1
    assert [words for words in earlier if words and words in texts["death"]] == []


@pytest.mark.parametrize("cell", ["ring", "doubling", "tree"])
def test_every_algorithm_adds_up_the_counts_of_all_images(said, digits, cell):
    counts = tuple(np.bincount(digits.target)[:4].tolist())
    assert said("02_allreduce")[cell].endswith(f"every rank has {counts}\n")


def test_what_was_fitted_is_told_from_what_was_foretold_within_a_few_points(said):
    head, *rows = said("06_cost")["fit"].splitlines()
    assert head.split()[-1] == "simulated"
    assert [row.endswith("(fitted to this one)") for row in rows] == [1, 0, 0, 0, 1] * 3
    rows = [line for line in said("07_scaling")["scaling"].splitlines() if "efficiency" in line]
    assert len(rows) == 3
    assert rows[0].endswith("efficiency 100%")
    rows = [line for line in said("07_scaling")["foretell"].splitlines() if "foretold" in line]
    assert len(rows) == 2
    for row in rows:
        published, simulated = (int(word.rstrip("%,")) for word in row.split() if "%" in word)
        assert abs(published - simulated) <= 3


@pytest.mark.parametrize("cell", ["published", "foretell"])
def test_what_the_model_says_is_called_simulated(said, cell):
    rows = [line for line in said("07_scaling")[cell].splitlines() if "published" in line]
    assert len(rows) == 3
    assert all("simulated" in row for row in rows)
