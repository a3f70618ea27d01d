"""The hooks of the notebook's features around a cell."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from allranks.cluster import features
from allranks.cluster.cluster import Cluster
from allranks.cluster.connection import Connection
from allranks.cluster.features import CellContext, ClusterContext, NotebookFeature, NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.errors import CellFailed, FeatureFailed, UsageError
from allranks.records.agent import Again, Exit, Notice
from allranks.records.wire import Interrupt

CELL = CellContext(
    number=1,
    ranks=(0, 1),
    shown=True,
    kernel=None,
    front_end="terminal",
    pending=tuple,
    interrupts=lambda: 0,
    notice=lambda text: None,
    show_output=lambda: None,
    ask=lambda *_: {},
    ask_soon=lambda *_: None,
    poll=lambda call: None,
)


class Diary(NotebookFeature):
    records = (Interrupt,)

    def __init__(self):
        self.seen = []

    def cell_started(self):
        self.seen.append(f"{self.cell.number} started")

    def message_received(self, record, payloads):
        self.seen.append(f"a message in {self.cell.number}")
        raise ValueError("no message today")

    def cell_finished(self):
        self.seen.append(f"{self.cell.number} finished")


class RunsACell(NotebookFeature):
    """Runs a cell at the end of another one, as one that keeps variables."""

    def cell_left(self, run, cells):
        hooks = cells
        if run == 2:
            return
        hooks.cell_started(replace(CELL, number=2))
        assert list(hooks.polls) == ["a poll"]
        hooks.message_received(Interrupt(2), [])
        if run == "interrupted":
            hooks.set_cell(None)
            raise KeyboardInterrupt
        hooks.cell_left(2, hooks)
        hooks.cell_finished()
        assert hooks.take_failure() is None


@pytest.mark.parametrize("how", ["well", "interrupted"])
def test_a_cell_that_a_feature_runs_at_the_end_of_another_one_is_part_of_that(how):
    hooks = NotebookHooks([RunsACell, Diary])
    hooks.roster = ClusterState(2)
    _, diary = hooks.features
    hooks.cell_started(CELL)
    hooks.polls.append("a poll")
    try:
        hooks.cell_left(how, hooks)
    except KeyboardInterrupt:
        assert how == "interrupted"
    hooks.cell_finished()
    assert diary.seen == ["1 started", "a message in 2", "1 finished"]
    assert "no message today" in str(hooks.take_failure())
    assert (diary.cell, hooks.polls) == (None, [])
    hooks.cell_started(replace(CELL, number=3))
    assert diary.seen[-1] == "3 started"


def test_a_cell_is_over_when_the_ranks_end_at_its_end():
    class Ends(NotebookFeature):
        def cell_left(self, run, cells):
            cells.stopped()

    hooks = NotebookHooks([Ends])
    hooks.cell_started(CELL)
    hooks.roster = ClusterState(2)
    hooks.cell_left(None, hooks)
    assert hooks.features[0].cell is None


@pytest.fixture
def no_features(monkeypatch):
    monkeypatch.setattr(features, "_registered", [])


def test_ranks_on_several_hosts_are_refused_where_no_feature_starts_them(no_features):
    with pytest.raises(UsageError, match=r"--on ssh:h1:2,h2:2, found none.*Install it again"):
        Cluster(launcher="ssh:h1:2,h2:2")
    assert Cluster(2, launcher="local").size == 2


def test_features_hear_only_the_events_of_host_agents_that_they_listen_for():
    heard, context = [], ClusterContext(2, lambda *_: None, starts_ranks=True)
    context.listen(lambda event, pid: heard.append((event, pid)), Again, Exit)
    context.listen(lambda event, pid: heard.append((event, pid)), Again)
    ranks = SimpleNamespace(
        driver=SimpleNamespace(put=list), _wire=SimpleNamespace(post=lambda call: True),
        hooks=NotebookHooks(()), listeners=context.listeners, _agents=[],
    )  # fmt: skip
    deliver = Connection._agent_listener(ranks)
    end = Exit(1, 7, -9, by_launcher=False)
    for event in (Notice("text"), end, Again()):
        deliver(event, "")
    assert heard == [(end, None), (Again(), None), (Again(), None)]


def test_a_feature_that_takes_no_part_in_cells_hears_of_no_death():
    class Mourns(NotebookFeature):
        in_cells = False

        def rank_died(self, rank):
            died.append(rank)

    died, hooks = [], NotebookHooks([Mourns])
    hooks.rank_died(0)
    hooks.features[0].in_cells = True
    hooks.rank_died(1)
    assert died == [1]


class FailsToShow(NotebookFeature):
    def cell_shown(self, number, view, folder):
        raise ValueError("no history today")


def test_a_feature_that_raises_once_a_cell_is_shown_fails_that_cell_and_no_other():
    hooks = NotebookHooks([FailsToShow])
    with pytest.raises(FeatureFailed, match="no history today"):
        hooks.cell_shown(1, None, "")
    assert hooks.take_failure() is None


def test_the_error_of_a_cell_stays_where_a_feature_raises_once_it_is_shown():
    hooks = NotebookHooks([FailsToShow])

    def fail():
        try:
            raise CellFailed("the cell's own")
        finally:
            hooks.cell_shown(1, None, "")

    with pytest.raises(CellFailed, match="the cell's own") as raised:
        fail()
    assert "no history today" in raised.value.__notes__[0]
    assert hooks.take_failure() is None


def test_a_feature_that_raises_fails_a_cell_that_runs_where_another_error_is_handled():
    hooks = NotebookHooks([FailsToShow])
    handled = ValueError("of the user's code")
    try:
        raise handled
    except ValueError:
        with pytest.raises(FeatureFailed, match="no history today"):
            hooks.cell_shown(1, None, "", handled)
    assert not hasattr(handled, "__notes__")
