"""Execution of students' notebooks by nbgrader: only a test that runs to its end earns points.

nbgrader gives a test all of its points if its cell has no error below it. So a test that never ran,
because the student's kernel had died, passes (nbgrader issue 427), and a number that the student's
code displays within a test counts as its score. `configure` puts `Execute` of this module in the
place of nbgrader's own. It appends a line to each test, which makes a file of a random name. A test
without its file fails, whatever it has displayed.

The student's code and the tests run in the same processes, as always in nbgrader: code that was
written against the grader can deceive it.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from nbformat import NotebookNode
from nbgrader import preprocessors
from nbgrader.converters import Autograde
from nbgrader.utils import is_grade, is_solution
from traitlets import Integer

from allranks.grading.output_limit import OutputLimit

_MAGIC = re.compile(r"%%(\S+)")
_RUN_PYTHON = {"distributed", "px", "rank", "time", "timeit", "capture"}
"""Magics of cells whose body is Python. Others, as ``%%bash``, get no line."""
_LOOK_SECONDS = 0.5
_ENDING_SECONDS = 5.0
_ORPHANS_COME_HERE = 36  # PR_SET_CHILD_SUBREAPER


def configure(config: Any) -> None:
    """Makes nbgrader run notebooks with `Execute`: call it in ``nbgrader_config.py``.

    Args:
        config: what ``get_config()`` returns there.
    """
    usual = Autograde.class_traits()["autograde_preprocessors"].default()
    own = [Execute if one is preprocessors.Execute else one for one in usual]
    config.Autograde.autograde_preprocessors = own
    # A test that the student has deleted is back, and fails like others.
    config.OverwriteCells.add_missing_cells = True
    # Else a released exercise would raise NotImplementedError, on every rank.
    config.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE"}


class Execute(preprocessors.Execute):  # type: ignore[misc]
    """Runs a notebook's cells; tests that did not run to their end have an error below them.

    Whatever the notebook does, this ends within its limits, and so does every process that it has
    started.
    """

    notebook_seconds = Integer(
        300, help="The most seconds for all cells of a notebook; cells after it do not run."
    ).tag(config=True)
    most_processes = Integer(
        100, help="If a notebook has more processes at once, all of them are killed."
    ).tag(config=True)
    most_output_nbytes = Integer(
        1_000_000, help="Output of a cell beyond this is dropped, and errors are cut."
    ).tag(config=True)

    iopub_timeout = Integer(
        10, help="Seconds for the output of a cell that was interrupted, or has ended."
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: Any = None, km: Any = None
    ) -> tuple[NotebookNode, Any]:
        """Runs the cells, and puts an error below each test that has not run to its end."""
        self._deadline = time.monotonic() + self.notebook_seconds
        self._ended = ""
        self._output = OutputLimit(self.most_output_nbytes)
        with tempfile.TemporaryDirectory(prefix="allranks-grading-") as folder:
            self._files = {
                id(cell): Path(folder) / secrets.token_hex()
                for cell in _tests(nb)
                if _is_python(cell.source)
            }
            try:
                with Processes(self.most_processes) as processes:
                    nb, resources = super().preprocess(nb, resources, km)
            except Exception as error:
                self._ended = self._ended or _described(error)
            self._ended = processes.killed or self._ended
            for cell in _tests(nb):
                file = self._files.get(id(cell))
                _judge(cell, not self._ended if file is None else file.exists(), self._ended)
        return nb, resources

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> Any:
        """Runs a cell, unless the kernel has died or the time is over."""
        if time.monotonic() > self._deadline:
            self._ended = f"the notebook took more than {self.notebook_seconds} s"
        if self._ended or cell.cell_type != "code":
            return cell, resources
        source = cell.source
        if id(cell) in self._files:
            cell.source += f"\nopen({str(self._files[id(cell)])!r}, 'a').close()\n"
        try:
            return super().preprocess_cell(cell, resources, index)
        except Exception as error:
            self._ended = _described(error)
            return cell, resources
        finally:
            cell.source = source

    def _get_timeout(self, cell: NotebookNode | None) -> float:
        left = max(1.0, self._deadline - time.monotonic())
        return min(super()._get_timeout(cell) or left, left)

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        """Adds a message of the kernel to the cell's output, if there is room for it."""
        if not self._output.keeps(cell_index, msg):
            return None
        return super().process_message(msg, cell, cell_index)

    def on_cell_executed(self, **kwargs: Any) -> None:
        """Adds the error of a kernel's reply, if the kernel has not sent it as output."""
        if kwargs["execute_reply"]["content"]["status"] == "error":
            self._output.cut(kwargs["execute_reply"]["content"])
        super().on_cell_executed(**kwargs)


class Processes:
    """Within, processes may be started; at the end all of them are ended.

    Attributes:
        killed: why they were killed before; empty if they were not.
    """

    def __init__(self, most: int) -> None:
        self.killed = ""
        self._most = most
        self._before = set(psutil.Process().children(recursive=True))
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Processes:
        if sys.platform == "linux":
            # What has lost its parent becomes a child of this process, where it is found.
            ctypes.CDLL(None).prctl(_ORPHANS_COME_HERE, 1, 0, 0, 0)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        # Ranks end by themselves once their kernel has ended.
        deadline = time.monotonic() + _ENDING_SECONDS
        while (left := self._started()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.1)
        self._kill()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if len(self._started()) > self._most:
                self.killed = f"the notebook had more than {self._most} processes"
                self._kill()

    def _started(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if process not in self._before and _is_alive(process)
        ]

    def _kill(self) -> None:
        # Stopped first, all of them: while some are killed, others would start more.
        while left := self._started():
            for process in left:
                with suppress(psutil.Error):
                    process.suspend()
            if set(self._started()) <= set(left):
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(left, timeout=_ENDING_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        if process.ppid() == psutil.Process().pid:
            process.wait(timeout=0)
    except psutil.Error:
        pass
    return False


def _tests(nb: NotebookNode) -> list[NotebookNode]:
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    return [cell for cell in cells if is_grade(cell) and not is_solution(cell)]


def _is_python(source: str) -> bool:
    magic = _MAGIC.match(source.lstrip())
    return magic is None or magic[1] in _RUN_PYTHON


def _judge(cell: NotebookNode, ended: bool, why: str) -> None:
    """Leaves below a test an error, first of all, or nothing that nbgrader takes for a score."""
    errors = [output for output in cell.outputs if output.output_type == "error"]
    # nbgrader takes the first of these for the score, and text on stderr for an error.
    others = [o for o in cell.outputs if o.output_type not in ("error", "execute_result")]
    for output in others:
        if output.get("name") == "stderr":
            output["name"] = "stdout"
    if ended and not errors:
        cell.outputs = others
        return
    if not errors:
        reason = f": {why}" if why else ""
        text = f"expected a test that runs to its end; found that it did not{reason}."
        error = {"output_type": "error", "ename": "TestNotRun", "evalue": text}
        errors = [NotebookNode({**error, "traceback": [text]})]  # type: ignore[no-untyped-call]
    cell.outputs = errors + others


def _described(error: Exception) -> str:
    name = type(error).__name__
    known = {
        "DeadKernelError": "the kernel died",
        "CellTimeoutError": "the kernel did not answer after an interrupt",
    }
    return known.get(name, f"{name}: {error}".partition("\n")[0])
