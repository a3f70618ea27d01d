"""However a notebook's kernel ends, every process of its ranks is gone, and every file but logs."""

import pytest

BUSY = {
    "idle": None,
    "in a collective": "import numpy as np\nprint('here')\nwhile True:\n    allreduce(np.ones(9))",
    "waiting in a collective": (
        "import time, numpy as np\nprint('here')\n"
        "time.sleep(60) if rank == 0 else allreduce(np.ones(3))"
    ),
    "with child processes": (
        "import subprocess\nprint('here')\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n!sleep 60"
    ),
    "ignoring signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "print('here')\ntime.sleep(60)"
    ),
}


@pytest.fixture
def notebook(new_notebook):
    notebook = new_notebook()
    cell = notebook.on_ranks("import numpy as np\nfloat(allreduce(np.ones(9), op=Sum)[0])", "-n 2")
    assert cell.text.endswith("ranks 0–1 → 2.0\n")
    assert notebook.note_files()
    return notebook


def begin(notebook, source):
    if source is not None:
        notebook.start_on_ranks(source).wait_for("here")
        notebook.drain(0.3)
    assert len(notebook.children()) > 3


@pytest.mark.parametrize("source", BUSY.values(), ids=BUSY.keys())
def test_a_kernel_killed_with_9_leaves_nothing_but_logs(notebook, source):
    begin(notebook, source)
    notebook.kill9()
    notebook.check_nothing_left()
    assert notebook.logs()["rank-0.log"].exists()


@pytest.mark.parametrize("source", [BUSY["idle"], BUSY["in a collective"]], ids=["idle", "busy"])
def test_a_kernel_that_is_shut_down_leaves_nothing_but_logs(notebook, source):
    begin(notebook, source)
    notebook.shutdown()
    notebook.check_nothing_left()
    assert notebook.logs()["rank-0.log"].exists()


def test_a_kernel_that_is_restarted_leaves_nothing_and_starts_anew(notebook):
    for source in (BUSY["idle"], BUSY["in a collective"]):
        begin(notebook, source)
        notebook.restart()
        notebook.check_nothing_left()
        notebook.run("%load_ext allranks")
        assert notebook.on_ranks("size", "-n 2").text.endswith("ranks 0–1 → 2\n")
        assert notebook.note_files()


def test_a_start_that_is_interrupted_or_whose_kernel_is_killed_leaves_nothing(new_notebook):
    notebook = new_notebook()
    cell = notebook.start_on_ranks("rank", "-n 3")
    notebook.pump(lambda: len(notebook.children()) > 3, 30, "the launcher")
    notebook.interrupt()
    assert cell.wait(30).status == "error"
    assert cell.error_name == "KeyboardInterrupt"
    assert cell.text == (
        "KeyboardInterrupt: the cell was interrupted before the ranks began it. "
        "No ranks are running; the next cell starts them.\n"
    )
    notebook.check_nothing_left()
    assert notebook.on_ranks("size", "-n 3").text.endswith("ranks 0–2 → 3\n")
    notebook.run("%distributed stop")
    notebook.wait_for_no_children()
    notebook.start_on_ranks("rank", "-n 3")
    notebook.pump(lambda: len(notebook.children()) > 3, 30, "the launcher")
    notebook.note_files()
    notebook.kill9()
    notebook.check_nothing_left()


def test_stop_and_unloading_the_extension_leave_nothing_but_logs(notebook):
    assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"
    notebook.check_nothing_left()
    assert notebook.on_ranks("size", "-n 2").text.endswith("ranks 0–1 → 2\n")
    assert notebook.note_files()
    notebook.run("%unload_ext allranks")
    notebook.check_nothing_left()
    assert "not found" in notebook.on_ranks("rank").error_value


DROPPED = {
    "in the main thread": "gc.collect()",
    "in another thread": "import threading\nthread = threading.Thread(target=gc.collect)\n"
    "thread.start()\nthread.join()",
}


def test_a_cluster_that_nobody_holds_any_longer_leaves_nothing_but_logs(new_notebook):
    notebook = new_notebook()
    for collect in DROPPED.values():
        dropped(notebook, collect)


def dropped(notebook, collect):
    cell = notebook.run(
        "import allranks, gc\ncluster = allranks.Cluster(n=2).start()\n"
        "cluster.run('import numpy as np; allreduce(np.ones(9))')\ncluster.client().ids\n"
        "try:\n    cluster.run('1 / 0')\nexcept allranks.errors.CellFailed:\n    pass"
    )
    assert cell.status == "ok", cell.text
    assert notebook.note_files()
    cell = notebook.run(f"gc.disable()\ndel cluster\n{collect}\ngc.enable()")
    assert cell.status == "ok", cell.text
    notebook.check_nothing_left()
    cell = notebook.run(
        "import threading\n"
        "own = [one for one in threading.enumerate() if one.name.startswith('allranks')]\n"
        "for thread in own: thread.join(10)\n"
        "print([thread for thread in own if thread.is_alive()])"
    )
    assert cell.stdout == "[]\n", cell.text


def test_processes_that_a_rank_has_spawned_leave_no_files(notebook):
    cell = notebook.on_ranks(
        "import multiprocessing\nfrom multiprocessing import shared_memory\n"
        "spawn = multiprocessing.get_context('spawn')\nmanager = spawn.Manager()\n"
        "fork = multiprocessing.get_context('forkserver')\n"
        "pools = spawn.Pool(1), fork.Pool(1)\n"
        "print([pool.map(abs, [-1]) for pool in pools], manager.list([2]))\n"
        "kept = shared_memory.SharedMemory(create=True, size=1000)",
        "-r 0",
    )
    assert "[[1], [1]] [2]" in cell.text
    notebook.note_files()
    notebook.shutdown()
    notebook.check_nothing_left()


STARTED_BY_A_RANK = (
    "import allranks\n"
    "own = allranks.Cluster(n=2).start()\n"
    "own.run('import numpy as np; allreduce(np.ones(9))')\n"
    "print('its ranks:', own.run('rank'))"
)


def end_by_stop(notebook):
    assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"


@pytest.mark.parametrize("end", ["stop", "shutdown", "kill9"])
def test_clusters_that_ranks_have_started_leave_nothing_but_logs(notebook, end):
    cell = notebook.on_ranks(STARTED_BY_A_RANK, "-r 0", timeout=120)
    assert "its ranks: [0, 1]" in cell.text, cell.text
    notebook.note_files()
    if end == "stop":
        end_by_stop(notebook)
    else:
        getattr(notebook, end)()
    notebook.check_nothing_left()
