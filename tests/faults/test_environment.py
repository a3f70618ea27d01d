"""A machine on which something is missing or forbidden is told so, or is good enough."""

import shutil
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

import allranks
from allranks.errors import ClusterLost
from tests.faults.notebook import Notebook
from tests.kernel import WARNINGS_AS_ERRORS


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """One kernel for the tests that change its environment between two starts of ranks."""
    with Notebook(tmp_path_factory.mktemp("opened")) as shared:
        yield shared


@pytest.fixture
def idle(opened):
    """That kernel without ranks; its environment, folder and Python are restored after the test."""
    opened.run("import os, sys; before = dict(os.environ), os.getcwd(), sys.executable")
    yield opened
    opened.run(
        "os.environ.clear(); os.environ.update(before[0])\n"
        "os.chdir(before[1]); sys.executable = before[2]"
    )
    assert opened.run("%distributed stop").status == "ok"


def environ(notebook, **values):
    """Changes the environment of a kernel; a value of None removes the name."""
    added = {name: value for name, value in values.items() if value is not None}
    cell = notebook.run(
        f"for name in {list(values)}: os.environ.pop(name, None)\nos.environ.update({added})"
    )
    assert cell.status == "ok", cell.text


def test_a_missing_mpiexec_is_named_with_what_to_type(idle):
    notebook = idle
    environ(notebook, ALLRANKS_MPIEXEC="/nowhere/mpiexec")
    cell = notebook.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "MissingDependency")
    assert "found '/nowhere/mpiexec', which cannot be run" in cell.error_value
    assert "unset ALLRANKS_MPIEXEC" in cell.error_value
    assert "Traceback" not in cell.text
    notebook.check_nothing_left()
    environ(notebook, ALLRANKS_MPIEXEC=None)
    notebook.on_ranks(
        "import os, tempfile, time\n"
        "folder = tempfile.mkdtemp()\nos.chdir(folder); os.rmdir(folder)",
        "-n 2",
    )
    a_rank_whose_folder_is_gone_may_wait_for_others(notebook)


def a_rank_whose_folder_is_gone_may_wait_for_others(notebook):
    cell = notebook.on_ranks("if rank:\n    time.sleep(0.5)\nallreduce(1, op=Sum)")
    assert cell.text == "ranks 0–1 → 2\n"
    cell = notebook.on_ranks("if rank:\n    raise ValueError('mine')\nbarrier()")
    assert "rank 1 of 2 at line 3: ValueError: mine" in cell.error_value
    assert "rank 0 was waiting at line 4: barrier()" in cell.text


def test_an_mpiexec_that_fails_is_quoted_and_nothing_is_left(idle):
    notebook = idle
    environ(notebook, ALLRANKS_MPIEXEC="/bin/false")
    cell = notebook.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "StartFailed")
    assert "expected 2 ranks, found 0" in cell.error_value
    assert "The launcher ended with exit code 1" in cell.error_value
    notebook.wait_for_no_children()
    assert notebook.files_left() == []


@pytest.mark.parametrize("home", ["/proc/home", "/dev/null/home"])
def test_a_home_that_cannot_be_written_keeps_the_logs_elsewhere(idle, home):
    notebook = idle
    environ(notebook, HOME=home, XDG_STATE_HOME=None)
    cell = notebook.on_ranks("rank", "-n 2")
    assert cell.status == "ok"
    assert cell.text.endswith("rank 0 → 0\nrank 1 → 1\n")
    status = notebook.run("%distributed status").text
    assert f"logs in {notebook.temporary}/allranks-logs-" in status
    notebook.run("%distributed stop")
    notebook.wait_for_no_children()
    assert {path.suffix for path in notebook.temporary.rglob("*.*")} == {".log"}
    for folder in notebook.temporary.glob("allranks-logs-*"):
        shutil.rmtree(folder)


def test_a_temporary_folder_with_a_long_name_is_good_enough(new_notebook, tmp_path):
    long = tmp_path / ("a" * 60) / ("b b" * 20)
    long.mkdir(parents=True)
    notebook = new_notebook(env={"TMPDIR": str(long)})
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text
    notebook.shutdown()
    notebook.wait_for_no_children()
    assert list(long.iterdir()) == []


