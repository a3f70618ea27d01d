"""Mistakes with collectives in real cells on four ranks, fifty times in a row in one session.

Every mistake ends in the right error, the variables are there, and the very next cell is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook

TIMES = 50
FLAT_NBYTES = 8_000_000
CORRECT = """
import numpy as np
mine = np.arange(1000.0) + rank
right = np.arange(1000.0) * size + sum(range(size))
assert np.array_equal(allreduce(mine, op=Sum), right)
print("kept", kept == 10 * rank)
"""
MISTAKES = {
    "shape": ("allreduce(np.ones(3 + (rank == 2)))", "CollectiveMismatch", "same shape"),
    "dtype": (
        "allreduce(np.ones(3, 'f4' if rank == 2 else 'f8'))",
        "CollectiveMismatch",
        "same dtype",
    ),
    "op": ("allreduce(np.ones(3), op=Max if rank == 2 else Sum)", "CollectiveMismatch", "same"),
    "root": ("broadcast(np.ones(3), root=int(rank == 2))", "CollectiveMismatch", "same root"),
    "order": (
        "for call in (allreduce, allgather)[:: -1 if rank == 2 else 1]: call(np.ones(3))",
        "CollectiveMismatch",
        "same operation",
    ),
    "number": (
        "for _ in range(2 - (rank == 2)): allreduce(np.ones(3))",
        "RankLeft",
        "rank 2 has left",
    ),
    "raises": ("assert rank != 2; allreduce(np.ones(3))", "AssertionError", "rank 2 has left"),
    "returns": ("if rank != 2: allreduce(np.ones(3))", "RankLeft", "rank 2 has left"),
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Four ranks that call another one late after two seconds."""
    folder = tmp_path_factory.mktemp("notebook")
    with Notebook(folder, {"ALLRANKS_LATE_SECONDS": "2"}) as shared:
        shared.on_ranks("import numpy as np, os, time; kept = 10 * rank", "-n 4")
        shared.note_files()
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


def check_correct(notebook: Notebook) -> None:
    cell = notebook.on_ranks(CORRECT)
    assert cell.status == "ok", cell.text
    assert "ranks 0–3 │ kept True" in cell.text


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_the_right_error_and_the_next_cell_is_right(notebook, mistake):
    source, error, said = MISTAKES[mistake]
    for _ in range(TIMES):
        cell = notebook.on_ranks(source, timeout=10)
        assert cell.error_name == "CellFailed", cell.text
        assert error in cell.text
        assert said in cell.text
        check_correct(notebook)


def test_an_interrupt_inside_a_collective_is_survived(notebook):
    for _ in range(TIMES):
        cell = notebook.start_on_ranks(
            "print('waiting')\nif rank != 2: allreduce(np.ones(3))\nelse: time.sleep(60)"
        ).wait_for("waiting")
        notebook.interrupt()
        assert cell.wait(10).error_name == "CellInterrupted", cell.text
        check_correct(notebook)


def test_a_rank_that_sleeps_is_named_with_its_line_and_waited_for(notebook):
    cell = notebook.on_ranks("if rank == 2: time.sleep(20)\nallreduce(np.ones(3), op=Sum)")
    assert cell.status == "ok", cell.text
    assert re.search(r"· .*rank 2 .*time\.sleep\(20\)", cell.text), cell.text
    assert "ranks 0–3 → array([4., 4., 4.])" in cell.text
    check_correct(notebook)


def test_a_thousand_aborted_collectives_leave_memory_and_descriptors_as_they_were(notebook):
    mistakes = """
from allranks.errors import CollectiveMismatch
for _ in range({times}):
    try:
        allreduce(np.ones(20_000 + (rank == 2)))
    except CollectiveMismatch:
        aborted = globals().get("aborted", 0) + 1
"""
    assert notebook.on_ranks(mistakes.format(times=200)).status == "ok"
    before = resources(notebook)
    assert notebook.on_ranks(mistakes.format(times=1000)).status == "ok"
    assert notebook.on_ranks("aborted").displays[-1]["text/plain"] == "ranks 0–3 → 1200"
    for rank, (nbytes, descriptors) in resources(notebook).items():
        assert nbytes - before[rank][0] < FLAT_NBYTES
        assert descriptors == before[rank][1]


def resources(notebook: Notebook) -> dict[int, tuple[int, int]]:
    """Returns the memory and the number of open descriptors of every rank."""
    found = {}
    for rank, pid in notebook.pids().items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[rank] = (pages * 4096, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    return found
