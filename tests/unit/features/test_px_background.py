"""The wait of a cell for the one of ``%%px --noblock`` before it."""

import io
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from queue import SimpleQueue
from types import SimpleNamespace

import ipyparallel
import pytest

from allranks.errors import CellFailed, RankDied, Report
from allranks.features.ipyparallel import px_magics, px_results
from allranks.features.ipyparallel.notebook import ClientPatch
from allranks.features.ipyparallel.px_magics import PxMagics
from allranks.features.ipyparallel.px_results import BackgroundCell, in_background
from allranks.records.wire import Output
from tests.unit.features.unconnected_client import Unconnected


@pytest.fixture
def _cancels():
    """Interrupts raise nothing, as in a cell with magics: ipykernel cancels what it awaits."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


class Asks(io.StringIO):
    """Where the user reads that an interrupt ends the wait, and presses at once."""

    def write(self, text):
        signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.fixture
def running():
    """Ends when its ranks are interrupted."""
    result: BackgroundCell = BackgroundCell.__new__(BackgroundCell)
    Future.__init__(result)
    result.ranks = (0, 1)
    result._cluster = SimpleNamespace(interrupt=lambda: result.set_result([]))
    return result


@pytest.mark.usefixtures("_cancels")
def test_an_interrupt_that_comes_with_the_line_that_names_it_ends_the_cell(running, monkeypatch):
    monkeypatch.setattr(px_magics, "_QUIET_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", Asks())
    magics: PxMagics = PxMagics.__new__(PxMagics)
    with pytest.raises(KeyboardInterrupt):
        magics._wait_for(running)
    assert running.ready()


def test_an_interrupt_of_the_wait_for_its_end_is_shown_as_a_line(running, monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(px_results, "wait", press)
    with pytest.raises(KeyboardInterrupt) as pressed:
        running.get()
    line = "KeyboardInterrupt: the cell on ranks 0–1 was interrupted"
    assert pressed.value._render_traceback_() == [line]


def test_lines_about_its_cell_are_shown_with_the_output_of_its_ranks(capsys):
    def wait(view):
        view.notice("rank 2 was replaced")
        return SimpleNamespace(values=lambda: [3, 3])

    cells = SimpleNamespace(begin=lambda *_, view, **__: view, wait=wait)
    result = BackgroundCell(SimpleNamespace(cells=cells, log_dir=""), "3", 1, (0, 1), fold=True)
    assert result.get() == [3, 3]
    result.display_outputs()
    assert capsys.readouterr().out == "ranks 0–1 · rank 2 was replaced\n"
    assert result.stdout == ["", ""]


def test_signals_to_one_rank_after_the_other_kill_none():
    calls = []
    run = SimpleNamespace(presses=0, interrupt=lambda: calls.append("interrupted again"))

    def press():
        run.presses += 1
        calls.append("pressed")

    result: BackgroundCell = BackgroundCell.__new__(BackgroundCell)
    result._sent = run
    cells = SimpleNamespace(connection=SimpleNamespace(closed=False))
    result._cluster = SimpleNamespace(interrupt=press, cells=cells)
    result.interrupt()
    result.interrupt()
    assert calls == ["pressed", "interrupted again"]


def test_what_it_waits_for_before_its_begin_is_shown_meanwhile(monkeypatch):
    begins, shown = threading.Event(), []

    class Screen(io.StringIO):
        def write(self, text):
            shown.append(text.strip())
            begins.set()  # the request is answered once the user knows of it
            return super().write(text)

    def begin(*_, view, **__):
        view.notice("rank 1 must first answer a request")
        begins.wait()

    monkeypatch.setattr(sys, "stderr", Screen())
    values = SimpleNamespace(values=lambda: [3, 3])
    cells = SimpleNamespace(begin=begin, wait=lambda run: values)
    result = BackgroundCell(SimpleNamespace(cells=cells, log_dir=""), "3", 1, (0, 1), fold=True)
    assert shown[0] == "rank 1 must first answer a request"
    assert (result.get(), result.stderr) == ([3, 3], ["", ""])


def test_it_is_a_future_that_ends_with_its_cell():
    values = SimpleNamespace(values=lambda: [3, 3])
    ends = threading.Event()

    def run(_):
        ends.wait()
        return values

    cells = SimpleNamespace(begin=lambda *_, **__: None, wait=run)
    cluster = SimpleNamespace(cells=cells)
    result = BackgroundCell(cluster, "3", 1, (0, 1), fold=True)
    assert in_background(cluster) == [result]
    assert in_background(SimpleNamespace()) == []
    assert not result.cancel()
    called = SimpleQueue()
    result.add_done_callback(lambda ended: called.put(ended.result()))
    ends.set()
    assert (result.result(), result.exception()) == ([3, 3], None)
    assert called.get() == [3, 3]
    assert in_background(cluster) == []


class Cells:
    """A cell of ranks 0 and 1, of which rank 1 has left it; it ends with ``ends``."""

    def __init__(self):
        self.ends, self.view = threading.Event(), None

    def begin(self, *_, view, **__):
        self.view = view
        return SimpleNamespace(pending=(0,))

    def wait(self, run):
        self.ends.wait()
        return SimpleNamespace(values=lambda: [3, 4])

    def print(self, text):
        self.view.output(Output(0, 0, (["out", text],), 0, 0, 0))


@pytest.fixture
def cells():
    made = Cells()
    made.result = BackgroundCell(SimpleNamespace(cells=made, log_dir=""), "3", 1, (0, 1), fold=True)
    yield made
    made.ends.set()


def test_it_has_what_notebooks_use_of_a_result_of_ipyparallel(cells):
    result = cells.result
    assert (len(result), result.progress) == (2, 1)
    for read in (lambda: result[0], lambda: result.wall_time):
        with pytest.raises(TimeoutError):
            read()
    result.wait_interactive(1.0, timeout=0)
    cells.ends.set()
    result.wait_interactive(interval=1.0)
    assert list(result) == [3, 4]
    assert (result[1], result[:], result.get_dict()) == (4, [3, 4], {0: 3, 1: 4})
    assert result.progress == 2
    assert result.elapsed == result.wall_time > 0
    with pytest.raises(AttributeError, match=r"'abort'.*type: ranks\.interrupt\(\)"):
        result.abort()


def test_a_client_waits_for_its_end_and_does_not_read_its_values(cells, monkeypatch):
    monkeypatch.setattr(BackgroundCell, "__iter__", None)
    with ExitStack() as undo:
        ClientPatch(undo)
        assert not Unconnected().wait(cells.result, timeout=0)
        cells.ends.set()
        assert Unconnected().wait(cells.result)


def test_a_short_wait_within_stream_output_shows_what_there_is(cells, capsys):
    cells.print("before\n")
    with cells.result.stream_output():
        assert not cells.result.wait(0)
        assert not cells.result.wait(1e-3)
    assert capsys.readouterr().out == "rank 0 │ before\n"


def test_a_wait_within_stream_output_shows_the_output_so_far_and_what_comes(cells, monkeypatch):
    shown = []

    def show(batch):
        shown.append(batch.entries[0][1])
        if shown == ["before"]:
            cells.print("later")
        else:
            cells.ends.set()

    view = SimpleNamespace(output=show, refresh=lambda: None, finish=lambda: None)
    monkeypatch.setattr(px_results, "text_view", lambda *_: view)
    cells.print("before")
    with cells.result.stream_output():
        assert cells.result.get() == [3, 4]
        assert cells.result.get() == [3, 4]
    assert shown == ["before", "later"]


@pytest.mark.parametrize("kind", [CellFailed, RankDied])
def test_its_failure_is_an_error_of_ipyparallel_too(kind):
    def fail(run):
        trace = ("Traceback", "ZeroDivisionError: by zero")
        place = {"line": 1, "source_line": "1/0", "waiting": False}
        report = Report(1, "here", "cpu", "ZeroDivisionError", "by zero", trace, **place)
        raise kind("rank 1 failed", "shown", [report])

    cells = SimpleNamespace(begin=lambda *_, **__: None, wait=fail)
    result = BackgroundCell(SimpleNamespace(cells=cells, log_dir=""), "3", 1, (0, 1), fold=True)
    with pytest.raises(ipyparallel.CompositeError) as raised:
        result.get()
    error = raised.value
    assert isinstance(error, kind)
    assert (type(error).__name__, str(error)) == (kind.__name__, "rank 1 failed")
    assert error._render_traceback_() == ["shown"]
    assert error.render_traceback()[:2] == ["[1:execute]:", "Traceback"]
    with pytest.raises(ipyparallel.RemoteError, match="ZeroDivisionError: by zero"):
        error.raise_exception()
