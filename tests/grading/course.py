"""A course of nbgrader with lab 3: release, submissions and scores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from notebooks import assignments
from tests.grading.submissions import SOLUTION

LAB = "03_messages"
COURSE = "allranks"
REPOSITORY = Path(__file__).resolve().parents[2]
#: nbgrader and what only it needs, where they are not installed beside allranks: its extensions of
#: JupyterLab would be in the way of other tests.
NBGRADER = os.environ.get("ALLRANKS_TEST_NBGRADER") or str(REPOSITORY / ".nbgrader")
SETTINGS = """
c.Execute.timeout = {seconds}
c.Execute.most_processes = 60
c.Exchange.root = {exchange!r}
"""
SCORES = """
import json
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    found = {}
    for submission in book.assignment_submissions("03_messages"):
        (notebook,) = submission.notebooks
        scores = {grade.name: grade.auto_score for grade in notebook.grades}
        found[submission.student.id] = [scores[f"check-{n}"] for n in (1, 2, 3)]
print(json.dumps(found))
"""


class Course:
    """A folder of nbgrader's. ``seconds`` is the limit of a cell."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        assignments.write(folder, [LAB])
        with (folder / "nbgrader_config.py").open("a") as config:
            exchange = folder / "exchange"
            config.write(SETTINGS.format(seconds=seconds, exchange=str(exchange)))
        # Another student's submission, which is right.
        inbound = exchange / COURSE / "inbound" / f"zoe+{LAB}+1"
        inbound.mkdir(parents=True)
        shutil.copy(folder / "source" / LAB / f"{LAB}.ipynb", inbound)

    def run(self, *command: str, timeout: float = 600) -> str:
        """Runs Python in the course's folder, and returns all that it has written."""
        paths = [NBGRADER, str(REPOSITORY)]
        programs = str(Path(sys.executable).parent)  # nbgrader starts alembic
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "IPYTHONDIR": str(self.folder / "ipython"),
        }
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def release(self) -> nbformat.NotebookNode:
        """Makes the students' version, and returns it."""
        self.run("-m", "nbgrader", "generate_assignment", LAB)
        path = self.folder / "release" / LAB / f"{LAB}.ipynb"
        return nbformat.read(path, as_version=4)

    def submit(
        self,
        student: str,
        released: nbformat.NotebookNode,
        answers: dict[str, str],
        files: dict[str, str],
    ) -> None:
        notebook = nbformat.from_dict(released)
        for cell in notebook.cells:
            if cell.id in answers:
                cell.source = answers[cell.id] or cell.source
            elif cell.id in SOLUTION:
                cell.source = f"%%distributed\n{SOLUTION[cell.id]}"
        folder = self.folder / "submitted" / student / LAB
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{LAB}.ipynb")
        for name, text in files.items():
            (folder / name).write_text(text)

    def grade(self, timeout: float) -> str:
        return self.run("-m", "nbgrader", "autograde", LAB, timeout=timeout)

    def scores(self) -> dict[str, list[float]]:
        """The points of the three tests, by student."""
        return dict(json.loads(self.run("-c", SCORES).splitlines()[-1]))

    def graded(self, student: str) -> nbformat.NotebookNode:
        path = self.folder / "autograded" / student / LAB / f"{LAB}.ipynb"
        return nbformat.read(path, as_version=4)
