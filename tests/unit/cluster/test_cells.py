"""Output that comes after the end of its cell, and the error of a cell whose ranks were killed."""

from types import SimpleNamespace

import pytest

from allranks.cluster.cell_run import CellRun, HiddenView, show_late
from allranks.cluster.failures import plain
from allranks.cluster.features import NotebookHooks
from allranks.cluster.last_words import LastWords
from allranks.cluster.state import ClusterState
from allranks.errors import AllranksError, CellInterrupted, CellTimeout, ClusterLost, Report
from allranks.records.wire import Interrupt, Output, Reply


def test_late_output_that_cannot_be_shown_ends_one_cell_only():
    late, shown = [Output(1, 0, (["out", "a"],), 0, 0, 0)], []

    def fail(batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        show_late(late, SimpleNamespace(output=fail))
    show_late(late, SimpleNamespace(output=shown.append))
    assert not shown
    late.append(Output(1, 0, (["out", "b"],), 0, 0, 0))
    show_late(late, SimpleNamespace(output=shown.append))
    assert [batch.entries[1:] for batch in shown] == [(["out", "b"],)]


def reply(rank, status, name):
    place = {"line": 3, "source_line": "check(x)"}
    found = Report(rank, "here", "cpu", name, "why", (f"{name}: why",), **place, waiting=False)
    return Reply(rank, 1, status, 0.1, False, False, "", found)


def killed(why, *replies, timeout=None, ends=()):
    """The error of a cell on three ranks that were killed."""
    roster = ClusterState(3)
    roster.ends += ends
    roster.set_phase("lost", why)
    connection = SimpleNamespace(
        size=3, roster=roster, words=LastWords(roster), hooks=NotebookHooks(()),
        closed=not ends, ask_soon=None, step=lambda seconds: [], lose=lambda shown: why,
    )  # fmt: skip
    view = HiddenView(lambda batch: None)
    run = CellRun(1, range(3), connection, view, timeout)
    run.timed_out = timeout is not None
    for one in replies:
        run.take(one, [])
    with pytest.raises(AllranksError) as raised:
        run.end()
    return raised.value


@pytest.mark.parametrize(("timeout", "kind"), [(None, CellInterrupted), (1.0, CellTimeout)])
def test_the_exception_of_a_rank_is_reported_although_the_ranks_were_killed(timeout, kind):
    why = "interrupted twice: rank 1 did not stop"
    own, pressed = reply(0, "error", "ValueError"), reply(2, "interrupted", "KeyboardInterrupt")
    error = killed(why, own, pressed, timeout=timeout)
    assert type(error) is kind
    assert str(error) == f"rank 0 of 3 at line 3: ValueError: why; {why}"
    assert plain(error.text).startswith("rank 0 (here, cpu) raised ValueError at line 3")
    assert error.text.endswith(f"\n\n{why}")
    assert "KeyboardInterrupt" not in error.text
    assert error.reports == (own.report,)
    assert str(killed(why, pressed, timeout=timeout)) == why


def test_the_exception_of_a_rank_is_reported_although_another_one_died(monkeypatch):
    monkeypatch.setattr(CellRun, "_show_unsent", lambda run, rank: None)
    error = killed("rank 1 died.", reply(0, "error", "ValueError"), ends=[object()])
    assert type(error) is ClusterLost
    assert str(error).startswith("rank 1 died.\n\nrank 0 (here, cpu) raised ValueError at line 3")


@pytest.mark.parametrize("kills", [False, True])
def test_the_first_interrupt_interrupts_the_ranks_in_the_cell_or_ends_them(kills):
    sent, ended, closed = [], [], []
    roster = ClusterState(3)
    connection = SimpleNamespace(
        size=3, roster=roster, words=LastWords(roster), hooks=NotebookHooks(()), closed=False,
        ask_soon=None,
        send=lambda ranks, message: sent.append((ranks, message)),
        end_rank=lambda rank, why: ended.append(rank),
        close=lambda how, why: closed.append(how),
    )  # fmt: skip
    run = CellRun(1, range(3), connection, HiddenView(lambda batch: None), None, kills)
    run.take(reply(1, "ok", ""), [])
    run.press()
    assert (sent, ended) == (([], [0, 2]) if kills else ([((0, 2), Interrupt(1))], []))
    assert not closed
    run.press()
    assert closed == ["lost"]
