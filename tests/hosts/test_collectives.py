"""Collectives between hosts under plain mpiexec: a host that is cut off, or stands still."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.hosts import REPOSITORY, Hosts
from tests.mpi.launch import OPEN_MPI

pytestmark = pytest.mark.timeout(180)

#: A host's place for each rank, and which link MPI takes.
_MPI = OPEN_MPI | {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "PYTHONPATH": str(REPOSITORY),
    "ALLRANKS_LEASE": "5",
}

_SCRIPT = """
import json, sys, time
import numpy as np
import allranks.collectives as c

folder, count, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
c.init()
array, last, told = np.ones(count, "float32"), time.time(), {"done": 0}
open(f"{folder}/up{c.rank()}", "w").close()
try:
    for told["done"] in range(1, calls + 1):
        c.allreduce(array, c.Sum)
        last = time.time()
        time.sleep(0.01)
except BaseException as error:
    told |= {"kind": type(error).__name__, "text": str(error)}
told["seconds"] = time.time() - last
with open(f"{folder}/writing{c.rank()}", "w") as file:
    json.dump(told, file)
import os
os.rename(f"{folder}/writing{c.rank()}", f"{folder}/told{c.rank()}")
if sys.argv[4] == "wait":
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def hosts(hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts, which are booted at the end: ranks that are killed leave files of MPI."""
    yield hosts
    for host in hosts.names:
        hosts.boot(host)


@contextmanager
def ranks_on(
    hosts: Hosts, where: str, count: int, calls: int = 10**9, *, wait: bool = True
) -> Iterator[Path]:
    """Runs ranks that call allreduce again and again; gives the folder in which they tell of it.

    Afterwards they wait to be ended, or end by themselves.
    """
    folder = hosts.shared / f"c{len(list(hosts.shared.iterdir()))}"
    folder.mkdir()
    (folder / "script.py").write_text(_SCRIPT)
    places = sum(int(host.partition(":")[2]) for host in where.split(","))
    words = [str(Path(sys.executable).parent / "mpiexec"), "--host", where, "-n", str(places)]
    words += ["-x", "ALLRANKS_LEASE"]
    words += [sys.executable, f"{folder}/script.py", str(folder), str(count), str(calls)]
    words += ["wait" if wait else "end"]
    with (folder / "output").open("w") as output:
        running = subprocess.Popen(
            hosts.command("h0", words), env=os.environ | _MPI, stdout=output, stderr=output
        )
    try:
        wait_for(folder, "up", places)
        time.sleep(1)
        yield folder
    finally:
        for name in hosts.names:
            hosts.mend(name)
        running.kill()
        running.wait()
        for name in hosts.names:
            for line in hosts.processes(name):
                # It may end by itself meanwhile.
                hosts.on(name, "sh", "-c", 'kill -9 "$0" || :', line.split()[1])


def wait_for(folder: Path, name: str, ranks: int, seconds: float = 60) -> list[Path]:
    """Waits for so many ranks' files."""
    deadline = time.monotonic() + seconds
    while True:
        found = sorted(folder.glob(f"{name}*"))
        if len(found) == ranks:
            return found
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.1)


def told(folder: Path, ranks: int) -> list[dict[str, object]]:
    """What each rank tells of its last call."""
    return [json.loads(path.read_text()) for path in wait_for(folder, "told", ranks)]


@pytest.mark.leases
def test_a_host_that_is_cut_off_is_named_to_all_others_and_scripts_that_catch_it_end(
    hosts: Hosts,
) -> None:
    of_three = "h0:2,h1:2,h2:1"
    with (
        ranks_on(hosts, of_three, 3) as small,
        ranks_on(hosts, of_three, 1_000_000) as large,
        ranks_on(hosts, "h0:1,h1:1", 3, wait=False) as ends,
    ):
        hosts.cut("h1")
        for folder in (small, large):
            found = told(folder, 5)
            assert {one["kind"] for one in found} == {"RankLost"}
            for rank in (0, 1, 4):
                assert "its host h1 does not answer" in str(found[rank]["text"])
        told(ends, 2)
        deadline = time.monotonic() + 60
        while left := [line for line in hosts.processes("h0") if is_rank(line, ends)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


def is_rank(line: str, folder: Path) -> bool:
    """Whether a host's process is a rank that tells in this folder, not what has started it."""
    return line.split()[2] == sys.executable and str(folder) in line


@pytest.mark.leases
def test_a_host_that_stands_still_for_a_while_is_awaited(hosts: Hosts) -> None:
    with ranks_on(hosts, "h0:1,h1:1", 3, calls=300) as folder:
        frozen = time.monotonic()
        hosts.freeze("h1")
        # Longer than the lease: the kernel answers. Freezing takes a while on a loaded machine.
        time.sleep(max(0, frozen + 8 - time.monotonic()))
        hosts.thaw("h1")
        found = told(folder, 2)
    assert all("kind" not in one and one["done"] == 300 for one in found)
