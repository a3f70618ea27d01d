"""``%distributed heal`` and ``keep``."""

from types import SimpleNamespace

import pytest

from allranks import CapturedOutput
from allranks.cluster import cluster
from allranks.cluster.cell_run import HiddenView
from allranks.cluster.features import ClusterContext, NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.errors import CellInterrupted, Report, UsageError
from allranks.features.heal import recovery_driver
from allranks.features.heal.notebook import AfterCells, NotebookHeal


@pytest.fixture
def hooks():
    return NotebookHooks([NotebookHeal])


@pytest.fixture
def kept(hooks, monkeypatch):
    """The names that are kept after a cell."""
    kept = []
    monkeypatch.setattr(AfterCells, "keep_after", lambda after, run, cells: kept.append(after))

    def after_a_cell():
        kept.clear()
        hooks.cell_left(None, SimpleNamespace(roster=SimpleNamespace(replaces_now=False)))
        return [(after.names, after.every) for after in kept]

    return after_a_cell


@pytest.mark.parametrize("shown", [True, False])
def test_the_next_cell_says_that_a_rank_died_in_one_that_showed_nothing(hooks, monkeypatch, shown):
    monkeypatch.setattr(recovery_driver, "replace_after", lambda *_: "rank 1 was replaced")
    cells = SimpleNamespace(
        roster=SimpleNamespace(replaces_now=True),
        connection=SimpleNamespace(words=SimpleNamespace(deaths_text=lambda: "rank 1 died")),
        news=[],
    )
    view = CapturedOutput() if shown else HiddenView(lambda batch: None)
    hooks.cell_left(SimpleNamespace(view=view), cells)
    assert cells.news == ([] if shown else ["rank 1 died", "rank 1 was replaced"])


def keep(hooks, *words: str, every: float = 0.0) -> str:
    said: str = hooks.command("keep", {"variables": words, "every": every})
    return said


def test_names_of_variables_may_have_commas(hooks, kept):
    assert kept() == []
    assert keep(hooks, "model,", "step", every=60).endswith(
        "kept after each cell, at most once in 60 s, until: %distributed keep off"
    )
    assert kept() == [(("model", "step"), 60)]


def test_nothing_is_kept_after_keep_off(hooks, kept):
    keep(hooks, "model")
    assert "No variables are kept" in keep(hooks, "off")
    assert kept() == []


@pytest.mark.parametrize(("words", "found"), [((), "found none"), (("x", "a.b"), "found a.b")])
def test_what_names_no_variable_is_refused(words, found, hooks, kept):
    with pytest.raises(UsageError, match=f"expected the names of variables, {found}"):
        keep(hooks, *words)
    assert kept() == []


def test_more_than_one_setting_of_heal_is_refused(hooks):
    with pytest.raises(UsageError, match=r"expected on, ask, off, found 'on off'\. Type for"):
        hooks.command("heal", ["on", "off"])
    with pytest.raises(UsageError, match=r"found 'of'\. Type for example: %distributed heal on"):
        hooks.command("heal", ["of"])


def test_heal_shows_why_the_ranks_that_it_replaces_have_died(hooks, monkeypatch, capsys):
    said = "rank 1 was killed"
    words = SimpleNamespace(deaths_text=lambda: said)
    cells = SimpleNamespace(is_up=lambda tell: True, connection=SimpleNamespace(words=words))
    roster = SimpleNamespace(dead={1: None})
    ranks = SimpleNamespace(cells=cells, roster=roster, heal=lambda tell: "rank 1 was replaced")
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=ranks))
    assert hooks.command("heal", []) == "rank 1 was replaced"
    assert capsys.readouterr().out == f"{said}\n"


def test_a_setting_of_heal_is_also_that_of_ranks_that_start_later(hooks, monkeypatch):
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=None))

    def of_new_ranks(before):
        roster = ClusterState(2)
        roster.replacing = before
        hooks.started(ClusterContext(2, lambda *_: None, starts_ranks=True, roster=roster))
        return roster.replacing

    assert [of_new_ranks("on"), of_new_ranks("off")] == ["on", "off"]  # as their program has set
    hooks.command("heal", ["ask"])
    assert of_new_ranks("on") == "ask"


def test_what_a_program_sets_after_a_setting_of_heal_lasts_when_its_ranks_start_again(
    hooks, monkeypatch
):
    roster = ClusterState(2)
    ranks = SimpleNamespace(
        roster=roster, heal_when=lambda when: setattr(roster, "replacing", when)
    )
    again = ClusterContext(2, lambda *_: None, starts_ranks=True, roster=roster)
    hooks.started(again)
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=ranks))
    hooks.command("heal", ["ask"])
    ranks.heal_when("off")
    hooks.started(again)
    assert roster.replacing == "off"
    # Without ranks, it is a setting of the next ones.
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=None))
    hooks.command("heal", ["on"])
    hooks.started(again)
    assert roster.replacing == "on"


def test_the_line_about_an_interrupted_keep_has_its_reason():
    pressed = Report(0, "host", "cpu", "KeyboardInterrupt", "", (), None, "", False)
    said = []

    def wait(run):
        raise CellInterrupted("ranks 0–1: KeyboardInterrupt", "", [pressed])

    connection = SimpleNamespace(roster=SimpleNamespace(phase="running"), late=[], size=2)
    cells = SimpleNamespace(connection=connection, begin=lambda *_, **__: None, wait=wait)
    view = SimpleNamespace(notice=said.append)
    AfterCells(["x"]).keep_after(SimpleNamespace(view=view, ended_well=True), cells)
    assert said == ["x not kept: KeyboardInterrupt"]
