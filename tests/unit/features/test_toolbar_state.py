"""What the kernel tells the sidebar of ranks that have died, or that run something beside cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster import cluster
from allranks.cluster.features import ClusterContext
from allranks.cluster.state import ClusterState
from allranks.features.toolbar import notebook
from allranks.features.toolbar.notebook import Toolbar
from allranks.records.agent import Exit
from allranks.records.ranks import BETWEEN, IDLE, RUNNING, WAITS, Activity
from allranks.records.wire import Hello
from tests.unit.cluster.test_state import hello


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks 0 and 1, their toolbar, and what it sends to the page."""
    sent: list[dict[str, Any]] = []
    roster, toolbar = ClusterState(2), Toolbar()
    roster.connect(can_replace=True)
    roster.set_phase("running")
    waits: list[str] = []
    ranks: Any = SimpleNamespace(
        size=2,
        roster=roster,
        hellos={rank: hello(rank) for rank in range(2)},
        log_dir="logs",
        interrupts=[],
        cells=SimpleNamespace(
            connection=SimpleNamespace(run=None),
            hooks=SimpleNamespace(
                replaces_ranks="%distributed heal",
                holds_cells=True,
                command=lambda name, *_: waits if name == "unanswered" else None,
            ),
        ),
    )
    ranks.interrupt = lambda: ranks.interrupts.append("ranks")
    context = ClusterContext(2, lambda *_: None, False)
    monkeypatch.setattr(cluster, "running", lambda: ranks)
    monkeypatch.setattr(notebook, "_of_notebook", lambda: toolbar)
    monkeypatch.setattr(notebook, "_send", sent.append)
    monkeypatch.setattr(notebook, "_open_comm", lambda: None)
    monkeypatch.setattr(notebook, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    toolbar.started(context)

    def state(*every: Activity) -> dict[str, Any]:
        answers = {
            rank: {"doing": [*one], "rss_nbytes": 1, "line": ""} for rank, one in enumerate(every)
        }
        notebook._send_state(ranks, answers)
        return sent[-1]

    return SimpleNamespace(ranks=ranks, waits=waits, hear=context.listeners[Exit][0], state=state)


def test_a_rank_that_died_beside_cells_is_dead_and_not_silent(page: Any) -> None:
    # The cluster itself looks at this before the next cell.
    first: Hello = page.ranks.hellos[1]
    page.hear(Exit(1, first.pid, 3, False), None)
    (_, row) = page.state(IDLE)["rows"]
    assert (row["state"], row["is_bad"]) == ("dead", True)
    assert row["detail"] == "ended with exit code 3: the next cell of the ranks replaces it"
    page.ranks.roster.replacing = "ask"
    (_, row) = page.state(IDLE)["rows"]
    assert row["detail"] == "ended with exit code 3. Type: %distributed heal"
    page.ranks.roster.replacing = "off"
    (_, row) = page.state(IDLE)["rows"]
    assert row["detail"].endswith("3: the next cell of the ranks starts all of them again")


def test_ranks_are_not_asked_after_a_death_where_no_page_can_show_it() -> None:
    context = ClusterContext(2, lambda *_: None, False)
    Toolbar().started(context)
    assert not context.listeners


def test_a_process_that_has_taken_the_place_of_a_dead_one_is_not_dead(page: Any) -> None:
    page.hear(Exit(1, page.ranks.hellos[1].pid + 1, 3, False), None)
    assert [row["state"] for row in page.state(IDLE, IDLE)["rows"]] == ["idle", "idle"]


@pytest.mark.parametrize(
    "doing",
    [
        RUNNING,
        Activity(WAITS, "barrier", "rank 0"),
        Activity(BETWEEN, "at f.py:3"),
    ],
)
def test_ranks_are_busy_with_what_no_cell_of_the_notebook_waits_for(
    page: Any, doing: Activity
) -> None:
    assert page.state(IDLE, doing)["is_busy"]


def test_ranks_are_busy_as_long_as_an_answer_is_missing_of_a_request_or_of_their_state(
    page: Any,
) -> None:
    assert not page.state(IDLE, IDLE)["is_busy"]
    page.waits.append("engine 1")
    assert page.state(IDLE, IDLE)["is_busy"]
    page.waits.clear()
    # As while a rank computes in C, also after an interrupt, when no client waits for it any more.
    assert page.state(IDLE)["is_busy"]


def test_the_page_can_interrupt_what_ranks_do(page: Any) -> None:
    notebook._asked({"content": {"data": {"interrupt": True}}})
    assert page.ranks.interrupts == ["ranks"]


def test_a_rank_that_does_not_react_to_an_interrupt_is_named_with_what_ends_it(page: Any) -> None:
    assert page.state(IDLE)["interrupt"] == ""
    notebook._asked({"content": {"data": {"interrupt": True}}})
    said = page.state(IDLE)["interrupt"]
    assert said.startswith("rank 1 does not react to the interrupt")
    assert said.endswith('ranks.client().send_signal("SIGKILL", targets=[1])')
    # It has reacted, and then computes in C again.
    assert page.state(IDLE, IDLE)["interrupt"] == ""
    assert page.state(IDLE)["interrupt"] == ""
    # A cell has run since the interrupt.
    notebook._asked({"content": {"data": {"interrupt": True}}})
    page.ranks.roster.reserved = "running an ensemble"
    assert page.state(RUNNING, RUNNING)["interrupt"] == ""
    page.ranks.roster.reserved = ""
    assert page.state(IDLE)["interrupt"] == ""


def test_an_interrupt_is_not_one_of_the_ranks_that_start_after_it(page: Any) -> None:
    notebook._asked({"content": {"data": {"interrupt": True}}})
    toolbar = notebook._of_notebook()
    assert toolbar is not None
    assert toolbar.has_interrupted
    toolbar.stopped()
    assert page.state(IDLE)["interrupt"] == ""


def test_the_page_says_what_the_next_interrupt_of_a_cell_does(page: Any) -> None:
    page.ranks.roster.reserved = True
    assert page.state(RUNNING, RUNNING)["interrupt"] == ""
    page.ranks.cells.connection.run = SimpleNamespace(next_press="rank 1 will be killed")
    assert page.state(IDLE, RUNNING)["interrupt"] == "rank 1 will be killed"
