"""A cell may fork: what it forks is no rank, and ends with its part of the cell."""

import os

import pytest

from tests.faults.notebook import KEPT, name_of
from tests.kernel import wait_until

NEXT = "import numpy as np\nfloat(allreduce(np.ones(2), op=Sum)[0])"
#: How a forked process leaves the cell, and with which exit code it ends.
LEAVING = {
    "at its end": ("pass", 0),
    "by an exception": ("raise ValueError('in the child')", 1),
    "by sys.exit": ("import sys; sys.exit(7)", 7),
    "by a display": ("display('shown')", 0),
    "by a collective": ("import numpy as np; allreduce(np.ones(3))", 1),
    "by mpi4py": ("comm.bcast(1)", 1),
    "by a program": ("os.execvp('false', ['false'])", 1),
}
FORK = """
import os
pid = os.fork()
if pid == 0:
    print("of the child", end="\\n")
    {act}
else:
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def forked(notebook):
    """The processes that run Python, as what a rank forks does; a keeper of files is a shell.

    ipyparallel's controller may come later than the first cell.
    """
    return {
        each.pid
        for each in notebook.children()
        if name_of(each).startswith("python") and not writes_to(each.pid).endswith("controller.log")
    }


def writes_to(pid):
    """Where its standard output goes; an empty text where it has none any more."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def _nothing_of_them_is_left(notebook):
    before = forked(notebook)
    yield
    # The controller that starts is one more of them until it has its own output.
    wait_until(
        lambda: forked(notebook) <= before, lambda: f"the end of {forked(notebook) - before}"
    )
    assert notebook.on_ranks("kept").text == KEPT
    assert notebook.on_ranks(NEXT).text == "ranks 0–3 → 4.0\n"


@pytest.mark.parametrize(("act", "code"), LEAVING.values(), ids=LEAVING.keys())
def test_a_forked_process_ends_with_the_cell_and_its_rank_goes_on(notebook, act, code):
    cell = notebook.on_ranks(FORK.format(act=act), "-r 1").ok()
    assert cell.text.count("│ of the child\n") == 1
    if "allreduce" in act:
        assert "a collective must be called by a rank: process" in cell.text
        assert "rank 1 (pid" in cell.text
        assert "Return the value to the rank" in cell.text
    assert notebook.on_ranks("ended", "-r 1").text == f"rank 1 → {code}\n"


@pytest.mark.parametrize(
    "act", ["pass", "await asyncio.get_event_loop_policy().get_event_loop().create_future()"]
)
def test_a_forked_process_leaves_a_cell_that_awaits(notebook, act):
    """One that awaits itself does not run the loop of its rank."""
    notebook.on_ranks(f"import asyncio\nawait asyncio.sleep(0){FORK.format(act=act)}").ok()
    if act == "pass":
        assert notebook.on_ranks("ended").text == "ranks 0–3 → 0\n"


def test_a_program_does_not_replace_a_rank(notebook):
    cell = notebook.on_ranks("import os\nos.execlp('sleep', 'sleep', '600')", "-r 1")
    cell.fails("CellFailed", "rank 1", "at line 3", "to go on after the cell, found os.execv()")
    cell.says("Type: subprocess.run([...])")


def test_a_fork_that_python_does_not_see_ends_with_the_cell(notebook):
    # PyDLL keeps Python's lock, and nobody may be asking for it: a child would wait for ever for
    # the thread that asked, or that has it.
    notebook.on_ranks(
        "import ctypes, os, sys, time\n"
        "usual = sys.getswitchinterval()\nsys.setswitchinterval(60)\ntime.sleep(0.1)\n"
        "pid = ctypes.PyDLL(None).fork()\nif pid: os.waitpid(pid, 0)\n"
        "sys.setswitchinterval(usual)"
    ).ok()


def test_pools_of_forked_processes_work_and_may_print(notebook):
    cell = notebook.on_ranks(
        "import concurrent.futures, multiprocessing, sys\n"
        "def square(x):\n    print('err', x, file=sys.stderr)\n    return x * x\n"
        "fork = multiprocessing.get_context('fork')\n"
        "with concurrent.futures.ProcessPoolExecutor(2, fork) as pool:\n"
        "    first = sum(pool.map(square, range(4)))\n"
        "with fork.Pool(2) as pool:\n    second = sum(pool.map(square, range(4)))\n"
        "first, second",
        "-r 2",
    )
    assert cell.text.endswith("→ (14, 14)\n")
    assert cell.text.count("err 3") == 2


def test_a_forked_process_may_outlive_the_cell(notebook):
    # From Python 3.12 on os.fork() warns in a process that has threads, as every rank has.
    cell = notebook.on_ranks(
        "import os, time, warnings\nread, write = os.pipe()\n"
        "with warnings.catch_warnings(action='ignore'):\n    long = os.fork()\n"
        "if long == 0:\n    os.read(read, 1)\n    print('the end of', rank)",
        "-r 3",
    )
    assert (cell.status, cell.text) == ("ok", "")
    assert notebook.on_ranks(NEXT).text == "ranks 0–3 → 4.0\n"
    cell = notebook.on_ranks("os.write(write, b'.'); os.waitpid(long, 0)[1]", "-r 3")
    assert cell.text == "rank 3 │ the end of 3\n       → 0\n"
