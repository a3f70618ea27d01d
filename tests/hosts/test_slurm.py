"""Ranks on the nodes that a real Slurm gives: its queue, its limits, and its nodes' ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.hosts.conftest import folder_in
from tests.hosts.hosts import Hosts, require
from tests.hosts.notebook import NotebookOnAHost
from tests.kernel import wait_until

SLURM = "--on slurm --nodes 2 --ntasks-per-node 2"
SLEEP = "import time\nprint('here')\ntime.sleep(100)"
#: A lease is ten seconds; the rest is for the machine that runs these tests to come to it.
NAMED_SECONDS = 60


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A login node, ``h0``, and two nodes."""
    require(slurm=True)
    with Hosts(3, slurm=True) as up:
        yield up


@pytest.fixture
def notebook(hosts: Hosts) -> Iterator[NotebookOnAHost]:
    """A notebook on the login node; afterwards nothing is left, nor in Slurm's queue."""
    with NotebookOnAHost(hosts, folder_in(hosts.shared)) as opened:
        yield opened
        opened.shutdown()
        until_idle(hosts)
        opened.check_nothing_left()
        assert list(opened.cwd.rglob("invitation")) == []


def until_idle(hosts: Hosts) -> None:
    # A node that is lost keeps its job until Slurm gives the node up.
    wait_until(lambda: not hosts.on("h0", "squeue", "-h"), seconds=60)


def begin(notebook: NotebookOnAHost, options: str = "") -> None:
    started = notebook.on_ranks("kept = rank", f"{SLURM} {options}")
    assert started.status == "ok", started.text


def job(hosts: Hosts) -> str:
    return hosts.on("h0", "squeue", "-h", "-o", "%i").split()[0]


def test_ranks_run_on_the_nodes_their_key_is_nowhere_and_stop_ends_the_job(hosts, notebook):
    notebook.run("import os; os.environ['MINE'] = 'here'  # sbatch passes all of it on")
    cell = notebook.on_ranks("import socket; socket.gethostname()", f"{SLURM} --time 5:00")
    assert "allranks started ranks 0–3 on h1, h2" in cell.text
    assert cell.text.endswith("ranks 0–1 → 'h1'\nranks 2–3 → 'h2'\n")
    assert "5:00" in hosts.on("h0", "squeue", "-h", "-o", "%l")
    assert notebook.on_ranks("import os; os.environ['MINE']").text == "ranks 0–3 → 'here'\n"
    # The key is in no argument, environment or file once the ranks are up.
    notebook.run("from allranks.cluster import cluster as held")
    key = notebook.value("held.session.running.cells.connection._wire.key").strip("'")
    (hosts.shared / "key").write_text(key)
    told = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null"
    search = f"{told} | grep -a -c -F -f key || :"
    found = [hosts.on(name, "bash", "-c", search).strip() for name in hosts.names]
    assert found == ["0", "0", "0"]
    assert list(notebook.cwd.rglob("invitation")) == []
    assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"
    until_idle(hosts)


def test_an_exported_notebook_runs_on_the_nodes(hosts):
    folder = folder_in(hosts.shared)
    source = (
        "%%distributed\nimport socket\nprint(rank, size, socket.gethostname(), allreduce(1.0, Sum))"
    )
    made = {"nbformat": 4, "cells": [{"cell_type": "code", "source": source}]}
    (folder / "n.ipynb").write_text(json.dumps(made))
    words = ["--to", "slurm", "-np", "4", "--nodes", "2", "--time", "5:00"]
    command = [sys.executable, "-m", "allranks.command.main", "export", "n.ipynb", *words]
    subprocess.run(hosts.command("h0", command, folder), check=True)
    ended = subprocess.run(
        hosts.command("h0", ["sbatch", "--wait", "n.sbatch"], folder), timeout=100
    )
    (log,) = folder.glob("n-*.log")
    # Open MPI's launcher may warn that a process which it has started was faster than itself.
    lines = [line for line in log.read_text().splitlines() if "Warning: setpgid(" not in line]
    assert (ended.returncode, sorted(lines)) == (
        0,
        ["0 4 h1 4.0", "1 4 h1 4.0", "2 4 h2 4.0", "3 4 h2 4.0"],
    )
    until_idle(hosts)


PROFILE = """
c.SlurmLauncher.timelimit = "7:00"
c.SlurmLauncher.options = "--comment={word}"
c.SlurmLauncher.namespace = {"word": "from-a-profile"}
c.SlurmLauncher.delete_command = ["scancel", "--quiet"]
c.SlurmLauncher.job_id_regexp = r"batch job (\\d+)"
c.SlurmLauncher.job_id_regexp_group = 1
"""


