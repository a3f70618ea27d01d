"""However a notebook's kernel ends, every process of its ranks is gone, and every file but logs."""

import pytest

from tests.faults.notebook import Notebook

COLLECTIVE = "import numpy as np\nprint('here')\nwhile True:\n    allreduce(np.ones(9))"
BUSY = {
    "idle": None,
    "in a collective": COLLECTIVE,
    # Rank 1 waits; rank 0 has child processes, and no signal but one ends it.
    "waiting and ignoring signals": (
        "import signal, subprocess, numpy as np\nprint('here')\nif rank: allreduce(np.ones(3))\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nprint('ignores')\n!sleep 60"
    ),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """One kernel for all tests, which end it and start it again."""
    with Notebook(tmp_path_factory.mktemp("leaks")) as shared:
        yield shared


@pytest.fixture
def kernel(opened):
    if not opened.is_alive:
        opened.reopen()
    opened.run("%load_ext allranks")
    yield opened
    if opened.is_alive:
        opened.run("%load_ext allranks")
        assert opened.run("%distributed stop").status == "ok"


@pytest.fixture
def notebook(kernel):
    cell = kernel.on_ranks(
        "import numpy as np\nkeep(kept=rank)\nfloat(allreduce(np.ones(9), op=Sum)[0])", "-n 2"
    )
    assert cell.text.endswith("ranks 0–1 → 2.0\n")
    assert kernel.note_files()
    return kernel


def begin(notebook, source):
    if source is not None:
        last = "ignores" if "ignores" in source else "here"
        notebook.start_on_ranks(source).wait_for(last)
        notebook.drain(0.3)
    assert len(notebook.children()) > 3


@pytest.mark.parametrize("source", BUSY.values(), ids=BUSY.keys())
def test_a_kernel_killed_with_9_leaves_nothing_but_logs(notebook, source):
    folders = notebook.kept_folders()
    assert folders
    begin(notebook, source)
    notebook.kill9()
    notebook.check_nothing_left()
    assert [folder for folder in folders if folder.exists()] == []
    assert notebook.logs()["rank-0.log"].exists()


# An idle one is shut down at the end of this suite.
def test_a_kernel_that_is_shut_down_leaves_nothing_but_logs(notebook):
    begin(notebook, COLLECTIVE)
    notebook.shutdown()
    notebook.check_nothing_left()
    assert notebook.logs()["rank-0.log"].exists()


def test_a_kernel_that_is_restarted_leaves_nothing_and_starts_anew(notebook):
    for source in (None, COLLECTIVE):
        begin(notebook, source)
        notebook.restart()
        notebook.check_nothing_left()
        notebook.run("%load_ext allranks")
        assert notebook.on_ranks("size", "-n 2").text.endswith("ranks 0–1 → 2\n")
        assert notebook.note_files()


def test_a_start_that_is_interrupted_or_whose_kernel_is_killed_leaves_nothing(kernel):
    notebook = kernel
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


def test_a_cluster_that_nobody_holds_any_longer_leaves_nothing_but_logs(kernel):
    notebook = kernel
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


SPAWNED = (
    "import multiprocessing\nfrom multiprocessing import shared_memory\n"
    "spawn = multiprocessing.get_context('spawn')\nmanager = spawn.Manager()\n"
    "fork = multiprocessing.get_context('forkserver')\n"
    "pools = spawn.Pool(1), fork.Pool(1)\n"
    "print([pool.map(abs, [-1]) for pool in pools], manager.list([2]))\n"
    "kept = shared_memory.SharedMemory(create=True, size=1000)\n"
    "import allranks\n"
    "own = allranks.Cluster(n=2).start()\n"
    "own.run('import numpy as np; allreduce(np.ones(9))')\n"
    "print('its ranks:', own.run('rank'))"
)


@pytest.mark.parametrize("end", ["stop", "shutdown", "kill9"])
def test_processes_and_clusters_that_a_rank_has_started_leave_nothing_but_logs(notebook, end):
    cell = notebook.on_ranks(SPAWNED, "-r 0", timeout=120)
    assert "[[1], [1]] [2]" in cell.text
    assert "its ranks: [0, 1]" in cell.text, cell.text
    notebook.note_files()
    if end == "stop":
        assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"
    else:
        getattr(notebook, end)()
    notebook.check_nothing_left()
