"""Compares collectives with mpi4py and with torch.distributed (gloo) in one run.

    python benchmarks/collectives.py [--sizes 2 4] [--quick]

Starts mpiexec itself, once for each number of ranks. The peers run in turns within each
repetition, so other load on the machine affects all of them. Every time is the slowest rank's, and
a figure is the median over repetitions. Prints a table in Markdown and writes
benchmarks/results/collectives.json. All checks are on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "collectives.json"
BYTES = [4, 64, 1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TENSORS, TENSOR_BYTES = 200, 10 * 1024
RANK = "ALLRANKS_BENCHMARK_RANK"
Timed = dict[str, Callable[[], object]]


def interleaved(comm: Any, peers: Timed, repeats: int, calls: int = 1) -> dict[str, float]:
    """Returns the median seconds per call of each peer, from the slowest rank of each repetition.

    Small calls are repeated several times in a row, because the first call after another peer's
    call runs with cold caches, which is not typical of training.
    """
    taken: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 2):
        for name, call in peers.items():
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if turn >= 2:
                taken[name].append((time.perf_counter() - began) / calls)
    found = {}
    for name, times in taken.items():
        slowest = np.empty(len(times))
        from mpi4py import MPI

        comm.Allreduce(np.array(times), slowest, MPI.MAX)
        found[name] = float(np.median(slowest))
    return found


def gloo(rank: int, size: int, port: int) -> Any:
    """Returns torch.distributed with gloo, or None if torch is not installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return None
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return dist


def on_ranks(quick: bool, port: int) -> None:
    """Runs the measurement on a rank."""
    from mpi4py import MPI

    import allranks.collectives as c

    c.init()
    comm, rank, size = MPI.COMM_WORLD, c.rank(), c.size()
    dist = gloo(rank, size, port)
    rows = [allreduce_row(c, comm, dist, nbytes, quick) for nbytes in BYTES]
    result = {
        "ranks": size,
        "mpi": MPI.Get_library_version().splitlines()[0].split(",")[0],
        "gloo": dist is not None,
        "allreduce": rows,
        "grouping": grouping(c, comm, 5 if quick else 15),
        "late": {name: cpu_while_late(c, comm, name) for name in ("ours", "mpi4py")},
    }
    if rank == 0:
        sys.stdout.write("\n@" + json.dumps(result) + "\n")
        sys.stdout.flush()
    if dist is not None:
        dist.destroy_process_group()


def allreduce_row(c: Any, comm: Any, dist: Any, nbytes: int, quick: bool) -> dict[str, Any]:
    """Returns the seconds of an allreduce of float32, one figure per peer."""
    count = nbytes // 4
    private, out = np.ones(count, np.float32), np.empty(count, np.float32)
    living = c.empty(count, np.float32)
    living[:] = 1
    peers: Timed = {
        "mpi4py": lambda: comm.Allreduce(private, out),
        "private": lambda: c.allreduce(private, c.Sum),
        "window": lambda: c.allreduce(living, c.Sum),
    }
    if dist is not None:
        import torch

        tensor = torch.ones(count)
        peers["gloo"] = lambda: dist.all_reduce(tensor)
    calls = 100 if nbytes <= 64 << 10 else 4 if nbytes <= 1 << 20 else 1
    repeats = 30 if nbytes <= 4 << 20 else 15 if nbytes < 64 << 20 else 7
    seconds = interleaved(comm, peers, repeats // (4 if quick else 1) + 1, calls)
    return {"nbytes": nbytes, "seconds": seconds}


def grouping(c: Any, comm: Any, repeats: int) -> dict[str, float]:
    """Returns the seconds for many small tensors, grouped and one by one."""
    tensors = [np.ones(TENSOR_BYTES // 4, np.float32) for _ in range(TENSORS)]
    return interleaved(
        comm,
        {
            "grouped": lambda: c.grouped_allreduce(tensors, c.Sum),
            "one by one": lambda: [c.allreduce(tensor, c.Sum) for tensor in tensors],
        },
        repeats,
    )


def cpu_while_late(c: Any, comm: Any, who: str) -> float:
    """Returns the share of a core that the first rank uses while the last one is a second late."""
    mine, out = np.ones(4), np.empty(4)
    comm.Barrier()
    if c.rank() == c.size() - 1:
        time.sleep(1.0)
    before, began = time.process_time(), time.perf_counter()
    _ = c.allreduce(mine) if who == "ours" else comm.Allreduce(mine, out)
    share = (time.process_time() - before) / (time.perf_counter() - began)
    return float(comm.bcast(share, root=0))


def table(result: dict[str, Any]) -> str:
    """Returns the table for one number of ranks in Markdown."""
    names = ["mpi4py", "private", "window", *(["gloo"] if result["gloo"] else [])]
    lines = [
        f"### {result['ranks']} ranks, {result['mpi']}",
        "",
        f"| bytes | {' µs | '.join(names)} µs | private ÷ mpi4py | window ÷ mpi4py |",
        "|" + " ---: |" * (len(names) + 3),
    ]
    for row in result["allreduce"]:
        seconds = row["seconds"]
        times = " | ".join(f"{seconds[name] * 1e6:,.1f}" for name in names)
        base = seconds["mpi4py"]
        ratios = f"{seconds['private'] / base:.2f} | {seconds['window'] / base:.2f}"
        lines.append(f"| {row['nbytes']:,} | {times} | {ratios} |")
    group, late = result["grouping"], result["late"]
    lines += [
        "",
        f"{TENSORS} tensors of {TENSOR_BYTES // 1024} KiB: "
        f"grouped {group['grouped'] * 1e3:.2f} ms, one by one {group['one by one'] * 1e3:.2f} ms: "
        f"{group['one by one'] / group['grouped']:.1f} times.",
        f"CPU of a core while one rank is 1 s late: ours {late['ours']:.1%}, "
        f"blocking mpi4py {late['mpi4py']:.0%}.",
        "",
    ]
    return "\n".join(lines)


def launch(ranks: int, quick: bool, port: int) -> dict[str, Any]:
    """Runs this file under mpiexec."""
    sys.path.insert(0, str(ROOT / "tests" / "mpi"))
    from launch import environment

    command = [
        str(Path(sys.executable).parent / "mpiexec"),
        *("-n", str(ranks), sys.executable, __file__),
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(
        command,
        env=environment(**{RANK: str(port)}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("@"))
    result: dict[str, Any] = json.loads(line[1:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    if RANK in os.environ:
        on_ranks(options.quick, int(os.environ[RANK]))
        return
    results = [launch(n, options.quick, 29_500 + n) for n in options.sizes]
    where = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": where, "runs": results}, indent=1) + "\n")
    for result in results:
        print(table(result))


if __name__ == "__main__":
    main()
