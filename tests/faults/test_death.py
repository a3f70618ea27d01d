"""Where no rank is replaced, one that dies takes all along, and the next cell has fresh ones.

A death in a cell is on docs/failures.md.
"""

from contextlib import ExitStack

import psutil
import pytest

from tests.faults.notebook import GONE_SECONDS, named, stopped
from tests.kernel import wait_until

NAMED_SECONDS = 60  # less than what the cells sleep


@pytest.fixture(autouse=True)
def _ranks_come_back(notebook):
    notebook.run("%distributed heal off")
    yield
    notebook.note_files()
    notebook.on_ranks("kept = 10 * rank")
    assert notebook.on_ranks("kept", "-r 1").text == "rank 1 → 10\n"


def test_a_rank_that_died_between_cells_is_told_by_the_next(notebook):
    notebook.kill_rank(2)
    cell = notebook.on_ranks("'kept' in globals()")
    assert cell.stdout.startswith("rank 2 (")
    assert "the variables of all 4 ranks are lost" in cell.stdout
    assert "allranks started again ranks 0–3" in cell.stdout
    assert "ranks 0–3 → False" in cell.text


def test_the_end_of_the_launcher_ends_the_cell(notebook):
    launcher, pids = named(notebook.children(), "mpiexec", "prterun"), notebook.pids().values()
    cell = notebook.start_on_ranks("import time; print('here'); time.sleep(600)").wait_for("here")
    # It closes its connections before it has ended: a rank that runs may end first.
    with ExitStack() as stack:
        for pid in pids:
            stack.enter_context(stopped(pid))
        launcher.kill()
        cell.wait(NAMED_SECONDS)
    assert cell.error_name == "ClusterLost"
    assert "The launcher was killed by signal 9" in cell.error_value


def test_the_end_of_the_host_agent_ends_the_cell_and_what_cells_have_started(notebook):
    notebook.on_ranks(
        "import multiprocessing\nspawning = multiprocessing.get_context('spawn')\n"
        "pool, manager = spawning.Pool(1), spawning.Manager()\npool.map(abs, [-1])\n"
        "import subprocess\nown = subprocess.Popen(['sleep', '300'], start_new_session=True)"
    ).ok()
    notebook.note_files()
    children = notebook.children()
    cell = notebook.start_on_ranks("import time; print('here'); time.sleep(600)").wait_for("here")
    next(p for p in children if "allranks.agent" in p.cmdline()).kill()
    assert cell.wait(NAMED_SECONDS).error_name == "ClusterLost"
    assert "The cluster's own process was killed by signal 9" in cell.error_value
    assert psutil.wait_procs(children, timeout=GONE_SECONDS)[1] == []
    assert [path for path in notebook.files_left() if "sem.mp" in path] == []


def test_the_end_of_the_host_agent_ends_the_request_of_a_view_and_is_named(notebook, tmp_path):
    notebook.run(
        "import ipyparallel as ipp\nview = ipp.Client()[:]\ndef stays():\n    import time\n"
        f"    open(f'{tmp_path}/{{rank}}', 'w').close()\n    time.sleep(600)"
    ).ok()
    cell = notebook.start("view.apply_sync(stays)")
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    next(p for p in notebook.children() if "allranks.agent" in p.cmdline()).kill()
    cell.wait(NAMED_SECONDS).says("EngineError: expected ranks of this client")
    cell.says("The cluster's own process was killed by signal 9")


def test_a_rank_that_is_stopped_for_a_while_goes_on(notebook):
    with stopped(notebook.pids()[2]):
        status = notebook.run("%distributed status")
        cell = notebook.start_on_ranks("rank * 2").wait_for("rank 3 → 6")
        notebook.drain(3)
        assert cell.status == "running"
    assert "rank 2" in next(line for line in status.text.splitlines() if "stopped" in line)
    assert cell.wait().status == "ok"
    assert "rank 2 → 4" in cell.text
    # A busy rank may be silent in one look.
    wait_until(lambda: "idle" in notebook.run("%distributed status").text)


def test_a_rank_that_is_stopped_while_it_waits_is_named(notebook, tmp_path):
    go, pid = tmp_path / "go", notebook.pids()[2]
    cell = notebook.start_on_ranks(
        f"import os, time\nwhile rank == 0 and not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "allreduce(1)\nallreduce(rank, op=Sum)"
    )
    cell.wait_for("rank 0 is at In[")
    with stopped(pid):
        go.touch()
        cell.wait_for("rank 2 does not answer: it waits in allreduce(Average) at In[")
    assert cell.wait().status == "ok"
    assert "ranks 0–3 → 6" in cell.text
