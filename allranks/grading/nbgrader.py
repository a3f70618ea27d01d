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

import copy
import itertools
import os
import re
import secrets
import site
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from jupyter_core.paths import (
    jupyter_config_dir,
    jupyter_config_path,
    jupyter_data_dir,
    jupyter_path,
)
from nbformat import NotebookNode
from nbgrader import preprocessors
from nbgrader.converters import Autograde
from nbgrader.coursedir import CourseDirectory
from nbgrader.exchange.default import Exchange
from nbgrader.utils import is_grade, is_solution
from traitlets import Integer

from allranks.grading import without_folders
from allranks.grading.output_limit import OutputLimit
from allranks.grading.processes import Processes, read_ids

_MAGIC = re.compile(r"%%(\S+)")
_ON_RANKS = {"distributed", "px", "rank"}
_RUN_PYTHON = _ON_RANKS | {"time", "timeit", "capture"}
"""Magics of cells whose body is Python. Others, as ``%%bash``, get no line."""
#: The path of a socket has at most 104 bytes (macOS) or 108; Jupyter adds a number.
_LONGEST_NBYTES = 95
_PYTHON = re.compile(r"python[\d.]*")
_HERE = "__import__('allranks.features.grading.{}', fromlist=['_'])"


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
    started. A cell that ends the kernel, or a rank, costs no later test: the earlier cells run
    again in a new kernel, without this one. The kernel cannot read the course's solutions, nor
    write to what nbgrader runs.
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
        #: Why a test did not run to its end, by its place.
        self._reasons: dict[int, str] = {}
        #: Why a cell does not run again, by its place.
        self._left_out: dict[int, str] = {}
        self._hiding = self._hide_course(resources)
        with tempfile.TemporaryDirectory(prefix="allranks-grading-") as folder:
            self._folder = Path(folder)
            self._files = {
                index: self._new_file()
                for index, cell in enumerate(nb.cells)
                if _is_test(cell) and _is_python(cell.source)
            }
            try:
                with Processes(self.most_processes) as self._processes:
                    nb, resources = super().preprocess(nb, resources, km)
            except Exception as error:
                self._ended = self._ended or self._processes.killed or _described(error)
            for index, cell in enumerate(nb.cells):
                if _is_test(cell):
                    why = self._reasons.get(index, self._ended)
                    file = self._files.get(index)
                    _judge(cell, not why if file is None else file.exists(), why)
        return nb, resources

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> Any:
        """Runs a cell, unless it is the test of an answer that has ended the kernel or a rank."""
        if time.monotonic() > self._deadline:
            self._ended = f"the notebook took more than {self.notebook_seconds} s"
        if self._ended or cell.cell_type != "code":
            return cell, resources
        if _is_test(cell) and (why := self._lost_answer(index)):
            self._reasons[index] = why
        elif lost := self._run(cell, resources, index):
            self._reasons[index] = self._left_out[index] = lost
            self._begin_again(resources, index)
        return cell, resources

    def _run(self, cell: NotebookNode, resources: Any, index: int, *, again: bool = False) -> str:
        """Runs a cell; returns why the kernel or a rank was lost, empty if none was."""
        source, ranks = cell.source, list[int]()
        try:
            if is_grade(cell) or is_solution(cell):
                ranks = self._prepare(index)
            if index in self._reasons:
                return ""
            if index in self._files and not again:
                cell.source += self._last_line(index, source)
            super().preprocess_cell(cell, resources, index)
        except Exception as error:
            return self._processes.killed or _described(error)
        finally:
            cell.source = source
        if _has_error(cell) and not all(map(_runs, ranks)):
            return "a rank died"
        return ""

    def _last_line(self, index: int, source: str) -> str:
        """The line that makes the file of a test."""
        file = str(self._files[index])
        if not self._keeps_originals:
            return f"\nopen({file!r}, 'a').close()\n"
        on_ranks = not _ON_RANKS.isdisjoint(_magics(source))
        return f"\n{_HERE.format('originals')}.passed({file!r}, {on_ranks})\n"

    def _lost_answer(self, index: int) -> str:
        """Why the answer to this test was lost; empty if it was not."""
        for before in range(index - 1, -1, -1):
            if _is_test(self.nb.cells[before]):
                break
            if is_solution(self.nb.cells[before]):
                return self._left_out.get(before, "")
        return ""

    def _begin_again(self, resources: Any, index: int) -> None:
        """Runs the cells before this one in a new kernel, with new ranks."""
        left = range(index + 1, len(self.nb.cells))
        if not any(_is_test(self.nb.cells[at]) and not self._lost_answer(at) for at in left):
            self._ended = self._left_out[index]
            return
        cells, output = list(self.nb.cells), self._output
        try:
            self._run_earlier(cells[:index], resources)
        finally:
            self.nb.cells[:], self._output = cells, output

    def _run_earlier(self, cells: list[NotebookNode], resources: Any) -> None:
        self._new_kernel()
        at = 0
        while at < len(cells) and not self._ended:
            earlier = copy.deepcopy(cells[at])
            failed = (is_grade(earlier) or is_solution(earlier)) and _has_error(earlier)
            self._output = OutputLimit(self.most_output_nbytes)
            lost = ""
            if time.monotonic() > self._deadline:
                self._ended = f"the notebook took more than {self.notebook_seconds} s"
            elif earlier.cell_type == "code" and at not in self._left_out and not failed:
                lost = self._run(earlier, resources, at, again=True)
            at += 1
            if lost:
                self._left_out[at - 1] = lost
                self._new_kernel()
                at = 0

    def _new_kernel(self) -> None:
        self._processes.kill()
        self._processes.killed = ""
        self._cleanup_kernel()
        self.km = self.create_kernel_manager()
        self.start_new_kernel()
        self.start_new_kernel_client()

    def create_kernel_manager(self) -> Any:
        """Makes the manager of a kernel that cannot read the course."""
        made = super().create_kernel_manager()
        sockets = str(self._folder / "kernel")
        if os.name == "posix" and len(os.fsencode(sockets)) <= _LONGEST_NBYTES:
            made.transport, made.ip = "ipc", sockets
        else:
            self.log.warning(
                "expected a temporary folder for the kernel's sockets, found that the path %s is "
                "too long: every account of this machine can read the tests at the kernel's ports. "
                "Set TMPDIR to /tmp.",
                sockets,
            )
        if self._hiding:
            program, *rest = made.kernel_spec.argv
            if _PYTHON.fullmatch(program):
                program = sys.executable
            made.kernel_spec.argv = [*self._hiding, program, *rest]
        return made

    def start_new_kernel_client(self) -> Any:
        """Connects to a new kernel, which then keeps the originals of what cells may replace."""
        client = super().start_new_kernel_client()
        file = self._new_file()
        self._ask(f"{_HERE.format('kernel')}.begin({str(file)!r})")
        self._keeps_originals = file.exists()
        if not self._keeps_originals:
            self.log.warning(
                "expected a kernel with allranks, found none: a submission may replace functions "
                "that tests use. Install allranks in the environment of the kernel."
            )
        return client

    def _prepare(self, index: int) -> list[int]:
        """Restores the originals if the cell is a test, and returns the processes of the ranks."""
        if not self._keeps_originals:
            return []
        file, test = self._new_file(), index in self._files
        # Not as source, which a submission may transform.
        self._ask("pass", f"{_HERE.format('kernel')}.prepare({str(file)!r}, {test})")
        try:
            return read_ids(file)
        except ValueError:
            if test:
                self._reasons[index] = "an earlier cell has changed the kernel"
            return []

    def _ask(self, source: str, expression: str = "None") -> None:
        assert self.kc is not None
        self.wait_for_reply(
            self.kc.execute(
                source,
                silent=True,
                store_history=False,
                user_expressions={"allranks": expression},
                allow_stdin=False,
                stop_on_error=False,
            )
        )

    def _new_file(self) -> Path:
        return self._folder / secrets.token_hex()

    def _hide_course(self, resources: Any) -> list[str]:
        """The beginning of a kernel's command that hides the solutions and other submissions."""
        course = CourseDirectory(parent=self)
        names = (
            *(course.source_directory, course.source_with_tests_directory),
            *(course.submitted_directory, course.autograded_directory, course.feedback_directory),
            *("nbgrader_config.py", course.db_url.removeprefix("sqlite:///")),
            # With what students have handed in.
            Path(Exchange(parent=self).root) / course.course_id,
        )
        root = Path(course.root).resolve()
        hidden = [path for path in dict.fromkeys(root / name for name in names) if path.exists()]
        shown = Path(((resources or {}).get("metadata") or {}).get("path") or ".").resolve()
        hidden = [path for path in hidden if path != shown and shown not in path.parents]
        if not hidden:
            return []
        fixed = run_by_nbgrader(root)
        if problem := without_folders.problem(shown, hidden, fixed):
            self.log.warning(
                "expected to hide the solutions in %s from the submission; found that this system "
                "does not allow it: %s. Read the submission, or grade under an account that cannot "
                "read them.",
                root / course.source_directory,
                problem,
            )
            return []
        return without_folders.command(shown, hidden, fixed)

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


