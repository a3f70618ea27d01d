"""The front end's debugger on real ranks, as JupyterLab drives it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debugger import Debugger
from tests.kernel import Kernel, spec_of, time_that_jumps

ALIVE = "%%distributed\nprint(int(allreduce(1, op=Sum)))"
ALL = {"rank 0": 3, "rank 1": 3, "rank 2": 3}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with three ranks."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run("%load_ext allranks\n%distributed start -n 3").ok()
        yield kernel


@pytest.fixture(scope="module")
def attached(kernel: Kernel) -> Debugger:
    return Debugger(kernel)


@pytest.fixture
def debugger(kernel: Kernel, attached: Debugger) -> Iterator[Debugger]:
    """The debugger of that kernel; afterwards all ranks work together, and nothing is paused."""
    yield attached
    assert kernel.run(ALIVE).text == "ranks 0–2 │ 3\n"
    assert attached.ask("debugInfo")["stoppedThreads"] == []


def test_all_ranks_step_together_through_a_collective(kernel: Kernel, debugger: Debugger) -> None:
    source = "%%distributed\nx = 10 * rank\ny = x + 1\nz = allreduce(y, op=Sum)\nprint(z)"
    cell, pause = debugger.start(source, 3)
    assert pause.place == ("rank 0: <module>", 3)
    assert debugger.lines(pause) == ALL
    assert pause.variables()["x"] == "0"
    for line in (4, 5):
        pause = pause.step()
        assert debugger.lines(pause) == dict.fromkeys(ALL, line)
    assert pause.evaluate("z, rank") == "(33, 0)"
    pause.go("continue")
    assert cell.wait().ok().text == "ranks 0–2 │ 33\n"


def test_breakpoint_pauses_every_rank_in_the_debugger(kernel: Kernel, debugger: Debugger) -> None:
    kernel.debug_events.clear()
    cell = kernel.start("%%distributed\nx = rank\nbreakpoint()\ny = allreduce(x, op=Sum)\nprint(y)")
    pause = debugger.pause(cell)
    assert debugger.lines(pause) == dict.fromkeys(ALL, 4)
    pause.go("continue")
    assert cell.wait().ok().text == "ranks 0–2 │ 3\n"


def test_another_rank_is_shown_and_steps_alone(kernel: Kernel, debugger: Debugger) -> None:
    source = "%%distributed\nx = rank\ny = x\nz = 2\nprint(y)"
    cell, pause = debugger.start(source, 3)
    said = pause.evaluate("%distributed debug -r 2 --only")
    assert said == "rank 2 steps alone"
    pause = debugger.pause()
    assert (pause.place, pause.evaluate("x")) == (("rank 2: <module>", 3), "2")
    pause = pause.step()
    assert debugger.lines(pause) == ALL | {"rank 2": 4}
    refused = kernel.debug("evaluate", {"expression": "%distributed debug -r 7"}, 60)
    assert "expected ranks between 0 and 2, found '7'" in refused["message"]
    assert pause.evaluate("%distributed debug -r 0").endswith("ranks 0–2 step together")
    debugger.pause().go("continue")
    cell.wait().ok()


def test_a_rank_that_steps_alone_into_a_collective_steps_with_the_others_again(
    kernel: Kernel, debugger: Debugger
) -> None:
    source = "%%distributed\nx = rank\ny = allreduce(x, op=Sum)\nz = y\nprint(z)"
    cell, pause = debugger.start(source, 3)
    pause.evaluate("%distributed debug -r 2 --only")
    pause = debugger.pause().step()
    assert pause.place == ("rank 0: <module>", 3)
    found = debugger.ask("allranksPauses")
    how = "rank 2 waits while ranks 0–1 are paused"
    assert found["notice"] == f"{how}: all paused ranks step together again"
    assert not found["only"]
    pause = pause.step()
    while pause.place != ("rank 2: <module>", 4):  # a busy host may show another rank first
        pause = debugger.pause()
    while len(debugger.ask("allranksPauses")["pauses"]) < 3:
        pass
    assert debugger.lines(pause) == dict.fromkeys(ALL, 4)
    assert debugger.ask("allranksPauses")["notice"] == ""
    # The choice holds for later cells too.
    pause.evaluate("%distributed debug -r 0")
    debugger.pause().go("continue")
    assert cell.wait().ok().text == "ranks 0–2 │ 3\n"


def test_a_condition_pauses_one_rank_and_stops_the_timeout(
    kernel: Kernel, debugger: Debugger, tmp_path: Path
) -> None:
    source = "%%distributed --timeout 300\nx = rank\ny = x  # break if rank == 1\nbarrier()"
    with time_that_jumps(kernel, tmp_path) as jump:
        cell, pause = debugger.start(source, 3)
        assert debugger.lines(pause) == {"rank 1": 3}
        jump()
        pause = pause.step()
        assert pause.place == ("rank 1: <module>", 4)
        # There is nothing to step to: the cell ends, and the next one does not pause.
        pause.go("stepIn")
        cell.wait().ok()


def test_an_interrupt_ends_the_pause(kernel: Kernel, debugger: Debugger) -> None:
    cell, _ = debugger.start("%%distributed\nx = 1\nwhile True:\n    pass", 2)
    kernel.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted", cell.text
    assert "KeyboardInterrupt" in cell.text
    assert "debugpy" not in cell.text


def test_an_interrupt_ends_what_the_console_evaluates(kernel: Kernel, debugger: Debugger) -> None:
    cell, pause = debugger.start("%%distributed\nx = 1\nwhile True:\n    pass", 2)
    frame = pause.frames[0]["id"]
    content = {"expression": "[0 for _ in iter(int, 1)]", "frameId": frame, "context": "repl"}
    kernel._client.control_channel.send(
        kernel._client.session.msg(
            "debug_request",
            {"type": "request", "seq": 1, "command": "evaluate", "arguments": content},
        )
    )
    kernel.drain(1)
    kernel.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted", cell.text


def test_a_mismatch_met_while_stepping_is_named(kernel: Kernel, debugger: Debugger) -> None:
    source = "%%distributed\nx = rank\nallreduce([0.0] * (1 + x))"
    cell, pause = debugger.start(source, 3)
    pause.go("next")
    cell.wait()
    assert "raised CollectiveMismatch at line 3: allreduce" in cell.text


def test_an_exception_pauses_the_rank_that_raised_it(kernel: Kernel, debugger: Debugger) -> None:
    debugger.ask("setExceptionBreakpoints", filters=["userUnhandled"])
    source = "%%distributed\ndef f(n):\n    return 1 / n\nf(rank - 1)\nbarrier()"
    assert debugger.breakpoints(source) == []
    kernel.debug_events.clear()
    cell = kernel.start(source)
    pause = debugger.pause(cell)
    assert (pause.place, pause.body["reason"]) == (("rank 1: f", 3), "exception")
    assert pause.evaluate("n") == "0"
    pause.go("continue")
    cell.wait()
    # From Python 3.13 on, debugpy complains first: a cell magic is no Python.
    assert "\nrank 1 (" in f"\n{cell.text}"
    assert "ZeroDivisionError at line 3" in cell.text
    debugger.ask("setExceptionBreakpoints", filters=[])


def test_breakpoints_of_imported_modules_and_earlier_cells(
    kernel: Kernel, debugger: Debugger
) -> None:
    module = kernel.cwd / "own_module.py"
    module.write_text("def g(n):\n    m = n + 1\n    return m\n")
    defined = "%%distributed\nimport own_module\ndef h(n):\n    return own_module.g(n)"
    kernel.run(defined).ok()
    assert debugger.breakpoints(defined, 4) == [4]
    assert debugger.breakpoints_in(str(module), 3) == [3]
    cell, pause = debugger.start("%%distributed\nprint(h(rank))", 2)
    pause = pause.step("continue")
    assert pause.place == ("rank 0: h", 4)
    pause = pause.step("continue")
    assert [(one["name"], one["line"]) for one in pause.frames] == [
        ("rank 0: g", 3),
        ("rank 0: h", 4),
        ("rank 0: <module>", 2),
    ]
    assert debugger.ask("source", source={"path": str(module)})["content"] == module.read_text()
    assert pause.step("stepOut").place == ("rank 0: h", 4)
    debugger.breakpoints(defined)
    debugger.breakpoints_in(str(module))
    pause.go("continue")
    cell.wait().ok()


def test_breakpoint_in_a_cell_pauses_like_a_clicked_one(kernel: Kernel, debugger: Debugger) -> None:
    cell, pause = debugger.start("%%distributed\nif rank == 2:\n    breakpoint()\nx = 1\nbarrier()")
    assert pause.place[0] == "rank 2: <module>"
    pause.go("continue")
    cell.wait().ok()


@pytest.mark.replaces
def test_the_death_of_a_rank_ends_the_pause(kernel: Kernel, debugger: Debugger) -> None:
    cell, pause = debugger.start("%%distributed\nimport os\nx = 1\nbarrier()", 3)
    os.kill(int(pause.evaluate("os.getpid()")), signal.SIGKILL)
    cell.wait()
    assert cell.error_name == "RankDied", cell.text
    # The process that takes its place has a debugger too.
    cell, pause = debugger.start("%%distributed\nx = 1\ny = 2\nbarrier()", 3)
    assert debugger.lines(pause) == ALL
    pause.go("continue")
    cell.wait().ok()


def test_the_end_of_debugging_ends_the_pause_and_the_tracing(
    kernel: Kernel, debugger: Debugger
) -> None:
    source = "%%distributed\nimport sys\nprint(sys.gettrace() is None)"
    cell, _ = debugger.start(source, 2)
    debugger.ask("disconnect")
    cell.wait().ok()  # a rank may stop to trace before its last line, or after it
    assert kernel.run(source).ok().text == "ranks 0–2 │ True\n"
    again = Debugger(kernel)
    cell, pause = again.start(source, 3)
    assert again.lines(pause) == ALL
    pause.go("continue")
    cell.wait().ok()


def test_in_the_kernel_of_ranks_each_cell_is_debugged_on_them(tmp_path: Path) -> None:
    spec = spec_of(sys.executable)
    spec.argv += ["--ext=allranks.kernel"]
    with Kernel(tmp_path, {"ALLRANKS_START": "-n 2"}, spec=spec) as kernel:
        debugger = Debugger(kernel)
        # Before its ranks have started.
        cell, pause = debugger.start("x = rank\ny = 3", 2)
        assert debugger.lines(pause) == {"rank 0": 2, "rank 1": 2}
        pause.evaluate("%distributed debug -r 1")
        debugger.pause().go("continue")
        cell.wait().ok()
        found = {one["name"]: one["value"] for one in _variables(debugger)}
        assert (found["x"], found["y"]) == ("1", "3")
        cell, pause = debugger.start("%%local\nhere = 1\nhere += 1", 3)
        assert pause.place == ("<module>", 3)
        pause.go("continue")
        cell.wait().ok()


def _variables(debugger: Debugger) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = debugger.ask("inspectVariables")["variables"]
    return found
