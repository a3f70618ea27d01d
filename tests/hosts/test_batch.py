"""What ``allranks export`` writes for Kubernetes: its containers' commands, run as they are.

Hosts stand for pods. Each is prepared as the MPI operator and the image do it: a key for ssh, a
hostfile in /etc/mpi, names with dots, and Python and ``mpiexec`` where sshd looks for programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.command.main import main
from tests.hosts.hosts import REPOSITORY, Hosts, require

CELLS = (
    "%%distributed -n 4\nimport socket",
    "%%distributed\nprint(rank, size, local_rank, socket.gethostname(), allreduce(1.0, op=Sum))",
    "%%distributed -r 3\nprint('a dollar: $HOME $$')",
)
SAID = [
    "0 4 0 h1 4.0",
    "1 4 1 h1 4.0",
    "2 4 0 h2 4.0",
    "3 4 1 h2 4.0",
    "a dollar: $HOME $$",
]
WORKERS = {"h1": "n-worker-0.n.default.svc", "h2": "n-worker-1.n.default.svc"}
PROGRAMS = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
OPERATORS = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
# In the host's own mount namespace: the machine's /etc stays as it is. As in an image, the shell of
# who comes by ssh reads no file that puts other programs first.
OWN_ETC = """
cp -a /etc /run/etc && rm -f /run/etc/ssh/ssh_host_* && mkdir /run/etc/mpi
printf '%s' "$1" > /run/etc/mpi/hostfile
printf '%s' "$2" >> /run/etc/hosts
sed -i '/^root:/s,:[^:]*$,:/bin/sh,' /run/etc/passwd
{ printf 'SetEnv PATH=%s PYTHONPATH=%s\\n' "$3" "$4"; cat /etc/ssh/sshd_config; } \\
    > /run/etc/ssh/sshd_config
mount --bind /run/etc /etc
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A host for the launcher, and two for workers, which no sshd of their own serves."""
    require()
    with Hosts(3) as up:
        addresses = {
            line.split()[1]: line.split()[0]
            for line in up.on("h0", "cat", "/etc/hosts").splitlines()
        }
        known = "".join(f"{addresses[host]} {name}\n" for host, name in WORKERS.items())
        hostfile = "".join(f"{name} slots=2\n" for name in WORKERS.values())
        for host in up.names:
            prepare = ["sh", "-ec", OWN_ETC, "sh", hostfile, known, PROGRAMS, str(REPOSITORY)]
            up.on(host, *prepare)
            if host in WORKERS:
                pid = f"$(cat {up.environment['HOSTS_BASE']}/{host}/sshd.pid)"
                up.on(host, "sh", "-c", f"pid={pid}; kill $pid; while kill -0 $pid; do :; done")
        yield up


@pytest.fixture(scope="module")
def exported(hosts: Hosts) -> Path:
    """A folder that all hosts see, with the notebook and what is made of it."""
    folder = hosts.shared / "job"
    folder.mkdir()
    cells = [{"cell_type": "code", "source": source} for source in CELLS]
    (folder / "n.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    notebook, script = str(folder / "n.ipynb"), str(folder / "n.py")
    image = ["--nodes", "2", "--image", "i"]
    for words in (
        ["-o", script],
        ["--to", "mpijob", *image, "--script", script, "-o", str(folder / "mpijob.yaml")],
        ["--to", "trainjob", *image, "-o", str(folder / "trainjob.yaml")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["export", notebook, *words])
        assert ended.value.code == 0
    return folder


@pytest.fixture(scope="module")
def start_workers(hosts: Hosts, exported: Path) -> Iterator[Callable[[], None]]:
    """Runs the command of the workers' container on each of them, the first time it is called."""
    made = yaml.safe_load((exported / "mpijob.yaml").read_text())
    (container,) = replica(made, "Worker")
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        if not running:
            words = as_read(container["command"])
            running.extend(subprocess.Popen(hosts.command(host, words)) for host in WORKERS)

    yield start
    for process in running:
        process.terminate()
        process.wait()


def as_read(words: list[str]) -> list[str]:
    """Returns what Kubernetes makes of the words of a command."""
    return [word.replace("$$", "$") for word in words]


def replica(job: dict[str, Any], name: str) -> list[dict[str, Any]]:
    containers: list[dict[str, Any]]
    containers = job["spec"]["mpiReplicaSpecs"][name]["template"]["spec"]["containers"]
    return containers


def launch(
    hosts: Hosts, folder: Path, words: list[str], env: list[dict[str, str]]
) -> subprocess.Popen[str]:
    """Starts the launcher's command on its host, in the environment that it would have."""
    own = {one["name"]: one["value"] for one in env}
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return subprocess.Popen(
        hosts.command("h0", as_read(words), folder),
        env=kept | {"PATH": PROGRAMS, "PYTHONPATH": str(REPOSITORY)} | OPERATORS | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_by(process: subprocess.Popen[str]) -> list[str]:
    """Returns the lines of a command that has ended well, sorted.

    Open MPI's launcher may warn that a process which it has started was faster than itself.
    """
    try:
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return sorted(line for line in said.splitlines() if "Warning: setpgid(" not in line)


def test_an_mpijobs_launcher_waits_for_its_workers_and_runs_the_script(
    hosts, exported, start_workers
):
    made = yaml.safe_load((exported / "mpijob.yaml").read_text())
    (container,) = replica(made, "Launcher")
    launcher = launch(hosts, exported, container["command"], container["env"])
    while not any("sleep 1" in line for line in all_processes(hosts)):
        assert launcher.poll() is None, launcher.communicate()
    start_workers()
    assert said_by(launcher) == SAID
    assert hosts.left() == []


def all_processes(hosts: Hosts) -> list[str]:
    return hosts.on("h0", "ps", "-ww", "-e", "-o", "args=").splitlines()


def test_a_trainjobs_trainer_runs_the_script_on_its_nodes(hosts, exported, start_workers):
    start_workers()
    made = yaml.safe_load((exported / "trainjob.yaml").read_text())["spec"]["trainer"]
    words = [*made["command"], *made["args"]]
    assert said_by(launch(hosts, exported, words, made["env"])) == SAID
