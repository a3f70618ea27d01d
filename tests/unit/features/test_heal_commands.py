"""``%distributed heal`` and ``keep``."""

from types import SimpleNamespace

import pytest

from allranks.cluster import cluster
from allranks.cluster.features import NotebookHooks
from allranks.errors import UsageError
from allranks.features.heal.notebook import NotebookHeal


@pytest.fixture
def kept(monkeypatch):
    """What the session of the notebook keeps after cells, one after the other."""
    kept = []
    monkeypatch.setattr(cluster, "session", SimpleNamespace(keep_after_cells=kept.append))
    return kept


def keep(*words: str, every: float = 0.0) -> str:
    said: str = NotebookHooks([NotebookHeal]).command("keep", {"variables": words, "every": every})
    return said


def test_names_of_variables_may_have_commas(kept):
    assert keep("model,", "step", every=60).endswith(
        "kept after each cell, at most once in 60 s, until: %distributed keep off"
    )
    assert (kept[0].names, kept[0].every) == (("model", "step"), 60)


def test_nothing_is_kept_after_keep_off(kept):
    assert "No variables are kept" in keep("off")
    assert kept == [None]


@pytest.mark.parametrize(("words", "found"), [((), "found none"), (("x", "a.b"), "found a.b")])
def test_what_names_no_variable_is_refused(words, found, kept):
    with pytest.raises(UsageError, match=f"expected the names of variables, {found}"):
        keep(*words)
    assert kept == []


def test_more_than_one_setting_of_heal_is_refused():
    with pytest.raises(UsageError, match="expected on, ask or off, found on off"):
        NotebookHooks([NotebookHeal]).command("heal", ["on", "off"])
