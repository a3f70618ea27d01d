"""Compares allreduce between two hosts with mpi4py's over TCP.

    python -m benchmarks.hosts [--bytes N …] [--quick]

Two hosts of two ranks, made of namespaces of this machine (as root; tests/hosts lists other
requirements), at the speed of memory and at 1 Gbit/s. The two run in turns within each repetition.
Every time is the slowest rank's, and a figure is the median over repetitions. Prints a table in
Markdown and writes benchmarks/results/hosts.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ranks, results
from benchmarks.collectives import BYTES, medians

ROOT = Path(__file__).resolve().parents[1]
WHERE = "h0:2,h1:2"
ON_RANKS = "--on-ranks"


def on_ranks(nbytes: list[int], quick: bool) -> None:
    import allranks.collectives as c

    c.init()
    from mpi4py import MPI

    comm, rows = MPI.COMM_WORLD.Dup(), []
    for size in nbytes:
        mine = np.ones(size // 4, np.float32)
        out = np.empty_like(mine)
        calls = 50 if size <= 64 << 10 else 4 if size <= 1 << 20 else 1
        repeats = 20 if size <= 1 << 20 else 7
        peers = {
            "mpi4py": lambda mine=mine, out=out: comm.Allreduce(mine, out),
            "ours": lambda mine=mine: c.allreduce(mine, c.Sum),
        }
        rows.append([size, medians(comm, peers, repeats // (4 if quick else 1) + 1, calls)])
    ranks.write(c.rank(), rows)


def launch(hosts: Any, where: str, *arguments: str, **settings: str) -> Any:
    """Runs ``python *arguments`` under mpiexec on hosts, and returns the result that a rank wrote.

    ``where`` lists the hosts and their number of ranks, as for mpiexec.
    """
    from tests.mpi.launch import OPEN_MPI

    more = {
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "PYTHONPATH": str(ROOT),
        **settings,
    }
    words = [str(Path(sys.executable).parent / "mpiexec"), "--host", where]
    words += [word for name in settings for word in ("-x", name)]
    done = subprocess.run(
        hosts.command("h0", [*words, sys.executable, *arguments]),
        env=os.environ | OPEN_MPI | more,
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    return ranks.read(done.stdout)


def table(result: dict[str, Any]) -> str:
    runs: dict[str, list[Any]] = result["runs"]
    sides = ("mpi4py µs", "allranks µs", "÷")
    head = ["bytes", *(f"{link}: {side}" for link in runs for side in sides)]
    lines = []
    for place, (nbytes, _) in enumerate(next(iter(runs.values()))):
        line = [f"{nbytes:,}"]
        for rows in runs.values():
            theirs, ours = rows[place][1]["mpi4py"], rows[place][1]["ours"]
            line += [f"{theirs * 1e6:,.1f}", f"{ours * 1e6:,.1f}", f"{ours / theirs:.2f}"]
        lines.append(line)
    return (
        "An allreduce of float32 between two hosts with two ranks each, made of namespaces of one "
        "machine, over TCP at the speed of memory (veth) and at 1 Gbit/s, compared with mpi4py's "
        "`Allreduce`: median of the slowest rank's times. The ranks share the machine's cores.\n\n"
        + results.markdown(head, lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    parser.add_argument("--bytes", type=int, nargs="+", default=BYTES)
    parser.add_argument(ON_RANKS, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_ranks:
        on_ranks(options.bytes, options.quick)
        return
    from tests.hosts.hosts import Hosts, missing

    if why := missing():
        print(why)
        return
    words = [__file__, ON_RANKS, *(["--quick"] if options.quick else [])]
    words += ["--bytes", *map(str, options.bytes)]
    described, runs = results.machine(), {}
    with Hosts(2) as hosts:
        for link, rate in (("veth", "off"), ("1 Gbit/s", "1gbit")):
            for name in hosts.names:
                script = str(ROOT / "tests" / "hosts" / "hosts.sh")
                subprocess.run([script, "rate", name, rate], env=hosts.environment, check=True)
            runs[link] = launch(hosts, WHERE, *words)
    print(table(results.write("hosts", described, {"ranks": WHERE, "runs": runs})))


if __name__ == "__main__":
    main()
