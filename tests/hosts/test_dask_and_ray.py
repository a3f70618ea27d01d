"""Ranks on hosts of a real Dask, and of a real Ray, which go on without them."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.conftest import folder_in
from tests.hosts.hosts import Hosts
from tests.hosts.notebook import NotebookOnAHost
from tests.kernel import wait_until

PROGRAMS = Path(sys.executable).parent
SCHEDULER = "tcp://10.77.0.11:8786"
HEAD = "10.77.0.10:6379"
#: Otherwise it depends on the user's home whether Ray demands a token.
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
#: Each of Ray's processes takes a second of a core to begin: only those that are needed.
FEW = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
RAY = ("env", *(f"{name}={value}" for name, value in (SECRET | FEW).items()), f"{PROGRAMS}/ray")
NODE = ("--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats")
SLEEP = "import time\nprint('here')\ntime.sleep(60)"
OURS = re.compile(r"-m allranks|prte|mpiexec|ipykernel")
GONE_SECONDS = 60
START_SECONDS = 150


@dataclass
class System:
    """A running Dask or Ray: ``names`` are its hosts, and ``end`` ends its processes on one."""

    hosts: Hosts
    name: str
    on: str
    names: tuple[str, str]
    end: Callable[[str], object]

    def __post_init__(self) -> None:
        self._files = self._all_files()

    def _all_files(self) -> set[str]:
        return {line for host in self.hosts.names for line in self.hosts.files(host)}

    def left(self) -> list[str]:
        """Returns the processes and files of allranks and MPI on all hosts."""
        lines = [line for host in self.hosts.names for line in self.hosts.processes(host)]
        files = self._all_files() - self._files
        return [*filter(OURS.search, lines), *(file for file in files if "sem.mp-" not in file)]

    def check_nothing_left(self) -> None:
        try:
            wait_until(lambda: not self.left(), lambda: f"the end of {self.left()}", GONE_SECONDS)
        finally:
            self._files = self._all_files()  # a later test does not fail for the same files


def start_dask(hosts: Hosts) -> System:
    """A scheduler on ``h1``, and workers on ``h1`` and ``h2``."""
    logs = folder_in(hosts.shared)

    def run(host: str, words: str) -> Path:
        log = logs / f"{host}-{words.split()[0]}"
        command = f"exec {PROGRAMS}/dask {words} --host {host} --no-dashboard >{log} 2>&1"
        hosts.on(host, "setsid", "-f", "sh", "-c", command)
        return log

    run("h1", "scheduler --port 8786")
    workers = [
        run(host, f"worker {SCHEDULER} --nthreads 2 --local-directory /tmp")
        for host in ("h1", "h2")
    ]
    wait_until(lambda: all("Registered to" in log.read_text() for log in workers))

    def end(host: str) -> None:
        for line in hosts.processes(host):
            if "dask worker" in line or "spawn_main" in line:
                hosts.on(host, "kill", line.split()[1])

    return System(hosts, "Dask", f"--on dask:{SCHEDULER}", ("h1", "h2"), end)


def start_ray(hosts: Hosts) -> System:
    """A head on the notebook's own host, and a node on ``h1``."""
    head = "--head", "--port=6379", "--node-ip-address=10.77.0.10", "--include-dashboard=false"
    hosts.on("h0", *RAY, "start", *head, *NODE, timeout=120)
    node = f"--address={HEAD}", "--node-ip-address=10.77.0.11"
    hosts.on("h1", *RAY, "start", *node, *NODE, timeout=120)

    def end(host: str) -> None:
        hosts.on(host, *RAY, "stop", "--force")

    return System(hosts, "Ray", "--on ray", ("h0", "h1"), end)


