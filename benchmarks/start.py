"""Time from the start to the first reply of every rank, in a new process after all imports.

``ipyparallel`` has its defaults; ``ipyparallel, tuned`` does not wait between steps, and looks for
engines every 200 ms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from typing import Any

import psutil

from benchmarks import results
from benchmarks.frontend import ROOT, environment

SIZES = (1, 2, 4)
REPETITIONS = 5
PEERS = ("allranks", "ipyparallel")
TUNED = "ipyparallel, tuned"
TUNED_SIZE = 4
_SECONDS = 180.0
# The environment variable by which the processes of one start are known.
_MARK = "ALLRANKS_BENCHMARK"


def main() -> None:
    described = results.machine()
    samples: dict[str, dict[str, list[float]]] = {
        str(n): {peer: [] for peer in (*PEERS, *([TUNED] if n == TUNED_SIZE else []))}
        for n in SIZES
    }
    for _ in range(REPETITIONS):
        for n, peers in samples.items():
            for peer, seconds in peers.items():
                seconds.append(_in_fresh_process(peer, int(n)))
    print(table(results.write("start", described, {"unit": "s", "samples": samples})))


def table(result: dict[str, Any]) -> str:
    others = list(dict.fromkeys(peer for peers in result["samples"].values() for peer in peers))
    others.remove("allranks")
    rows = []
    for n, peers in result["samples"].items():
        ours = peers["allranks"]
        row = [n, results.middle_and_least(ours, 2)]
        for peer in others:
            theirs = peers.get(peer)
            row += (
                [results.middle_and_least(theirs, 2), results.times_faster(theirs, ours)]
                if theirs
                else ["–", "–"]
            )
        rows.append(row)
    head = ["ranks", "allranks"]
    for peer in others:
        head += [peer, "times faster"]
    count = len(next(iter(result["samples"].values()))["allranks"])
    return (
        f"From start to the first reply of every rank, in seconds: median (minimum) of {count}.\n\n"
        + results.markdown(head, rows)
    )


def at_a_glance(result: dict[str, Any]) -> list[str]:
    n = max(result["samples"], key=int)
    peers = result["samples"][n]
    what = f"from the start of {n} ranks to the first reply of all"
    return results.compared(what, peers["allranks"], peers["ipyparallel"], "s")


def _in_fresh_process(peer: str, n: int) -> float:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("IPYTHONDIR", "XDG_STATE_HOME", "JUPYTER_RUNTIME_DIR"), folder)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.start", peer, str(n)],
                env={**os.environ, **environment(), **places, _MARK: mark},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
        finally:
            _end_marked(mark)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _end_marked(mark: str) -> None:
    # By the mark in the environment, because orphans have no parent to find them by.
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=10.0)


def _allranks(n: int) -> float:
    import allranks

    started = time.perf_counter()
    cluster = allranks.Cluster(n).start()
    try:
        ranks = cluster.run("rank")
        seconds = time.perf_counter() - started
    finally:
        cluster.stop()
    assert ranks == list(range(n)), ranks
    return seconds


def _ipyparallel(n: int, **options: Any) -> float:
    import ipyparallel

    started = time.perf_counter()
    cluster = ipyparallel.Cluster(engines="mpi", n=n, **options)
    try:
        client = cluster.start_and_connect_sync()
        ranks = client[:].apply_sync(_rank)
        seconds = time.perf_counter() - started
    finally:
        cluster.stop_cluster_sync()
    assert sorted(ranks) == list(range(n)), ranks
    return seconds


def _rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    import ipyparallel.cluster.launcher  # noqa: F401  neither side pays for its imports

    import allranks.cluster.cluster  # noqa: F401

    if sys.argv[1] == "allranks":
        measured = _allranks(int(sys.argv[2]))
    elif sys.argv[1] == "ipyparallel":
        measured = _ipyparallel(int(sys.argv[2]))
    else:
        measured = _ipyparallel(
            int(sys.argv[2]),
            delay=0,
            controller_args=[
                "--HeartMonitor.period=200",
                "--HeartMonitor.max_heartmonitor_misses=300",
            ],
        )
    print(json.dumps(measured))
