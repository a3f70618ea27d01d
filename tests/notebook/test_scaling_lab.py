"""What the lab on scaling claims is so."""

from __future__ import annotations

import pytest

from tests.labs import text_of


@pytest.fixture
def lab(executed):
    """The cells of the lab by name, after a run of all of them."""
    return {cell.id: cell for cell in executed("06_scaling").cells}


def test_every_number_of_ranks_has_its_efficiency(lab):
    rows = [line for line in text_of(lab["scaling"]).splitlines() if "efficiency" in line]
    assert len(rows) == 3
    assert rows[0].endswith("efficiency 100%")


def test_what_the_model_says_is_called_simulated(lab):
    for name in ("published", "foretell"):
        rows = [line for line in text_of(lab[name]).splitlines() if "published" in line]
        assert len(rows) == 3
        assert all("simulated" in row for row in rows)


def test_the_model_foretells_what_it_was_not_fitted_to_within_a_few_points(lab):
    rows = [line for line in text_of(lab["foretell"]).splitlines() if "foretold" in line]
    for row in rows:
        published, simulated = (int(word.rstrip("%,")) for word in row.split() if "%" in word)
        assert abs(published - simulated) <= 3
    assert len(rows) == 2