@pytest.fixture(scope="module", params=[start_dask, start_ray], ids=["dask", "ray"])
def system(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[System]:
    yield request.param(hosts)
    # Its own processes and files end with the hosts.
    for host in hosts.names:
        hosts.boot(host)


@pytest.fixture(scope="module")
def shared_notebook(hosts: Hosts, system: System) -> Iterator[NotebookOnAHost]:
    """Two ranks on each of two hosts."""
    with NotebookOnAHost(hosts, folder_in(hosts.shared), {**SECRET}) as shared:
        started = shared.on_ranks("kept = 10 * rank", system.on, START_SECONDS)
        assert started.status == "ok", started.text
        yield shared


@pytest.fixture
def notebook(shared_notebook: NotebookOnAHost) -> NotebookOnAHost:
    """That notebook, with a kernel that is ready for a cell, however the test before has ended."""
    shared_notebook.settle()
    return shared_notebook


@pytest.fixture
def idle(notebook: NotebookOnAHost) -> NotebookOnAHost:
    """That notebook without ranks."""
    notebook.run("%distributed stop").ok()
    return notebook


def test_ranks_run_on_its_nodes_and_an_interrupt_keeps_their_variables(notebook, system):
    cell = notebook.on_ranks("import socket; socket.gethostname(), allreduce(rank, op=Sum)")
    first, second = system.names
    assert cell.text == f"ranks 0–1 → ('{first}', 6)\nranks 2–3 → ('{second}', 6)\n"
    # Below the folder of the logs, whose name is drawn and may have a host's in it.
    text = notebook.run("%distributed status").text.partition("\n")[2]
    assert text.index(first) < text.index("rank 1") < text.index(second) < text.index("rank 2")
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted", cell.text
    assert notebook.on_ranks("kept", "-r 3").text == "rank 3 → 30\n"
    cell = notebook.run("%distributed detach-on-exit 60s")
    cell.fails("UsageError", f"found {system.on}: these ranks end with the notebook")


def test_a_kernel_killed_with_9_leaves_nothing_on_its_nodes(notebook, system):
    notebook.start_on_ranks(SLEEP).wait_for("here")
    notebook.kill9()
    system.check_nothing_left()


def test_what_its_nodes_lack_is_named_at_the_start(idle, system):
    cell = idle.run(f"%distributed start {system.on} --nodes 3")
    found = ", ".join(f"{name} (2 CPUs, 0 GPUs)" for name in system.names)
    cell.fails("UsageError", f"expected 3 nodes of {system.name}, found {found}. Type for example")
    cell = idle.run(f"%distributed start {system.on} --account me")
    cell.fails("UsageError", "expected --nodes and --ntasks-per-node, found --account")


@pytest.mark.parametrize("system", [start_dask], ids=["dask"], indirect=True)
def test_the_doctor_names_the_nodes_and_a_system_that_does_not_answer(idle, system):
    text = idle.run(f"!{sys.executable} -m allranks doctor {system.on}").text
    for name in system.names:
        assert re.search(rf"{name} +connects to this machine", text), text
    cell = idle.run("%distributed start --on dask:tcp://10.77.0.12:9")
    cell.fails("StartFailed", "expected Dask at tcp://10.77.0.12:9, found OSError: Timed out")


@pytest.mark.parametrize("system", [start_ray], ids=["ray"], indirect=True)
def test_ranks_wait_until_their_nodes_are_free_or_an_interrupt(idle, system, new_notebook):
    one = f"{system.on} --nodes 2 --ntasks-per-node 1"
    assert idle.on_ranks("rank", one, START_SECONDS).status == "ok"
    other = new_notebook({**SECRET})
    cell = other.start_on_ranks("rank", system.on).wait_for("Ray has not started", START_SECONDS)
    other.interrupt()
    assert cell.wait().error_name == "KeyboardInterrupt", cell.text
    other.shutdown()
    idle.run("%distributed stop").ok()


def test_ranks_end_with_the_nodes_of_their_system(idle, system):
    cell = idle.start_on_ranks(SLEEP, system.on).wait_for("here", START_SECONDS)
    system.end(system.names[1])
    cell.wait().fails("ClusterLost", f"Host {system.names[1]} was lost")
    # Whichever came first: the end of the host's relay, or the system's own error.
    assert re.search(f"lost: its launcher has ended|lost by {system.name}: ", cell.error_value)
    idle.shutdown()
    system.check_nothing_left()