def test_a_profile_of_ipyparallel_says_how_jobs_are_submitted_here(hosts, notebook):
    notebook.cwd.joinpath(".ipython/profile_default/ipcluster_config.py").write_text(PROFILE)
    begin(notebook)
    assert hosts.on("h0", "squeue", "-h", "-o", "%k %l") == "from-a-profile 7:00\n"
    notebook.run("%distributed stop")


@pytest.fixture
def occupied(hosts: Hosts, notebook: NotebookOnAHost) -> Iterator[None]:
    """Another job has both nodes; it is cancelled before the notebook's own end is looked at."""
    hosts.on("h0", "sbatch", "-N2", "--exclusive", "--time=3", "--wrap", "sleep 100")
    yield
    hosts.on("h0", "scancel", "--user=root")


@pytest.mark.usefixtures("occupied")
def test_a_job_that_waits_says_its_place_and_is_cancelled_with_its_cell_and_kernel(hosts, notebook):
    def waiting():
        return notebook.start_on_ranks("rank", SLURM).wait_for("place 1 of 1")

    def pending():
        return hosts.on("h0", "squeue", "-h", "-t", "PENDING", "-o", "%i").strip()

    cell = waiting()
    said = r"Slurm job \d+ waits in partition main: place 1 of 1 \(\w+\)"
    assert re.search(said, cell.text), cell.text
    notebook.interrupt()
    assert cell.wait().error_name == "KeyboardInterrupt"
    assert pending() == ""

    cell = waiting()
    number = pending()
    hosts.on("h0", "scancel", number)
    assert cell.wait(NAMED_SECONDS).error_name == "StartFailed", cell.text
    said = f"expected Slurm job {number} to run, found that it was cancelled."
    assert cell.error_value.startswith(said)

    waiting()
    notebook.kill9()
    wait_until(lambda: not pending(), seconds=60)


def test_a_kernel_killed_with_9_ends_its_job(hosts, notebook):
    begin(notebook)
    notebook.start_on_ranks(SLEEP).wait_for("here")
    notebook.kill9()
    until_idle(hosts)


def test_what_ended_the_ranks_is_named(hosts, notebook):
    begin(notebook)
    cell = notebook.on_ranks("import os, time\nif rank == 3: os.abort()\ntime.sleep(1)")
    assert cell.error_value.startswith("rank 3 of 4"), cell.text
    assert "was killed by signal 6" in cell.error_value
    assert "rank 3 was replaced and has no variables" in cell.text
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    number = job(hosts)
    hosts.on("h0", "scancel", number)
    assert cell.wait(NAMED_SECONDS).error_name == "ClusterLost"
    assert cell.error_value.startswith(f"Slurm job {number} was cancelled; the ranks ended with")
    until_idle(hosts)

    begin(notebook, "--time 1")
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    # No limit is shorter than a minute, and Slurm compares times every 30 s only.
    hosts.on("h0", "scontrol", "update", f"JobId={job(hosts)}", "EndTime=now+1")
    assert cell.wait(100).error_name == "ClusterLost"
    assert re.match(r"Slurm job \d+ reached its time limit of 00:01:00; ", cell.error_value)


def test_what_slurm_refuses_is_said_in_its_words(notebook):
    cell = notebook.run("%distributed start --on slurm --nodes 2 --ntasks-per-node 2 -p nowhere")
    assert (cell.error_name, "partition" in cell.error_value) == ("StartFailed", True), cell.text
    cell = notebook.run("%distributed start --on slurm --nodes 1 --constraint warp")
    assert cell.error_name == "StartFailed"
    assert "Invalid feature specification" in cell.error_value


def test_a_notebook_in_a_job_of_two_nodes_has_its_ranks_there(hosts, notebook):
    hosts.on("h0", "salloc", "--no-shell", "-N2", "--ntasks-per-node=2", "--time=3")
    number = job(hosts)
    told = {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "h[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
    try:
        notebook.run(f"import os; os.environ |= {told}")
        cell = notebook.on_ranks("import socket; socket.gethostname()")
        assert cell.text.endswith("ranks 0–1 → 'h1'\nranks 2–3 → 'h2'\n"), cell.text
        notebook.run("%distributed stop")
        assert job(hosts) == number
    finally:
        hosts.on("h0", "scancel", number)


def test_a_node_that_is_lost_is_named(hosts, notebook):
    begin(notebook)
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    hosts.crash("h2")
    try:
        assert cell.wait(NAMED_SECONDS).error_name == "ClusterLost"
        assert cell.error_value.startswith("Host h2 is cut off or has crashed")
    finally:
        hosts.boot("h2")
