"""Compares collectives with mpi4py and with torch.distributed (gloo) in one run.

    python -m benchmarks.collectives [--sizes 2 4] [--quick]

Starts mpiexec itself, once for each number of ranks. Every time is the slowest rank's, and a figure
is the median over repetitions. Prints a table in Markdown and writes
benchmarks/results/collectives.json. All checks are on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import ranks, results

BYTES = [4, 64, 1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TENSORS, TENSOR_BYTES = 200, 10 * 1024
RANK = "ALLRANKS_BENCHMARK_RANK"


def medians(
    comm: Any, peers: Mapping[str, ranks.Call], repeats: int, each: int = 1
) -> dict[str, float]:
    """Returns the median seconds per call of each peer, on the slowest rank of each repetition."""
    found = ranks.slowest(comm, peers, repeats, each)
    return {name: float(np.median(times)) for name, times in found.items()}


def gloo(rank: int, size: int, port: int) -> Any:
    # None if torch is not installed.
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
    ranks.write(rank, result)
    if dist is not None:
        dist.destroy_process_group()


def allreduce_row(c: Any, comm: Any, dist: Any, nbytes: int, quick: bool) -> dict[str, Any]:
    count = nbytes // 4
    private, out = np.ones(count, np.float32), np.empty(count, np.float32)
    living = c.empty(count, np.float32)
    living[:] = 1
    peers: dict[str, ranks.Call] = {
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
    seconds = medians(comm, peers, repeats // (4 if quick else 1) + 1, calls)
    return {"nbytes": nbytes, "seconds": seconds}


def grouping(c: Any, comm: Any, repeats: int) -> dict[str, float]:
    tensors = [np.ones(TENSOR_BYTES // 4, np.float32) for _ in range(TENSORS)]
    return medians(
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    if RANK in os.environ:
        on_ranks(options.quick, int(os.environ[RANK]))
        return
    quick = ["--quick"] * options.quick
    runs = [
        ranks.run(n, "-m", "benchmarks.collectives", *quick, **{RANK: str(29_500 + n)})
        for n in options.sizes
    ]
    where = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    results.FOLDER.mkdir(exist_ok=True)
    path = results.FOLDER / "collectives.json"
    path.write_text(json.dumps({"machine": where, "runs": runs}, indent=1) + "\n")
    for result in runs:
        print(table(result))


if __name__ == "__main__":
    main()