def test_inside_a_job_of_a_scheduler_the_ranks_are_on_this_machine(idle, tmp_path):
    """The variables of all schedulers at once, of a job on a node that cannot be reached from here.

    The launcher takes the nodes of whichever scheduler it recognises.
    """
    nodes = tmp_path / "nodes"
    nodes.write_text("node1\n")
    slurm = {"JOB_ID": "7", "JOBID": "7", "NODELIST": "node1", "TASKS_PER_NODE": "4", "NNODES": "1"}
    slurm |= {"PROCID": "0", "LOCALID": "0", "NTASKS_PER_NODE": "1"}
    jobs = {f"SLURM_{name}": value for name, value in slurm.items()}
    jobs |= {"PBS_JOBID": "7", "PBS_NODEFILE": str(nodes), "PBS_ENVIRONMENT": "PBS_BATCH"}
    jobs |= {"LSB_JOBID": "7", "LSB_HOSTS": "node1", "LSB_MCPU_HOSTS": "node1 4"}
    jobs |= {"JOB_ID": "7", "PE_HOSTFILE": str(nodes), "SGE_ROOT": str(tmp_path), "ARC": "lx"}
    environ(idle, **jobs)
    assert "ranks 0–1 → (2, 0)\n" in idle.on_ranks("size, rank // 2", "-n 2").text


def open_ports(notebook):
    """The families and ports on which processes of a notebook listen beyond loopback."""
    return {
        (link.family, link.laddr.port)
        for process in notebook.children()
        for link in _links(process)
        if link.status == psutil.CONN_LISTEN and not link.laddr.ip.startswith("127.")
    }


def _links(process):
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []  # it was a short one


def check_closed(addresses, ports):
    """Tries each port with its own family: in the other one its number may be another process's."""
    for family, port in ports:
        for address in addresses.get(family, ()):
            with pytest.raises(OSError, match=r"timed out|refused"):
                socket.create_connection((address, port), timeout=0.3).close()


def test_nobody_can_connect_before_a_rank_has_died_and_then_nobody_from_the_network(notebook):
    ports = open_ports(notebook)
    assert len(ports) > len(notebook.pids())  # the ranks', and the launcher's
    check_closed({socket.AF_INET: ["127.0.0.1"], socket.AF_INET6: ["::1"]}, ports)
    died = notebook.on_ranks("import os\nif rank == 1: os._exit(5)\nbarrier()")
    assert "rank 1 was replaced" in died.text
    own = defaultdict(list)
    for each in psutil.net_if_addrs().values():
        for found in each:
            if found.address not in ("127.0.0.1", "::1"):
                own[found.family].append(found.address)
    if not own[socket.AF_INET]:
        pytest.skip("this machine has no address but the loopback's")
    check_closed(own, open_ports(notebook))


_SMALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, REC, PRIVATE = 0x20000, 0x4000, 1 << 18
small = (
    libc.unshare(NEWNS) == 0
    and libc.mount(b"none", b"/", None, REC | PRIVATE, None) == 0
    and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
)
"""


def test_little_shared_memory_is_enough(new_notebook):
    """What a container has by default, or less."""
    notebook = new_notebook()
    notebook.run(_SMALL)
    if notebook.value("small") != "True":
        pytest.skip("this user may not mount a /dev/shm of 64 KiB")
    big = "import numpy as np\nint(allreduce(np.ones(500_000), Sum)[-1])"
    cell = notebook.on_ranks(f"{big}, comm.allreduce(1)", "-n 2")
    assert "ranks 0–1 → (2, 2)\n" in cell.text, cell.text
    notebook.shutdown()
    notebook.check_nothing_left()


def test_files_of_the_notebook_do_not_shadow_the_standard_library(new_notebook):
    notebook = new_notebook()
    for name in ("json", "socket", "random", "numpy"):
        (notebook.cwd / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    (notebook.cwd / "mine.py").write_text("value = 42\n")
    cell = notebook.on_ranks("import mine\nmine.value", "-n 2")
    assert "ranks 0–1 → 42\n" in cell.text


def test_a_folder_that_is_gone_is_named(idle):
    notebook = idle
    notebook.run("os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone')")
    cell = notebook.on_ranks("rank", "-n 2")
    assert cell.status == "error"
    assert "No such file or directory" in cell.error_value
    notebook.run(f"os.chdir({str(notebook.cwd)!r})")
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text


@pytest.mark.parametrize(
    "env",
    [
        {"HOME": None, "XDG_STATE_HOME": None}
        | {"MPI4PY_RC_INITIALIZE": "0", "MPI4PY_RC_FINALIZE": "0", "MPI4PY_RC_ERRORS": "abort"},
        {"MPI4PY_RC_THREADS": "0", "MPI4PY_RC_RECV_MPROBE": "0", "MPI4PY_RC_FAST_REDUCE": "0"},
    ],
    ids=["no home, and mpi4py without initialising", "mpi4py without threads"],
)
def test_an_environment_that_others_stumble_over_is_good_enough(idle, env):
    environ(idle, **env)
    cell = idle.on_ranks("allreduce(1, op=Sum), comm.allreduce(1)", "-n 2")
    assert cell.status == "ok", cell.text
    assert "ranks 0–1 → (2, 2)\n" in cell.text


def test_warnings_are_errors_in_cells_and_not_in_what_ranks_run_on(new_notebook):
    notebook = new_notebook(env={"PYTHONWARNINGS": WARNINGS_AS_ERRORS})
    cell = notebook.on_ranks("import warnings\nwarnings.warn('mine')", "-n 2")
    assert cell.error_value == "ranks 0–1 of 2 at line 3: UserWarning: mine"
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("comm.allreduce(1)").text


def test_a_deprecation_in_a_cell_is_shown(notebook):
    cell = notebook.on_ranks("import warnings\nwarnings.warn('old', DeprecationWarning)")
    assert "DeprecationWarning: old" in cell.text


def test_a_python_that_the_user_may_not_run_is_named(idle, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\n")  # without the right to execute it
    idle.run(f"sys.executable = {str(tmp_path / 'python')!r}")
    cell = idle.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "StartFailed")
    assert f"expected to start {tmp_path}/python for the ranks" in cell.error_value
    assert "a Python that this user may run" in cell.error_value


_HOLDS_ONE_BACK = """#!/bin/sh
# An mpiexec whose second rank is late: mpiexec -n 2 python …
shift 2
exec {mpiexec} -n 1 "$@" : -n 1 sh -c 'while [ ! -e {go} ]; do sleep 0.1; done; exec "$@"' - "$@"
"""


def test_no_rank_begins_with_mpi_before_all_are_there(new_notebook, tmp_path):
    """It would keep a core busy with looking for those that still have to be started."""
    beside, go = Path(sys.executable).parent, tmp_path / "go"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mpiexec"
    program.write_text(_HOLDS_ONE_BACK.format(mpiexec=beside / "mpiexec", go=go))
    program.chmod(0o755)
    # By its neighbour the launcher's kind is known.
    (program.parent / "prterun").symlink_to(beside / "prterun")
    library = {"MPI4PY_LIBMPI": str(beside.parent / "lib" / "libmpi.so.40")}
    notebook = new_notebook(env={"ALLRANKS_MPIEXEC": str(program), **library})
    cell = notebook.start_on_ranks("rank, size", "-n 2")
    while "rank-0.log" not in notebook.logs():
        time.sleep(0.1)
    time.sleep(1)
    begun = [pid for pid in (child.pid for child in notebook.children()) if "libmpi." in _maps(pid)]
    go.touch()
    assert begun == []
    assert "rank 1 → (1, 2)\n" in cell.wait(60).text


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""  # the shell's sleep has ended


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "OMPI_MCA_coll"])
def test_settings_of_ones_own_leave_no_way_to_new_ranks_and_all_are_fresh(monkeypatch, name):
    monkeypatch.setenv(name, {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_coll": "^tuned"}[name])
    with allranks.Cluster(2) as cluster, pytest.raises(ClusterLost, match="ended with exit code 5"):
        cluster.run("import os\nif rank: os._exit(5)\nbarrier()")
