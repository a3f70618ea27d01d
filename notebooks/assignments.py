"""Writes the labs as source versions of assignments for nbgrader.

python notebooks/assignments.py course          # all labs, into course/source
python notebooks/assignments.py course 03_messages

`nbgrader generate_assignment 03_messages` in that folder then makes the version for students. Of a
lab's cells, `exercise-1` becomes the cell for the answer, with the solution of
`tests/notebook/solutions`, and `check-1` the test: its part up to "not yet" is visible, the rest is
hidden.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

LABS = Path(__file__).resolve().parent
SOLUTIONS = LABS.parent / "tests" / "notebook" / "solutions"
CONFIG = """\
from allranks.grading.nbgrader import configure

c = get_config()
c.CourseDirectory.course_id = "allranks"
configure(c)
"""
POINTS = 2
NOT_YET = re.compile(r"^.*\"not yet: [^\n]*\n", re.MULTILINE)
CHUNK = re.compile(r"^# %% ([\w-]+)\n", re.MULTILINE)


def solutions(lab: str) -> dict[str, str]:
    """The solutions of a lab, by the names of its exercises."""
    _, *chunks = CHUNK.split((SOLUTIONS / f"{lab}.py").read_text())
    return {name: text.strip() for name, text in zip(chunks[::2], chunks[1::2], strict=True)}


def source_version(lab: str) -> NotebookNode:
    """A lab whose exercises and checks are marked for nbgrader, without output."""
    notebook = nbformat.read(LABS / f"{lab}.ipynb", as_version=4)
    solved = solutions(lab)
    checked = {cell.id[6:] for cell in notebook.cells if cell.id.startswith("check-")}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        kind, _, name = cell.id.rpartition("-")
        if name not in checked:
            continue
        if kind == "exercise":
            mark(cell, solution=True)
            cell.source += f"\n### BEGIN SOLUTION\n{solved[name]}\n### END SOLUTION"
        elif kind == "check":
            mark(cell, grade=True, locked=True, points=POINTS)
            cell.source = with_hidden_tests(cell.source)
    return notebook


def mark(cell: NotebookNode, **given: object) -> None:
    """Adds nbgrader's metadata, version 3, to a cell."""
    flags = {"grade": False, "solution": False, "locked": False, "task": False}
    cell.metadata["nbgrader"] = {**flags, "grade_id": cell.id, "schema_version": 3, **given}


def with_hidden_tests(check: str) -> str:
    """A check of which only the part up to "not yet" is visible: the rest may have the answer."""
    visible = NOT_YET.search(check)
    if visible is None:
        raise ValueError(f"expected a check with 'not yet: …', found {check!r}")
    hidden = check[visible.end() :].rstrip("\n")
    return f"{check[: visible.end()]}### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"


def write(course: Path, labs: list[str]) -> None:
    """Writes the source versions, and nbgrader's configuration if there is none."""
    for lab in labs:
        folder = course / "source" / lab
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(source_version(lab), folder / f"{lab}.ipynb")
    config = course / "nbgrader_config.py"
    if not config.exists():
        config.write_text(CONFIG)


def main() -> None:
    """Reads the command line."""
    every = sorted(path.stem for path in LABS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("course", type=Path, help="the folder of the course")
    parser.add_argument("lab", nargs="*", help=f"one or more of {', '.join(every)}; all by default")
    options = parser.parse_args()
    if unknown := set(options.lab) - set(every):
        parser.error(f"expected labs of {', '.join(every)}; found {', '.join(sorted(unknown))}")
    write(options.course, options.lab or every)
    print(f"In {options.course}, type: nbgrader generate_assignment {(options.lab or every)[-1]}")


if __name__ == "__main__":
    sys.exit(main())
