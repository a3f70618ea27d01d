"""Output that comes after the end of its cell, and cells whose ranks, or some, were killed."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from allranks.cluster import cell_run
from allranks.cluster import cells as cells_module
from allranks.cluster.calls import Turns
from allranks.cluster.cell_run import CellRun, HiddenView, show_late
from allranks.cluster.cells import Cells
from allranks.cluster.failures import NEXT_CELL, ProcessExit, plain
from allranks.cluster.features import NotebookFeature, NotebookHooks
from allranks.cluster.last_words import LastWords
from allranks.cluster.state import ClusterState, TookPlaces
from allranks.errors import (
    AllranksError,
    CellInterrupted,
    CellTimeout,
    ClusterLost,
    Report,
    UsageError,
)
from allranks.records.wire import Hello, Interrupt, Output, Reply
from allranks.widgets.text import TerminalView
from tests.kernel import wait_until


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
    assert [batch.entries[1:-1] for batch in shown] == [(["out", "b"],)]


def test_late_output_is_apart_from_that_of_the_next_cell(capsys):
    view = TerminalView((0,))
    show_late([Output(0, 1, (["out", "no line end"],), 0, 0, 9)], view)
    view.output(Output(0, 2, (["out", "of the cell\n"],), 0, 0, 20))
    view.finish()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 · written after its cell had ended:",
        "       │ no line end",
        "       · (up to here)",
        "       │ of the cell",
    ]


@pytest.mark.parametrize("phase", ["running", "lost"])
def test_output_that_no_cell_has_shown_is_shown_when_the_ranks_are_stopped(phase, capsys):
    cells, late = Cells(2, {}), [Output(1, 1, (["out", "late\n"],), 0, 0, 5)]
    cells._connection = SimpleNamespace(late=[], log_dir="", close=lambda: came.extend(late))
    came = cells._connection.late
    cells.roster.set_phase(phase)
    cells.stop()
    assert ("       │ late\n" in capsys.readouterr().out) == (phase == "running")
    assert not came


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
        begin_cell=lambda cell, ranks, run: None,
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


def await_no_double_click(monkeypatch):
    monkeypatch.setattr(cell_run, "DOUBLE_CLICK_SECONDS", 0.0)


@pytest.mark.parametrize("kills", [False, True])
def test_the_first_interrupt_interrupts_the_ranks_in_the_cell_or_ends_them(kills, monkeypatch):
    sent, ended, closed = [], [], []
    roster = ClusterState(3)
    connection = SimpleNamespace(
        size=3, roster=roster, words=LastWords(roster), hooks=NotebookHooks(()), closed=False,
        ask_soon=None,
        send=lambda ranks, message: sent.append((ranks, message)),
        end_rank=lambda rank, why: ended.append(rank),
        close=lambda how, why: closed.append(how), why_not_replaced=lambda: "MPI ends the others",
        can_replace=lambda count: True, begin_cell=lambda cell, ranks, run: None,
        step=lambda seconds: [],
    )  # fmt: skip
    run = CellRun(1, range(3), connection, HiddenView(lambda batch: None), None, kills)
    run.take(reply(1, "ok", ""), [])
    run.press()
    assert (sent, ended) == (([], [0, 2]) if kills else ([((0, 2), Interrupt(1))], []))
    assert not closed
    await_no_double_click(monkeypatch)
    run.press()
    assert closed == ["lost"]


@pytest.mark.parametrize("why", ["it is interrupted", "it has run for a moment"])
def test_features_know_once_that_a_cell_lasts(monkeypatch, why):
    class Feature(NotebookFeature):
        def cell_lasts(self):
            known.append(self.cell.number)

    known = list[int]()
    roster = ClusterState(3)
    connection = SimpleNamespace(
        size=3, roster=roster, hooks=NotebookHooks([Feature]), closed=False, ask_soon=None,
        step=lambda seconds: [], send=lambda ranks, message: None,
        begin_cell=lambda cell, ranks, run: None,
    )  # fmt: skip
    monkeypatch.setattr(cell_run, "_LASTS_SECONDS", math.inf)
    run = CellRun(1, range(3), connection, HiddenView(lambda batch: None), None)
    run.step(0)
    assert known == []
    if why == "it is interrupted":
        run.press()
    else:
        monkeypatch.setattr(cell_run, "_LASTS_SECONDS", 0)
    run.step(0)
    run.step(0)
    assert known == [1]


class ReplacesRanks(NotebookFeature):
    replaces_ranks = "%distributed heal"


class InterruptedCell:
    """A cell on three ranks of four; the connection notes what it is asked for."""

    def __init__(self, heals=True, timeout=None, replacing="on", spares=4):
        self.spares, self.in_doubt = spares, False
        self.roster, self.ended, self.lines, self.why = ClusterState(4), [], [], None
        self.roster.connect(heals)
        for rank in range(4):
            self.roster.apply(Hello(rank, 4, 0, 1, "here", 1 + rank, "cpu", "e", "m", "/none/log"))
        self.roster.set_phase("running")
        self.roster.replacing = replacing
        self.hooks, self.words = NotebookHooks([ReplacesRanks]), LastWords(self.roster)
        self.size = 4
        self.ask_soon = self.send = self.wait_until = lambda *anything: None
        view = HiddenView(lambda batch: None, self.lines.append)
        self.run = CellRun(1, (0, 1, 2), self, view, timeout)

    @property
    def closed(self):
        return self.over

    @property
    def over(self):
        return self.roster.closed

    def begin_cell(self, cell, ranks, run):
        self.roster.begin_cell(cell, ranks, threading.get_ident())

    def take(self, record):
        """The reply of a rank has come, and is shown."""
        self.roster.cell.apply(record)
        self.run.take(record, [])

    def step(self, seconds):
        return []

    def close(self, phase, why):
        self.roster.set_phase(phase, why)

    def why_not_replaced(self):
        return "" if self.roster.can_replace else "MPI ends the others"

    def can_replace(self, count):
        return count <= self.spares

    def is_in_doubt(self, ranks):
        return self.in_doubt

    def end_rank(self, rank, why):
        self.ended.append(rank)

    def die(self, *ranks):
        """The ranks that were killed end."""
        for rank in ranks:
            for deaths in self.roster.apply(ProcessExit(rank, -9, pid=1 + rank)):
                self.run.died(deaths.ends)

    def error(self):
        with pytest.raises(AllranksError) as raised:
            self._conclude()
        return raised.value

    def _conclude(self):
        self.run.end()
        self.run.check()


def test_the_interrupts_of_a_double_click_count_as_one(monkeypatch):
    cell = InterruptedCell()
    for _ in range(3):
        cell.run.press()
    assert (cell.run.presses, cell.ended, cell.closed) == (1, [], False)
    with monkeypatch.context() as later:
        await_no_double_click(later)
        cell.run.press()
    cell.run.press()
    assert (cell.ended, cell.closed) == ([0, 1, 2], False)


def test_the_second_interrupt_kills_only_the_ranks_that_have_not_left_the_cell(monkeypatch):
    cell = InterruptedCell()
    assert cell.run.next_press == ""
    cell.run.press()
    cell.take(reply(0, "error", "ValueError"))
    await_no_double_click(monkeypatch)
    what_comes = (
        "ranks 1–2 will be killed by the next interrupt and replaced: of their variables, only "
        "those given to keep come back; ranks 0, 3 will keep all variables"
    )
    assert cell.run.next_press == what_comes
    cell.run.press()
    assert cell.run.next_press == ""
    assert (cell.ended, cell.closed) == ([1, 2], False)
    cell.die(1, 2)
    assert cell.run.pending == ()
    assert not cell.lines  # the error has it
    cell.run.replaced((1, 2), "ranks 1–2 were replaced; ranks 0, 3 kept theirs")
    error = cell.error()
    why = "interrupted twice: ranks 1–2 did not stop, so ranks 1–2 were killed"
    assert str(error) == (
        f"rank 0 of 4 at line 3: ValueError: why; {why}; "
        "ranks 1–2 were replaced; ranks 0, 3 kept theirs"
    )
    assert (type(error), [report.rank for report in error.reports]) == (CellInterrupted, [0, 1, 2])
    assert plain(error.text).startswith("rank 0 (here, cpu) raised ValueError at line 3")


def test_a_rank_that_has_failed_is_named_while_others_run_on(monkeypatch):
    monkeypatch.setattr(cell_run, "_FAILED_SECONDS", 0.0)
    cell = InterruptedCell()
    cell.run.step(0)
    assert not cell.lines
    cell.take(reply(0, "error", "ValueError"))
    cell.run.step(0)
    cell.run.step(0)
    named = (
        "rank 0 of 4 at line 3: ValueError: why; ranks 1–2 still run. An interrupt ends the cell"
    )
    assert cell.lines == [named]


@pytest.mark.parametrize("how", ["all have left", "interrupted"])
def test_a_rank_that_has_failed_is_not_named_at_the_end_of_its_cell(how, monkeypatch):
    monkeypatch.setattr(cell_run, "_FAILED_SECONDS", 0.0)
    cell = InterruptedCell()
    cell.take(reply(0, "error", "ValueError"))
    if how == "interrupted":
        cell.run.press()
    else:
        for rank in (1, 2):
            cell.take(reply(rank, "ok", ""))
    cell.run.step(0)
    assert not cell.lines


def test_a_time_limit_kills_only_the_ranks_that_have_not_left_the_cell(monkeypatch):
    monkeypatch.setattr(cell_run, "GRACE_SECONDS", 0.0)
    cell = InterruptedCell(timeout=0.0, replacing="ask")
    for rank in (0, 1):
        cell.take(reply(rank, "ok", ""))
    cell.run.step(0)
    assert cell.ended == [2]
    cell.die(2)
    error = cell.error()
    assert type(error) is CellTimeout
    assert str(error).endswith(
        "so rank 2 was killed; ranks 0–1, 3 keep their variables. Type: %distributed heal"
    )


@pytest.mark.parametrize("how", ["third interrupt", "time"])
def test_all_ranks_are_killed_if_one_that_was_killed_does_not_end(how, monkeypatch):
    if how == "time":
        monkeypatch.setattr(cell_run, "_ENDED_SECONDS", 0.0)
    cell = InterruptedCell()
    cell.run.press()
    cell.take(reply(0, "ok", ""))
    await_no_double_click(monkeypatch)
    cell.run.press()
    assert not cell.closed
    cell.run.press() if how == "third interrupt" else cell.run.step(0)
    assert cell.roster.phase == "lost"
    because = ", because ranks 1–2 had been killed and did not end."
    assert f"so all 4 ranks were killed and their variables are lost{because}" in str(cell.error())


def test_a_killed_rank_of_a_host_that_is_cut_off_does_not_cost_the_others(monkeypatch):
    monkeypatch.setattr(cell_run, "_ENDED_SECONDS", 0.0)
    cell = InterruptedCell()
    cell.run.press()
    cell.take(reply(0, "ok", ""))
    cell.in_doubt = True
    await_no_double_click(monkeypatch)
    cell.run.press()
    # The host hears of it when it is back: it has its time from then on.
    monkeypatch.setattr(cell_run, "_ENDED_SECONDS", 600.0)
    cell.run.step(0)
    cell.in_doubt = False
    cell.run.step(0)
    assert not cell.closed
    cell.die(1, 2)
    assert "so ranks 1–2 were killed" in str(cell.error())


def test_ranks_that_are_dead_already_need_spare_processes_too(monkeypatch):
    cell = InterruptedCell(spares=2)
    cell.die(0)
    cell.run.press()
    await_no_double_click(monkeypatch)
    cell.run.press()
    assert (cell.ended, cell.roster.phase) == ([], "lost")


def test_a_call_at_the_end_of_a_cell_does_not_wait_for_one_that_waits_for_this_end():
    done, asked = list[str](), list[int]()

    class Ranks(ClusterState):
        @property
        def caller(self):
            asked.append(threading.get_ident())
            return super().caller

    def call():
        with turns.taken():
            done.append("other")

    ranks = Ranks(2)
    ranks.concludes = threading.get_ident()
    turns = Turns(ranks, lambda: None)
    other = threading.Thread(target=call, daemon=True)
    other.start()
    wait_until(lambda: asked.count(other.ident) == 3)  # it has the turn, and waits
    with turns.taken():  # as the cell that keeps variables
        done.append("own")
    ranks.concludes = 0
    turns.wake()
    other.join(60)
    assert done == ["own", "other"]


def test_ranks_are_idle_at_the_end_of_a_cell_only_for_the_thread_that_ends_it():
    cells = Cells(2, {})
    cells.roster.set_phase("running")
    cells.roster.dead[1] = ProcessExit(1, -9)
    cells._connection = SimpleNamespace(roster=cells.roster, end_cell=lambda: None)
    cells.hooks = NotebookHooks([ReplacesInAnotherThread])
    view = HiddenView(lambda batch: None)
    run = SimpleNamespace(view=view, failed_first=None, end=lambda: None, check=lambda: None)
    with pytest.raises(UsageError, match="at the end of a cell of another thread"):
        cells._conclude(run)
    cells.check_idle()


def replace_dead(name, connection, tell):
    connection.roster.apply(TookPlaces([*connection.roster.dead]))
    return "it was replaced", False


def test_lost_ranks_are_started_again_by_a_command_of_notebooks_and_a_method_of_programs():
    cells = Cells(2, {})
    cells.connect(lambda roster, **_: SimpleNamespace(roster=roster, step=lambda seconds: []))
    cells.roster.set_phase("lost", f"rank 1 died. {NEXT_CELL} The logs are in /logs")
    with pytest.raises(ClusterLost) as lost:
        cells.catch_up()
    assert str(lost.value) == (
        "rank 1 died. To start them again, type: %distributed start   or, of a Cluster: .start()   "
        "The logs are in /logs"
    )


@pytest.fixture
def prepare(monkeypatch):
    """Prepares a cell on rank 0 of two, while something happens; returns the cells, and what is
    shown. A rank has written something since the last cell.
    """

    def prepare(happens, begins=True):
        cells, events = Cells(2, {}), [happens]
        cells.roster.connect(can_replace=True)
        for rank in range(2):
            cells.roster.apply(Hello(rank, 2, 0, 1, "here", 1 + rank, "cpu", "e", "m", "/none/log"))
        cells.roster.set_phase("running")
        cells.roster.epoch.dirty = True  # so there is something to wait for
        cells.hooks = NotebookHooks(())
        cells.hooks.commands["replace_ranks"] = replace_dead
        cells._connection = SimpleNamespace(
            roster=cells.roster, words=LastWords(cells.roster), step=lambda seconds: [],
            late=[Output(1, 0, (["out", "late"],), 0, 0, 0)], await_clients=lambda *_: None,
        )  # fmt: skip
        shown = []
        view = SimpleNamespace(
            output=lambda batch: shown.append(batch.entries[1][1]),
            notice=shown.append, refresh=lambda: shown.append("refreshed"),
        )  # fmt: skip

        def renew(connection, tell):
            if events:
                events.pop()(cells.roster, tell)

        monkeypatch.setattr(cells_module, "renew", renew)
        with nullcontext() if begins else pytest.raises(UsageError):
            cells._prepare((0,), view)
        return cells, shown

    return prepare


def test_a_death_before_a_cell_is_shown_in_it_also_where_it_is_on_other_ranks(prepare):
    why = "ended by allranks, because it was silent between cells"
    end = ProcessExit(1, -9, reason=why, pid=2)
    cells, _ = prepare(lambda roster, tell: roster.apply(end))
    assert cells.news == [
        f"rank 1 (here, pid 2) was killed by signal 9 (SIGKILL: {why})",
        "it was replaced",
    ]
    assert not cells.roster.dead


CALLS = {
    "a push": lambda cells: cells.ask("push", {}, after_clients=True),
    "a replacement": lambda cells: cells.replace_dead(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_comes_before_a_call_without_a_view_is_shown_at_once(prepare, capsys, call):
    cells, _ = prepare(lambda roster, tell: None)
    cells.roster.replacing = "ask"
    cells.roster.apply(ProcessExit(1, -9))
    waits = []

    def await_clients(ranks, tell):
        waits.append(list(ranks))
        tell("rank 0 must first answer a request")

    cells.connection.await_clients = await_clients
    cells.connection.ask = lambda *asked, **options: waits.append("asked")
    call(cells)
    assert waits[0] == [0, *([1] if "asked" in waits else [])]
    assert capsys.readouterr().err == "rank 0 must first answer a request\n"


def test_late_output_is_shown_with_what_a_cell_waits_for_or_once_it_begins(prepare):
    _, shown = prepare(lambda roster, tell: tell("rank 1 is still busy"))
    assert shown == ["late", "rank 1 is still busy", "refreshed"]
    assert prepare(lambda roster, tell: None)[1] == ["late"]


def test_the_next_cell_shows_late_output_where_one_does_not_begin(prepare):
    def refuse(roster, tell):
        raise UsageError("a rank is still in a cell that was interrupted")

    cells, shown = prepare(refuse, begins=False)
    assert (len(cells.connection.late), shown) == (1, [])


class ReplacesInAnotherThread(NotebookFeature):
    def cell_left(self, run, cells):
        cells.check_idle()
        with ThreadPoolExecutor(1) as others:
            others.submit(cells.replace_dead).result()


@pytest.mark.parametrize(
    ("options", "needs", "because"),
    [
        ({"heals": False}, -1, ", because dead ranks are not replaced here: MPI ends the others"),
        ({"replacing": "off"}, -1, ", because dead ranks are not replaced"),
        ({}, 1, ", because ranks 0, 3 cannot run without rank 1"),
        ({"spares": 1}, -1, ", because the hosts have too few spare processes in which"),
    ],
)
def test_all_ranks_are_killed_where_no_other_would_survive(options, needs, because, monkeypatch):
    cell = InterruptedCell(**options)
    cell.roster.needs = {3: needs}
    cell.run.press()
    cell.take(replace(reply(0, "ok", ""), needs=needs))
    await_no_double_click(monkeypatch)
    cell.run.press()
    assert (cell.ended, cell.roster.phase) == ([], "lost")
    assert f"their variables are lost{because}" in str(cell.error())


@pytest.mark.parametrize(
    ("options", "left", "what"),
    [
        ({}, (0, 1), "rank 2 will be killed by the next interrupt and replaced: of its variables, "
         "only those given to keep come back; ranks 0–1, 3 will keep all variables"),
        ({"replacing": "ask"}, (0,), "ranks 1–2 will be killed by the next interrupt and can be "
         "replaced (%distributed heal): of their variables, only those given to keep come back; "
         "ranks 0, 3 will keep all variables"),
        ({"heals": False}, (0,), "all ranks will be killed by the next interrupt, because dead "
         "ranks are not replaced here: MPI ends the others; no rank will keep its variables"),
    ],
)  # fmt: skip
def test_the_first_interrupt_says_what_the_second_one_will_do(options, left, what, monkeypatch):
    monkeypatch.setattr(cell_run.InterruptTimeout, "due", lambda *_: True)
    cell = InterruptedCell(**options)
    for rank in left:
        cell.take(reply(rank, "ok", ""))
    cell.run.press()
    cell.run.step(0)
    (line,) = cell.lines
    they = "it" if len(left) == 2 else "they"
    assert line.endswith(f"; {they} may still end if you wait; {what}")
