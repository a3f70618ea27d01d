"""Compares collectives with mpi4py on each MPI that is installed, and with torch's gloo.

    python -m benchmarks.collectives [--sizes 2 4] [--quick]

Starts mpiexec itself, for each number of ranks and each MPI: Open MPI in .venv, on which allranks
runs, and MPICH and Intel's MPI in .venv-mpich and .venv-impi, which `make bench` makes. All of them
stay alive and take turns (`benchmarks.launches`). Every time is the slowest rank's, and a figure is
the median over repetitions. Prints tables in Markdown and writes the file collectives.json in
benchmarks/results. All checks are on.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import launches, ranks, results

BYTES = [4, 64, 1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TENSORS, TENSOR_BYTES = 200, 10 * 1024
RANK = "ALLRANKS_BENCHMARK_RANK"
OURS = "allranks"
WARM_UP = 2
TITLES = {"private": "allranks, ordinary", "window": "allranks, window"}
GLANCE = {4: "4 bytes", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
"""The sizes that the README has."""


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
    launches.take_turns(comm, lambda nbytes: allreduces(c, comm, dist, nbytes))
    result = {
        "gloo": dist is not None,
        "grouping": grouping(c, comm, 5 if quick else 15),
        "late": {name: cpu_while_late(c, comm, name) for name in ("ours", "mpi4py")},
    }
    ranks.write(rank, result)
    if dist is not None:
        dist.destroy_process_group()


def allreduces(c: Any, comm: Any, dist: Any, nbytes: int) -> launches.Calls:
    count = nbytes // 4
    private, out = np.ones(count, np.float32), np.empty(count, np.float32)
    living = c.empty(count, np.float32)
    living[:] = 1
    sides: dict[str, ranks.Call] = {
        "mpi4py": lambda: comm.Allreduce(private, out),
        "private": lambda: c.allreduce(private, c.Sum),
        "window": lambda: c.allreduce(living, c.Sum),
    }
    if dist is not None:
        import torch

        tensor = torch.ones(count)
        sides["gloo"] = lambda: dist.all_reduce(tensor)
    return sides


def measured(size: int, quick: bool) -> dict[str, Any]:
    """Returns the figures of so many ranks."""
    words = ["-m", "benchmarks.collectives", *["--quick"] * quick]
    programs = {OURS: (sys.executable, *words)}
    peers = launches.pythons()
    programs |= {python: (python, "-m", "benchmarks.launches") for python in peers}
    with launches.side_by_side(size, programs, **{RANK: str(29_500 + size)}) as found:
        mpis = {short_name(launch.version): launch for launch in found.values()}
        sides = [(mpi, launch, "mpi4py") for mpi, launch in mpis.items()]
        own = [name for name in ("private", "window", "gloo") if name != "gloo" or has_torch()]
        sides += [(name, found[OURS], name) for name in own]
        rows = [row(sides, nbytes, quick) for nbytes in BYTES]
        versions = {name: number_of(launch.version) for name, launch in mpis.items()}
    result: dict[str, Any] = ranks.read(found[OURS].output.result())
    return {"ranks": size, "mpis": versions, "allreduce": rows, **result}


def row(sides: list[tuple[str, launches.Launch, str]], nbytes: int, quick: bool) -> dict[str, Any]:
    calls = 100 if nbytes <= 64 << 10 else 20 if nbytes <= 1 << 20 else 2
    repeats = 30 if nbytes <= 4 << 20 else 15 if nbytes < 64 << 20 else 7
    taken: dict[str, list[float]] = {name: [] for name, _, _ in sides}
    for turn in range(WARM_UP + repeats // (4 if quick else 1) + 1):
        for name, launch, side in sides:
            seconds = launch.turn(side, nbytes, calls)
            if turn >= WARM_UP:
                taken[name].append(seconds)
    return {
        "nbytes": nbytes,
        "seconds": {name: statistics.median(times) for name, times in taken.items()},
        "minimum": {name: min(times) for name, times in taken.items()},
    }


def short_name(version: str) -> str:
    """Returns the name of an MPI, from what it says of itself."""
    known = {"Open MPI": "Open MPI", "Intel": "Intel MPI", "MPICH": "MPICH"}
    return next((name for word, name in known.items() if word in version), version[:20])


def number_of(version: str) -> str:
    """Returns the number in what an MPI says of itself."""
    found = re.search(r"\d+(\.\d+)+", version)
    return found[0] if found else "?"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def fastest(row: dict[str, Any], mpis: Mapping[str, str]) -> float:
    """Returns the seconds of the fastest MPI."""
    return min(float(row["seconds"][mpi]) for mpi in mpis)


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


def section(result: dict[str, Any]) -> str:
    """Returns the table of one number of ranks."""
    mpis = result["mpis"]
    names = [*mpis, "private", "window", *(["gloo"] if result["gloo"] else [])]
    titles = [TITLES.get(name, name) for name in names]
    head = ["bytes", *(f"{title} µs" for title in titles), "ordinary ÷ fastest", "window ÷ fastest"]
    lines = []
    for row in result["allreduce"]:
        seconds, base = row["seconds"], fastest(row, mpis)
        times = [f"{seconds[name] * 1e6:,.1f}" for name in names]
        ratios = [f"{seconds[name] / base:.2f}" for name in ("private", "window")]
        lines.append([f"{row['nbytes']:,}", *times, *ratios])
    group, late = result["grouping"], result["late"]
    return (
        f"{result['ranks']} ranks:\n\n{results.markdown(head, lines)}\n\n"
        f"{TENSORS} tensors of {TENSOR_BYTES // 1024} KiB on {result['ranks']} ranks: "
        f"{group['grouped'] * 1e3:.1f} ms in one group, {group['one by one'] * 1e3:.1f} ms one by "
        f"one. CPU of a core while one rank is 1 s late: allranks {late['ours']:.0%}, blocking "
        f"mpi4py {late['mpi4py']:.0%}."
    )


def table(result: dict[str, Any]) -> str:
    mpis = ", ".join(f"{name} {number}" for name, number in result["runs"][0]["mpis"].items())
    intro = (
        "An allreduce of float32 on the ranks of one host, compared with mpi4py's `Allreduce` on "
        f"each MPI that is installed: {mpis}. allranks runs on Open MPI, with all checks; ordinary "
        "arrays are arrays of numpy, those in the window are arrays of `empty()`. The ratios are "
        "to the fastest MPI of the row; below 1, allranks is faster. Each MPI has its own ranks "
        "under its own mpiexec. All stay alive and take turns; the ranks whose turn it is not "
        "sleep, and each rank keeps to one core. Medians of the slowest rank's times."
    )
    return "\n\n".join([intro, *map(section, result["runs"])])


def at_a_glance(result: dict[str, Any]) -> str:
    """Returns the README's sentence: the ratio to the fastest MPI."""
    run = result["runs"][0]
    rows = {row["nbytes"]: row for row in run["allreduce"]}
    first, *others = [
        (rows[nbytes]["seconds"]["private"] / fastest(rows[nbytes], run["mpis"]), text)
        for nbytes, text in GLANCE.items()
    ]
    *mpis, last = run["mpis"]
    return (
        f"An allreduce of {first[1]} on {run['ranks']} ranks takes {first[0]:.2f} times as long as "
        f"with mpi4py on the fastest of {', '.join(mpis)} and {last}, as all ranks compare their "
        "calls first; "
        + ", ".join(f"one of {text} {ratio:.2f} times" for ratio, text in others)
        + f" (numpy arrays, measured {result['date']})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    if RANK in os.environ:
        on_ranks(options.quick, int(os.environ[RANK]))
        return
    described = results.machine()
    runs = [measured(size, options.quick) for size in options.sizes]
    print(table(results.write("collectives", described, {"runs": runs})))


if __name__ == "__main__":
    main()
