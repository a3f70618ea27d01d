"""Labs 03 and 04, exported, say under ``mpiexec`` what they say in the notebook.

Both run in one start of ranks, since to import TensorFlow takes them longer than most cells, and
each without most of its trainings: every training that is compared here begins with a seed.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from collections import Counter

import nbformat
import pytest

from tests import labs
from tests.mpi.launch import mpiexec
from tests.notebook.steady import COLOURS

CELLS = {
    "03_ensemble": ("load", "data", "draw-shares", "train", "accuracies", "vote", "agree"),
    "04_data_parallel": ("load", "data", "init", "share", "scale"),
}
SIZE = 4
SAID = re.compile(r"^(?:ranks? (?P<ranks>[\d, –]+?))? +│ (?P<text>.*)$")


def cut(name: str, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    kept = copy.deepcopy(notebook)
    kept.cells = [cell for cell in kept.cells if cell.id in CELLS[name]]
    assert len(kept.cells) == len(CELLS[name])
    return kept


def said_by_ranks(notebook: nbformat.NotebookNode) -> Counter[str]:
    lines: Counter[str] = Counter()
    for cell in notebook.cells:
        count = 0
        for line in COLOURS.sub("", labs.text_of(cell)).splitlines():
            found = SAID.match(line)
            if found is None:
                continue
            if found["ranks"]:
                spans = re.findall(r"(\d+)(?:–(\d+))?", found["ranks"])
                count = sum(int(last or first) - int(first) + 1 for first, last in spans)
            lines[found["text"].rstrip()] += count
    return lines


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow: pip install 'allranks[tensorflow]'",
)
@pytest.mark.timeout(600)
def test_the_numbers_are_the_same_under_mpiexec(executed, tmp_path):
    expected: Counter[str] = Counter()
    for name in CELLS:
        expected += said_by_ranks(cut(name, executed(name)))
        nbformat.write(cut(name, labs.read(name)), tmp_path / f"{name}.ipynb")
        command = [sys.executable, "-m", "allranks.command.main", "export", f"{name}.ipynb"]
        subprocess.run(command, cwd=tmp_path, check=True)
    paths = [str(tmp_path / f"{name}.py") for name in CELLS]
    start = f"import runpy\nfor path in {paths}:\n    runpy.run_path(path, None, '__main__')"
    ended = mpiexec(SIZE, "-c", start, timeout=280)
    assert ended.returncode == 0, ended.stdout
    found = Counter(line.rstrip() for line in ended.stdout.splitlines())
    assert sum(expected.values()) > 8 * SIZE
    assert expected - found == Counter()