def run_by_nbgrader(course: Path) -> list[Path]:
    """Returns the folders from which nbgrader runs files, and the course, which has its settings.

    What a submission writes there would run later, with all rights of this account.
    """
    own = [jupyter_config_dir(), jupyter_data_dir()]
    if site.ENABLE_USER_SITE:
        own.append(site.getusersitepackages())
    for name in own:
        with suppress(OSError):  # else a submission could make it
            Path(name).mkdir(mode=0o700, parents=True, exist_ok=True)
    names = [str(course), *own, *jupyter_config_path(), *jupyter_path()]
    names += [sys.prefix, sys.base_prefix, *sys.path, *os.get_exec_path()]
    found = {Path(name).resolve() for name in names if os.path.isdir(name)} - {Path("/")}
    return sorted(one for one in found if found.isdisjoint(one.parents))


def _is_test(cell: NotebookNode) -> bool:
    return bool(cell.cell_type == "code" and is_grade(cell) and not is_solution(cell))


def _has_error(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _magics(source: str) -> list[str]:
    """The cell magics of a cell, as of ``%%time`` above ``%%distributed``."""
    lines = itertools.takewhile(_MAGIC.match, source.strip().splitlines())
    return [_MAGIC.split(line)[1] for line in lines]


def _is_python(source: str) -> bool:
    return _RUN_PYTHON.issuperset(_magics(source))


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
