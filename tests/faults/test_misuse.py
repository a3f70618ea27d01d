"""Mistakes with collectives in real cells on four ranks, in one session.

Every mistake ends in the right error, the variables are there, and the very next cell is right.
Without cells, and on more kinds of calls: tests/mpi/ranks/misuse_suite.py; more messages:
docs/errors.md. ``make soak`` repeats
and mixes them with whatever else cells do.
"""

import re
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook
from tests.fuzz.ranks import numbers
from tests.kernel import wait_until

CELLS_LEFT = 15
FLAT_NBYTES = 8_000_000
SETUP = """
import numpy as np, os, time
kept = 10 * rank
total = allreduce(np.arange(100_000.0) + rank, op=Sum)  # lives in memory that ranks share
"""
CORRECT = """
import numpy as np
mine = np.arange(1000.0) + rank
right = np.arange(1000.0) * size + sum(range(size))
assert np.array_equal(allreduce(mine, op=Sum), right)
assert np.array_equal(total, np.arange(100_000.0) * size + sum(range(size)))
print("kept", kept == 10 * rank)
"""
AFTER_ITS_CELL = re.compile(
    r"^ranks? ([\d–, ]+) · (?:written after its cell had ended:\n +· )?"
    r"allreduce is called after its cell has ended: ranks match calls by",
    re.MULTILINE,
)
FINISHED = "without calling allreduce(Average); ranks 0–1, 3 wait for it. Make the same calls on"
MISTAKES = {
    "dtype": (
        "allreduce(np.ones(3, 'f4' if rank == 2 else 'f8'))",
        "CollectiveMismatch: allreduce(Average) needs the same dtype on every rank: "
        "rank 2 has float32, ranks 0–1, 3 have float64. Convert with astype()",
        "ranks 0–3 (",
    ),
    "op": (
        "allreduce(np.ones(3), op=Max if rank == 2 else Sum)",
        "CollectiveMismatch: allreduce needs the same reduction on every rank: "
        "rank 2 has Max, ranks 0–1, 3 have Sum. Pass the same op=",
        "ranks 0–3 (",
    ),
    "root": (
        "broadcast(np.ones(3), root=int(rank == 2))",
        "CollectiveMismatch: broadcast needs the same root on every rank: "
        "rank 2 has 1, ranks 0–1, 3 have 0. Pass the same root",
        "ranks 0–3 (",
    ),
    "shuts down": (
        "if rank == 2: shutdown()\nelse: allreduce(np.ones(3))",
        "RankLeft: rank 2 finished In[",
        FINISHED,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _late_after_two_seconds(notebook):
    notebook.run("%env ALLRANKS_LATE_SECONDS=2\n%distributed restart")
    notebook.on_ranks(SETUP)
    notebook.note_files()
    yield
    notebook.run("import os; del os.environ['ALLRANKS_LATE_SECONDS']")


def check_correct(notebook: Notebook) -> None:
    notebook.on_ranks(CORRECT).ok().says("ranks 0–3 │ kept True")


def test_an_average_of_integers_says_that_it_is_cut_and_a_script_may_init_and_shut_down(notebook):
    cells = [notebook.on_ranks("allreduce(rank)") for _ in range(2)]
    for cell in cells:
        assert "ranks 0–3 → 1" in cell.text, cell.text
    said = "averages by default, and an average of integers that is not an integer is truncated"
    assert [said in cell.text and "pass op=Sum" in cell.text for cell in cells] == [True, False]
    assert notebook.on_ranks("init()\nallreduce(kept)\nshutdown()").status == "ok"
    check_correct(notebook)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_the_right_error_and_the_next_cell_is_right(notebook, mistake):
    source, *said = MISTAKES[mistake]
    cell = notebook.on_ranks(source).fails("CellFailed")
    assert [part for part in said if part not in cell.text] == [], cell.text
    check_correct(notebook)


def test_a_rank_that_sleeps_is_named_with_its_line_and_waited_for(notebook, tmp_path):
    go = tmp_path / "go"
    cell = notebook.start_on_ranks(
        f"while rank == 2 and not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
        "allreduce(np.ones(3), op=Sum)"
    )
    told = (
        r"· allreduce\(Sum\) at .* has waited \d+ s for rank 2:\n"
        r" *· +rank 2 is at .*time\.sleep\(0\.02\)"
    )
    notebook.pump(lambda: bool(re.search(told, cell.text)), 60, "the notice", cell)
    go.touch()
    cell.wait().ok().says("ranks 0–3 → array([4., 4., 4.])")
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
    check_flat(before, notebook)


def test_cells_that_a_rank_left_leave_memory_and_descriptors_as_they_were(notebook):
    def abort(times: int) -> None:
        for _ in range(times):
            cell = notebook.on_ranks("if rank != 2: allreduce(np.ones(100_000))")
            cell.says(FINISHED, "RankLeft: rank 2 finished In[", "rank 2 finished the cell.")

    abort(5)
    before = resources(notebook)
    abort(CELLS_LEFT)
    check_flat(before, notebook)


def check_flat(before: dict[int, tuple[int, int]], notebook: Notebook) -> None:
    def more() -> dict[int, tuple[int, int]]:
        return {
            rank: (nbytes, descriptors)
            for rank, (nbytes, descriptors) in resources(notebook).items()
            if nbytes - before[rank][0] >= FLAT_NBYTES or descriptors > before[rank][1]
        }

    # What a rank has open for a moment, to look at itself, is not left.
    wait_until(lambda: not more(), lambda: f"no more than {before}, found {more()}")


def resources(notebook: Notebook) -> dict[int, tuple[int, int]]:
    found = {}
    for rank, pid in notebook.pids().items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[rank] = (pages * 4096, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    return found


def test_threads_that_call_collectives_at_once_or_late_are_told_of(notebook):
    # Each gets what others brought, and the ranks' calls look alike: no comparison finds it.
    cell = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    found = [*pool.map(lambda i: allreduce(np.array(i), Sum), range(200))]\n"
        "print('done')"
    )
    for _ in range(2):
        told = notebook.on_ranks(cell)
        assert told.status == "ok"
        assert "allreduce is called from several threads at once: ranks match" in told.text
    assert "several threads" not in notebook.on_ranks("allreduce(1, Sum)").text
    begun = notebook.on_ranks(
        "import asyncio\n"
        "async def between():\n"
        "    allreduce(np.array(7.0), Sum)\n"
        "task = asyncio.get_event_loop().create_task(between())"
    )
    done = notebook.on_ranks("task.done()")
    assert "True\n" in done.text
    # A rank's notice stands in the first cell if it comes before the last rank's reply.
    told = AFTER_ITS_CELL.findall(begun.text + done.text)
    assert sorted(rank for label in told for rank in numbers(label)) == [0, 1, 2, 3]
    cell = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    print(pool.submit(allreduce, np.array(1.0), Sum).result())"
    )
    told = notebook.on_ranks(cell).ok().says("ranks 0–3 │ 4.0\n")
    told.lacks("ranks match", "several threads")


LEAVES_BEHIND = """
import threading
go, gone = threading.Event(), threading.Event()
def late():
    go.wait()
    allreduce(np.array(7.0), Sum)
    gone.set()
if rank == 0:
    threading.Thread(target=late, daemon=True).start()
"""


def test_a_thread_of_an_earlier_cell_that_calls_a_collective_is_told_of_on_its_rank(notebook):
    """Its call looks like the others' of this cell: no comparison finds it."""
    notebook.on_ranks(LEAVES_BEHIND)
    told = notebook.on_ranks(
        "if rank == 0:\n    go.set()\n    gone.wait()\nelse:\n    allreduce(np.array(7.0), Sum)"
    ).ok()
    said = "rank 0 · allreduce is called by a thread of an earlier cell: ranks match calls by"
    assert told.text.count(said) == told.text.count("is called") == 1
