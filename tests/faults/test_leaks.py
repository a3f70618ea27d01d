"""However a notebook's kernel ends, every process of its ranks is gone, and every file but logs."""

import gzip
import shutil
import uuid
import zipfile
from pathlib import Path

import pytest

#: How a kernel ends, and what its ranks do then. An idle one is shut down at the end of this suite.
ENDS = {
    "killed while idle": ("kill9", None),
    "killed in a collective": ("kill9", "print('here')\nwhile True:\n    allreduce(1)"),
    # Rank 1 waits; rank 0 has child processes, and no signal but one ends it.
    "killed while ranks wait and ignore signals": (
        "kill9",
        "import signal, subprocess, numpy as np\nif rank: print('here'); allreduce(np.ones(3))\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nprint('here')\n!sleep 60",
    ),
    "restarted in a collective": ("restart", "print('here')\nwhile True:\n    allreduce(1)"),
    "shut down in a collective": ("shutdown", "print('here')\nwhile True:\n    allreduce(1)"),
}


@pytest.fixture
def kernel(own_notebook):
    if not own_notebook.is_alive:
        own_notebook.reopen()
    own_notebook.run("%load_ext allranks")
    yield own_notebook
    if own_notebook.is_alive:
        own_notebook.run("%load_ext allranks")
        assert own_notebook.run("%distributed stop").status == "ok"


@pytest.fixture
def notebook(kernel):
    cell = kernel.on_ranks(
        "import numpy as np\nkeep(kept=rank)\nfloat(allreduce(np.ones(9), op=Sum)[0])", "-n 2"
    )
    assert cell.text.endswith("ranks 0–1 → 2.0\n")
    assert kernel.note_files()
    return kernel


@pytest.mark.parametrize(("end", "source"), ENDS.values(), ids=ENDS.keys())
def test_a_kernel_that_ends_leaves_nothing_but_logs(notebook, end, source):
    folders = notebook.kept_folders()
    assert folders
    if source is not None:
        notebook.start_on_ranks(source).wait_for("ranks 0–1 │ here")
        notebook.drain(0.3)
    assert len(notebook.children()) > 3
    getattr(notebook, end)()
    notebook.check_nothing_left()
    assert [folder for folder in folders if folder.exists()] == []
    assert notebook.logs()["rank-0.log"].exists()


RENAMES = """
import mmap, os, time
path = "/dev/shm/allranks-test-%s-0"
with open(path, "x+b") as file:
    file.truncate(mmap.PAGESIZE)
    mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
print("here")
while True:
    path, before = f"{path.rpartition('-')[0]}-{time.monotonic_ns()}", path
    os.rename(before, path)
"""


def test_a_file_of_a_rank_that_has_a_new_name_when_the_rank_is_killed_is_removed(notebook):
    """As a file that MPI makes in its start, while the ranks are ended."""
    mark = uuid.uuid4().hex
    notebook.start_on_ranks(RENAMES % mark, "-r 0").wait_for("rank 0 │ here")
    notebook.kill9()
    notebook.check_nothing_left()
    assert [*Path("/dev/shm").glob(f"allranks-test-{mark}-*")] == []


UNWRITTEN = """
import atexit, gzip, os, pathlib, tempfile, zipfile
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
text = open(f"text-{rank}", "w"); text.write("kept")
packed = gzip.open(f"packed-{rank}", "wt"); packed.write("kept")
archive = zipfile.ZipFile(f"archive-{rank}", "w"); archive.open("name", "w").write(b"kept")
both = open(f"both-{rank}", "w+b"); both.write(b"kept")
folder = tempfile.TemporaryDirectory(dir=".", prefix="gone-")
atexit.register(print, "the last word", file=open(f"said-{rank}", "w"))
if rank == 0: atexit.register(lambda: __import__("time").sleep(60))
"""


