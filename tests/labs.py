"""The labs: what is committed, with its exercises solved, and what of it every run says alike.

Cells are known by their ids. ``exercise-1`` is left to the reader and ``check-1`` fails until it is
done; the solutions stand in ``tests/notebook/solutions``, by the exercise's name.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.notebook.steady import steady

REPOSITORY = Path(__file__).resolve().parent.parent
LABS = sorted(path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb"))

NEED_TORCH = ("12_torch",)
"""Run with the Python that ALLRANKS_TEST_TORCH names."""

FAILS = "raises-exception"
"""The tag of a cell that fails on purpose. "Run all" goes on after it."""

MEASURED = "measured"
"""The tag of a cell whose numbers differ from run to run: what stands around them is compared."""

JUDGED = "judged"
"""The tag of a cell in which a busy machine says something else: what it says is not compared."""

STILL = '<div class="allranks-still">'
"""How a live view's still picture begins."""

_NUMBER = r"[-+−]?\d[\d,.]*(?:e[-+]?\d+)?|\b(?:nan|inf)\b"
_CHUNK = re.compile(r"^# %% ([\w-]+)\n", re.MULTILINE)


def path_of(name: str) -> Path:
    return REPOSITORY / "notebooks" / f"{name}.ipynb"


def read(name: str) -> NotebookNode:
    notebook = nbformat.read(path_of(name), as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook: NotebookNode, tag: str) -> list[str]:
    return [cell.id for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def failed(notebook: NotebookNode) -> list[str]:
    return [cell.id for cell in code_cells(notebook) if error_of(cell)]


def error_of(cell: NotebookNode) -> NotebookNode | None:
    """Returns the error in which a cell has ended, or None."""
    return next((output for output in cell.outputs if output.output_type == "error"), None)


def exercises(notebook: NotebookNode) -> list[str]:
    """Returns the names of a lab's exercises, as ``1`` of ``check-1``."""
    return [cell.id[6:] for cell in code_cells(notebook) if cell.id.startswith("check-")]


def solutions(name: str) -> dict[str, str]:
    file = Path(__file__).parent / "notebook" / "solutions" / f"{name}.py"
    _, *chunks = _CHUNK.split(file.read_text())
    return {name: source.strip() for name, source in zip(chunks[::2], chunks[1::2], strict=True)}


def solved(name: str) -> NotebookNode:
    """Returns a lab in which, before its ranks stop, each exercise is solved and checked again.

    The cells that have been added are ``solution-1`` and ``solved-1``. A solution has the magic of
    its exercise. Cells of other names run in the notebook.
    """
    notebook = copy.deepcopy(read(name))
    sources = {cell.id: cell.source for cell in notebook.cells}
    added = []
    for exercise, source in solutions(name).items():
        if f"check-{exercise}" not in sources:
            added.append(new_code_cell(source, id=exercise))
            continue
        magic = re.match(r"%%.*\n|", sources[f"exercise-{exercise}"])[0]
        added.append(new_code_cell(magic + source, id=f"solution-{exercise}"))
        added.append(new_code_cell(sources[f"check-{exercise}"], id=f"solved-{exercise}"))
    notebook.cells[-1:-1] = added
    return notebook


def with_ranks(notebook: NotebookNode, ranks: int) -> NotebookNode:
    """Returns the lab, with this number of ranks in place of four."""
    for cell in code_cells(notebook):
        cell.source = re.sub(r"\A(%%distributed .*)?-n 4\b", rf"\1-n {ranks}", cell.source)
    return notebook


def text_of(cell: NotebookNode) -> str:
    return "".join(_text_of(output) for output in cell.outputs)


def steady_lines(cell: NotebookNode) -> list[str]:
    """Returns what a cell says in every run.

    Of a live view's still picture these are the names of its curves. Pictures come in the order
    in which they were drawn.
    """
    if JUDGED in cell.metadata.get("tags", ()):
        return []
    text = "".join(_curves(out) if _is_still(out) else _text_of(out) for out in cell.outputs)
    lines = steady(text).splitlines()
    if MEASURED in cell.metadata.get("tags", ()):
        lines = [_without_numbers(line) for line in lines]
    drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
    return sorted(lines) if drawn else lines


def _text_of(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join(output.traceback) + "\n"
    text = str(output.data.get("text/plain", ""))
    return f"{text}\n" if text else ""


def _is_still(output: NotebookNode) -> bool:
    return STILL in output.get("data", {}).get("text/html", "")


def _curves(still: NotebookNode) -> str:
    lines = still.data["text/plain"].splitlines()
    if "curves" not in lines:
        return ""
    table = lines[lines.index("curves") + 2 :]
    inside = [line.startswith("  ") for line in table] + [False]
    return "".join(f"curve {line.split()[0]}\n" for line in table[: inside.index(False)])


def _without_numbers(line: str) -> str:
    line = re.sub(_NUMBER, "N", line)
    line = re.sub(r"\bN (s|ms|µs|ns)\b", "SECONDS", line)
    line = re.sub(r"\bN [kMGT]?B(?=/s)", "N B", line)
    return re.sub(r"[\s─]+", " ", line).strip()
