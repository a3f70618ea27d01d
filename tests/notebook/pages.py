"""The cells on a page of the docs, run in one kernel from top to bottom.

``python -m tests.notebook.pages docs/cells.md`` writes below each cell what it says now.
Markers above a cell: ``<!-- run by FILE.py -->`` names the test that runs it in another way;
``<!-- in a new kernel -->`` restarts the kernel first; ``<!-- it raises NAME -->`` names an error
that is not shown.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from allranks.features.toolbar.notebook import TARGET
from tests.agents import numbers
from tests.kernel import Cell, Kernel
from tests.notebook.steady import COLOURS, steady

CELL = re.compile(
    r"(?<!\.py -->\n)"
    r"(?P<fresh><!-- in a new kernel -->\n)?"
    r"(?:<!-- stop is (?P<press>pressed(?: twice)?) -->\n)?"
    r"(?:<!-- it raises (?P<raises>\w+) -->\n)?"
    r"```python\n(?P<source>.*?)```\n"
    r"(?:\n(?P<cut><!-- not shown whole -->\n)?```text\n(?P<shown>.*?)```\n)?",
    re.DOTALL,
)
AT_HOME = re.compile(r"/\S*/\.local/state/")
INTERRUPTED = re.compile(
    r"(?m)^ranks? ([\d–, ]+)"
    r"(?: \(.*\) raised KeyboardInterrupt| (?:was|were) waiting) at line (\d+)"
)
PLACE = re.compile(r"In\[\d+\]:(\d+)")
_PRESSED_AGAIN_AFTER_SECONDS = 1.5
_PATIENT_SECONDS = 150
"""To load torch and what it compiles with takes long where others are busy."""


def run(page: str, kernel: Kernel) -> Iterator[tuple[re.Match[str], str]]:
    for found in CELL.finditer(page):
        if found["fresh"]:
            kernel.restart()
        cell = kernel.start(found["source"])
        if found["press"]:
            _wait_for_places(kernel, cell, found["shown"] or "")
            kernel.interrupt()
        if found["press"] == "pressed twice":
            time.sleep(_PRESSED_AGAIN_AFTER_SECONDS)
            kernel.interrupt()
        said = cell.wait(_PATIENT_SECONDS).text.rstrip("\n")
        if found["raises"]:
            cell.fails(found["raises"])
        elif found["shown"] is None:
            cell.ok()
        if found["cut"]:
            lines = said.splitlines()
            hidden = [line for line in lines if "are not shown" in line]
            said = "\n".join([*lines[:2], "⋮", *hidden, "⋮", *lines[-2:]])
        yield found, said


def _wait_for_places(kernel: Kernel, cell: Cell, shown: str) -> None:
    """Returns once the ranks are at the lines where the page shows that they were interrupted; one
    that does not react to an interrupt answers nothing either.
    """
    expected = {rank: line for ranks, line in INTERRUPTED.findall(shown) for rank in numbers(ranks)}
    asked, begin = 0, len(kernel.comms)

    def there() -> bool:
        nonlocal asked
        told = [one["data"] for one in kernel.comms[begin:] if one["comm_id"] == TARGET]
        if len(told) >= asked:
            asked += 1
            kernel.say(TARGET, {})
        rows = told[-1].get("rows", ()) if told else ()
        places = {int(row["ranks"]): PLACE.findall(row["detail"]) for row in rows}
        if not expected:
            return {row["state"] for row in rows} == {"silent", "finished"}
        return all(places.get(rank) == [line] for rank, line in expected.items())

    cell.wait_for_begin(_PATIENT_SECONDS)
    kernel.pump(there, _PATIENT_SECONDS, f"ranks at {expected or 'a place in C'}", cell)


def with_outputs(page: str, kernel: Kernel) -> str:
    """Returns the page with what its cells say now, where that is not what they show."""
    parts, at = [], 0
    for found, said in run(page, kernel):
        if found["shown"] is not None and steady(found["shown"]) != steady(said):
            start, end = found.span("shown")
            parts += [page[at:start], AT_HOME.sub("~/.local/state/", COLOURS.sub("", said)) + "\n"]
            at = end
    return "".join(parts) + page[at:]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as cwd:
            env = {"XDG_STATE_HOME": None, "TMPDIR": cwd}
            with Kernel(Path(cwd), env) as k:
                path.write_text(with_outputs(path.read_text(), k))
