"""A machine on which something is missing or forbidden is told so, or is good enough."""

import os
import shutil
import socket
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.kernel import WARNINGS_AS_ERRORS, wait_until


@pytest.fixture
def idle(own_notebook):
    """That kernel without ranks; its environment, folder and Python are restored after the test."""
    own_notebook.run("import os, sys; before = dict(os.environ), os.getcwd(), sys.executable")
    yield own_notebook
    own_notebook.run(
        "os.environ.clear(); os.environ.update(before[0])\n"
        "os.chdir(before[1]); sys.executable = before[2]"
    )
    assert own_notebook.run("%distributed stop").status == "ok"


WORK = "size, rank // 2, allreduce(1, op=Sum), comm.allreduce(1)"
WORKED = "ranks 0–1 → (2, 0, 2, 2)\n"


def environ(notebook, **values):
    """Changes the environment of a kernel; a value of None removes the name."""
    added = {name: value for name, value in values.items() if value is not None}
    notebook.run(
        f"for name in {list(values)}: os.environ.pop(name, None)\nos.environ.update({added})"
    ).ok()


def test_what_ranks_cannot_start_with_is_named_with_what_to_type(idle, tmp_path):
    environ(idle, ALLRANKS_MPIEXEC="/nowhere/mpiexec")
    idle.on_ranks("rank", "-n 2").fails(
        "MissingDependency",
        "found '/nowhere/mpiexec', which cannot be run",
        "unset ALLRANKS_MPIEXEC",
    ).lacks("Traceback")
    environ(idle, ALLRANKS_MPIEXEC="/bin/false")
    idle.on_ranks("rank", "-n 2").fails(
        "StartFailed", "expected 2 ranks, found 0", "The launcher ended with exit code 1"
    )
    environ(idle, ALLRANKS_MPIEXEC=None)
    (tmp_path / "python").write_text("#!/bin/sh\n")  # without the right to execute it
    idle.run(f"sys.executable = {str(tmp_path / 'python')!r}")
    idle.on_ranks("rank", "-n 2").fails(
        "StartFailed",
        f"expected to start {tmp_path}/python for the ranks",
        "a Python that this user may run",
    )
    idle.run("sys.executable = before[2]")
    idle.run("os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone')")
    assert "No such file or directory" in idle.on_ranks("rank", "-n 2").error_value
    idle.run("os.chdir(before[1])")
    idle.run(
        "import resource\nlimits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "few = len(os.listdir('/dev/fd')) + 9\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))"
    )
    idle.on_ranks("rank", "-n 2").fails("UsageError", "open files or more, found", "ulimit -n 4096")
    idle.run("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    idle.check_nothing_left()


def test_a_rank_whose_folder_is_gone_may_wait_for_others(idle):
    idle.on_ranks(
        "import os, tempfile, time\n"
        "folder = tempfile.mkdtemp()\nos.chdir(folder); os.rmdir(folder)",
        "-n 2",
    )
    cell = idle.on_ranks("if rank:\n    time.sleep(0.5)\nallreduce(1, op=Sum)")
    assert cell.text == "ranks 0–1 → 2\n"
    idle.on_ranks("if rank:\n    raise ValueError('mine')\nbarrier()").fails(
        "CellFailed", "rank 1 of 2 at line 3: ValueError: mine"
    ).says("rank 0 was waiting at line 4: barrier()")


@pytest.mark.parametrize("home", ["/proc/home", "/proc", "a file"])
def test_without_a_home_that_can_be_written_only_logs_stay_in_the_temporary_folder(
    idle, home, tmp_path
):
    if home == "a file":  # not a read-only folder: root may write in any
        home = str(tmp_path / "home")
        Path(home).touch()
    environ(idle, HOME=home, XDG_STATE_HOME=None, IPYTHONDIR=None)
    environ(idle, **_mpi4py({"THREADS": "0", "RECV_MPROBE": "0", "FAST_REDUCE": "0"}))
    assert idle.on_ranks(WORK, "-n 2").text.endswith(WORKED)
    assert idle.on_ranks("%store").status == "ok"
    idle.run("%distributed status").says(f"logs in {idle.temporary}/allranks-logs-")
    idle.run("%distributed stop")
    idle.wait_for_no_children()
    files = [path for path in idle.temporary.rglob("*") if not path.is_dir()]
    assert {path.suffix for path in files} == {".log"}
    (logs,) = idle.temporary.iterdir()
    shutil.rmtree(logs)


def test_ranks_use_the_profile_of_a_home_below_the_temporary_folder(idle):
    home = idle.temporary / "home"
    home.mkdir()
    environ(idle, HOME=str(home), IPYTHONDIR=None)
    idle.on_ranks("stored = 5\nif rank == 0:\n    %store stored", "-n 2").ok()
    idle.run("%distributed stop")
    idle.on_ranks("%store -r stored\nstored", "-n 2").says("ranks 0–1 → 5\n")
    assert not list(idle.temporary.glob("tmp*"))
    idle.run("%distributed stop")
    shutil.rmtree(home)


def test_a_long_temporary_folder_warnings_as_errors_and_little_shared_memory_are_good_enough(
    new_notebook, tmp_path
):
    """A container has 64 MiB of shared memory by default, or less."""
    long = tmp_path / ("a" * 60) / ("b b" * 20)
    long.mkdir(parents=True)
    notebook = new_notebook({"TMPDIR": str(long), "PYTHONWARNINGS": WARNINGS_AS_ERRORS})
    notebook.run(_SMALL)
    small = notebook.value("small")
    cell = notebook.on_ranks("import warnings\nwarnings.warn('mine')", "-n 2")
    assert cell.error_value == "ranks 0–1 of 2 at line 3: UserWarning: mine"
    big = "import numpy as np\nint(allreduce(np.ones(500_000), Sum)[-1])"
    notebook.on_ranks(f"{big}, comm.allreduce(1)").says("ranks 0–1 → (2, 2)\n")
    notebook.shutdown()
    notebook.check_nothing_left()
    assert list(long.iterdir()) == []
    if small != "True":
        pytest.skip("this user may not mount a /dev/shm of 64 KiB")


def test_mpi_shares_memory_by_files_where_no_other_account_can_make_them_first(new_notebook):
    """Open MPI opens a file that is there already, and its names can be guessed."""
    notebook = new_notebook({})
    notebook.on_ranks("comm.allreduce(1)", "-n 2").says("ranks 0–1 → 2\n")
    files = [Path("/dev/shm", name) for name in notebook.note_files() if "sm_segment" in name]
    if not files:
        pytest.skip("this MPI has no files in shared memory")
    (folder,) = {file.parent for file in files}
    assert folder != Path("/dev/shm")
    assert folder.stat().st_mode & 0o7777 == 0o700
    notebook.shutdown()
    notebook.check_nothing_left()
    assert not folder.exists()


def test_an_environment_that_others_stumble_over_is_good_enough(idle, tmp_path):
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
    mpi4py = {"INITIALIZE": "0", "FINALIZE": "0", "ERRORS": "abort"}
    environ(idle, HOME=None, XDG_STATE_HOME=None, **jobs, **_mpi4py(mpi4py))
    idle.on_ranks(WORK, "-n 2").says(WORKED)


def _mpi4py(settings):
    return {f"MPI4PY_RC_{name}": value for name, value in settings.items()}


def open_ports(notebook):
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

    def check(place):
        with pytest.raises(OSError, match=r"timed out|refused"):
            socket.create_connection(place, timeout=0.3).close()

    places = [(one, port) for family, port in ports for one in addresses.get(family, ())]
    with ThreadPoolExecutor(16) as pool:
        [*pool.map(check, places)]


@pytest.mark.replaces
def test_nobody_can_connect_before_a_rank_has_died_and_then_nobody_from_the_network(notebook):
    assert notebook.run("%distributed restart").status == "ok"
    ports = open_ports(notebook)
    assert len(ports) > len(notebook.pids())  # the ranks', and the launcher's
    check_closed({socket.AF_INET: ["127.0.0.1"], socket.AF_INET6: ["::1"]}, ports)
    notebook.on_ranks("import os\nif rank == 1: os._exit(5)\nbarrier()").says("rank 1 was replaced")
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


THREADS = """
import numpy as np
from threadpoolctl import threadpool_info
print({pool["num_threads"] for pool in threadpool_info()})
"""


def test_numpy_has_one_ranks_share_of_the_cores_and_files_here_shadow_no_library(idle, tmp_path):
    for name in ("json", "socket", "random", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    (tmp_path / "mine.py").write_text("value = 42\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "below.py").write_text("value = 43\n")
    idle.run(f"os.chdir({str(tmp_path)!r})")
    # It names the current folder, too, and before the standard library.
    environ(idle, OMP_NUM_THREADS=None, PYTHONPATH=f"{os.pathsep}lib")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // 4)
    assert idle.on_ranks(THREADS, "-n 4").text.endswith(f"ranks 0–3 │ {{{share}}}\n")
    assert idle.on_ranks("import mine\nmine.value").text == "ranks 0–3 → 42\n"
    assert idle.on_ranks("import below\nbelow.value").text == "ranks 0–3 → 43\n"
    environ(idle, PYTHONPATH=os.environ.get("PYTHONPATH"))


_HOLDS_ONE_BACK = """#!/bin/sh
# An mpiexec whose second rank is late: mpiexec -n 2 python …
shift 2
exec {mpiexec} -n 1 "$@" : -n 1 sh -c 'while [ ! -e {go} ]; do sleep 0.1; done; exec "$@"' - "$@"
"""


def test_no_rank_begins_with_mpi_before_all_are_there(idle, tmp_path):
    """It would keep a core busy with looking for those that still have to be started."""
    beside, go = Path(sys.executable).parent, tmp_path / "go"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mpiexec"
    program.write_text(_HOLDS_ONE_BACK.format(mpiexec=beside / "mpiexec", go=go))
    program.chmod(0o755)
    # By its neighbour the launcher's kind is known.
    (program.parent / "prterun").symlink_to(beside / "prterun")
    library = str(beside.parent / "lib" / "libmpi.so.40")
    environ(idle, ALLRANKS_MPIEXEC=str(program), MPI4PY_LIBMPI=library)
    before = idle.logs().get("rank-0.log")
    cell = idle.start_on_ranks("rank, size", "-n 2")
    wait_until(lambda: idle.logs().get("rank-0.log") != before)
    time.sleep(1)
    begun = [child.pid for child in idle.children() if "libmpi." in _maps(child.pid)]
    go.touch()
    assert begun == []
    assert "rank 1 → (1, 2)\n" in cell.wait(60).text


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""  # the shell's sleep has ended


def test_under_an_unknown_mpiexec_no_rank_is_replaced_and_all_are_fresh(idle, tmp_path):
    """It is not the wheel's, and nothing tells what it can do."""
    other = tmp_path / "mpiexec"
    other.write_text(f'#!/bin/sh\nexec {sys.prefix}/bin/mpiexec "$@"\n')
    other.chmod(0o700)
    environ(idle, ALLRANKS_MPIEXEC=str(other))
    idle.on_ranks("kept = 1", "-n 2")
    assert "These ranks cannot be replaced" in idle.run("%distributed heal on").text
    idle.on_ranks("import os\nif rank: os._exit(5)\nbarrier()").fails("ClusterLost")
    assert "ranks 0–1 → False" in idle.on_ranks("'kept' in globals()").text
