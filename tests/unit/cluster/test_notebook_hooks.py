"""The hooks of the notebook's features around a cell."""

from dataclasses import replace

import pytest

from allranks.cluster.features import CellContext, NotebookFeature, NotebookHooks
from allranks.cluster.state import ClusterState
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
