"""The reservation of the ranks for the members of an ensemble."""

from types import SimpleNamespace

import pytest

from allranks.cluster.cells import Cells
from allranks.cluster.failures import ProcessExit
from allranks.cluster.features import NotebookFeature, NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.errors import UsageError
from allranks.features.ensemble import slots
from allranks.features.ensemble.slots import member_slots


class InterruptedState(ClusterState):
    def reserve(self, text, thread):
        super().reserve(text, thread)
        raise KeyboardInterrupt


class Reserved(NotebookFeature):
    def ranks_reserved(self):
        done.append("reserved")


done: list[str] = []


@pytest.fixture
def cells(monkeypatch):
    """Two ranks, which answer at once; ``done`` has what was done with them."""
    done.clear()
    monkeypatch.setattr(slots, "renew", lambda ranks, tell: None)

    def ask(name, arguments, ranks):
        done.append("members")
        return {rank: ({"epoch": 1, "dirty": False}, []) for rank in ranks}

    made = Cells(2, {})
    made.hooks = NotebookHooks([Reserved])
    made.roster.set_phase("running")
    made._connection = SimpleNamespace(
        roster=made.roster, size=2, ask=ask, ask_soon=lambda name, *_: done.append("alone"),
        closed=False, step=lambda seconds: None,
        reserve=lambda text: made.roster.reserve(text, 0) is None,
    )  # fmt: skip
    return made


def test_the_reservation_of_ranks_that_run_a_cell_is_refused_and_changes_nothing(cells):
    cells.roster.begin_cell(1, (0, 1), 0)
    cells._connection.is_left = lambda cell: False
    with pytest.raises(UsageError, match="found them running a cell"), member_slots(cells, 1):
        pass
    assert done == []


def test_ranks_are_prepared_for_members_once_those_that_have_died_are_replaced(cells):
    def catch_up():
        done.append("caught up")
        if "members" in done:
            cells.roster.dead.clear()

    cells.catch_up = catch_up
    cells.roster.dead[1] = ProcessExit(1, -9)
    with member_slots(cells, 1):
        assert done == ["caught up", "members", "caught up", "members", "reserved"]


def test_an_interrupt_in_the_reservation_leaves_the_ranks_idle(cells):
    cells.roster.__class__ = InterruptedState
    with pytest.raises(KeyboardInterrupt), member_slots(cells, 1):
        pass
    cells.check_idle()
    assert done == ["members", "reserved", "alone"]