@pytest.mark.parametrize("end", ["stop", "restart", "shutdown"])
def test_ranks_that_end_write_their_files_and_call_their_own_exit_functions(
    notebook, tmp_path, end
):
    module = notebook.cwd / "parents.py"
    module.write_text(
        "import atexit, os\n"
        f"atexit.register(lambda: open(f'{tmp_path}/parents-{{os.getpid()}}', 'w').close())"
    )
    notebook.run("%distributed restart --preload parents").ok()
    module.unlink()
    shutil.rmtree(module.with_name("__pycache__"), ignore_errors=True)
    # The exit functions of rank 0 do not end: it ends without the rest, and writes its files.
    notebook.on_ranks(f"import os\nos.chdir('{tmp_path}')\n{UNWRITTEN}").ok()
    notebook.run(f"%distributed {end}") if end != "shutdown" else notebook.shutdown()
    if end == "restart":
        notebook.run("%distributed stop")
    notebook.wait_for_no_children()
    for rank in range(2):
        for name in ("text", "both"):
            assert (tmp_path / f"{name}-{rank}").read_text() == "kept"
        assert gzip.decompress((tmp_path / f"packed-{rank}").read_bytes()) == b"kept"
        with zipfile.ZipFile(tmp_path / f"archive-{rank}") as archive:
            assert archive.read("name") == b"kept"
    assert (tmp_path / "said-1").read_text() == "the last word\n"
    assert len([*tmp_path.glob("gone-*")]) == 1
    ended = {f"parents-{(tmp_path / f'pid-{rank}').read_text()}" for rank in range(2)}
    assert not ended & {path.name for path in tmp_path.glob("parents-*")}


def test_a_start_that_is_interrupted_or_whose_kernel_is_killed_leaves_nothing(kernel):
    def start():
        cell = kernel.start_on_ranks("rank", "-n 3")
        kernel.pump(lambda: len(kernel.children()) > 3, 60, "the launcher")
        return cell

    cell = start()
    kernel.interrupt()
    assert cell.wait().fails("KeyboardInterrupt").text == (
        "KeyboardInterrupt: the cell was interrupted before the ranks began it. "
        "No ranks are running; the next cell starts them.\n"
    )
    kernel.check_nothing_left()
    assert kernel.on_ranks("size", "-n 3").text.endswith("ranks 0–2 → 3\n")
    kernel.run("%distributed stop")
    kernel.wait_for_no_children()
    start()
    kernel.note_files()
    kernel.kill9()
    kernel.check_nothing_left()


def test_unloading_the_extension_leaves_nothing_but_logs_and_other_cells_as_they_were(notebook):
    assert notebook.run("ranks.stop(); ranks.stop(); ranks").text == "<ranks, not started yet>\n"
    notebook.on_ranks("rank", "-n 1")
    notebook.run("%unload_ext allranks")
    notebook.check_nothing_left()
    assert notebook.run("print(get_ipython().input_transformers_post)").stdout == "[]\n"
    assert "not found" in notebook.on_ranks("rank").error_value


DROPPED = {
    "in the main thread": "gc.collect()",
    "in another thread": "import threading\nthread = threading.Thread(target=gc.collect)\n"
    "thread.start()\nthread.join()",
}


@pytest.mark.parametrize("collect", DROPPED.values(), ids=DROPPED.keys())
def test_a_cluster_that_nobody_holds_any_longer_leaves_nothing_but_logs(kernel, collect):
    kernel.run(
        "import allranks, gc\ncluster = allranks.Cluster(n=2).start()\n"
        "cluster.run('import numpy as np; allreduce(np.ones(9))')\ncluster.client().ids\n"
        "try:\n    cluster.run('1 / 0')\nexcept allranks.errors.CellFailed:\n    pass"
    ).ok()
    assert kernel.note_files()
    kernel.run(f"gc.disable()\ndel cluster\n{collect}\ngc.enable()").ok()
    kernel.check_nothing_left()
    cell = kernel.run(
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


@pytest.mark.parametrize("end", ["stop", "kill9"])
def test_processes_and_clusters_that_a_rank_has_started_leave_nothing_but_logs(notebook, end):
    notebook.on_ranks(SPAWNED, "-r 0", timeout=120).says("[[1], [1]] [2]", "its ranks: [0, 1]")
    notebook.note_files()
    if end == "stop":
        assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"
    else:
        notebook.kill9()
    notebook.check_nothing_left()
