"""Compares predicted times of simulated ranks with real ranks, and measures simulated cells.

    python -m benchmarks.simulated_ranks [--sizes 2 3 4] [--quick]

The same programs run on real ranks and, with the network "here", on simulated ones. That network is
measured with other sizes of messages and arrays, on 2 and 4 ranks. A time is that of the slowest
rank; a figure is the lowest quintile of the repetitions, as other programs only add time. Prints
tables in Markdown and writes benchmarks/results/simulated_ranks.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from IPython.core.interactiveshell import InteractiveShell

from benchmarks import results

_PROGRAM = """
import time
import numpy as np
{prepare}
times = []
for _ in range({repeats}):
    barrier()
    began = time.perf_counter()
    {step}
    times.append(time.perf_counter() - began)
times
"""
#: What is measured: the preparation and the step.
PROGRAMS = {
    "allreduce of 64 KB": ("x = np.ones(8192)", "allreduce(x, op=Sum)"),
    "allreduce of 1 MB": ("x = np.ones(131072)", "allreduce(x, op=Sum)"),
    "ring of 256 KB": (
        "x, y = np.ones(32768), np.empty(32768)",
        "for _ in range(size): comm.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0)",
    ),
    "training step": (
        "x, w = np.random.rand(384, 384), np.random.rand(384, 384)",
        "g = x.T @ np.tanh(x @ w); w -= 1e-6 * allreduce(g)",
    ),
}
CELLS = {
    "print(rank)": "print(rank)",
    "allreduce of 1 KB": "import numpy as np\ny = allreduce(np.ones(128), op=Sum)",
    "a ring": "comm.send(rank, (rank + 1) % size)\nx = comm.recv(source=(rank - 1) % size)",
    "1,023 messages to rank 0": (
        "[comm.recv() for _ in range(size - 1)] if rank == 0 else comm.send(1, 0)"
    ),
}
_MEMORY = "import psutil\npsutil.Process().memory_info().rss"


class Cells:
    """Runs cells in this process, as a notebook does."""

    def __init__(self) -> None:
        self._shell = InteractiveShell.instance()
        self._shell.run_line_magic("load_ext", "allranks")

    def command(self, line: str) -> None:
        self._shell.run_line_magic("distributed", line)

    def run(self, options: str, source: str) -> list[Any]:
        """Returns the value of the last expression on each rank."""
        self._shell.run_cell_magic("distributed", f"{options} -o found", f"{source}\n")
        found: list[Any] = self._shell.user_ns["found"]
        return found


def figure(times: list[list[float]]) -> float:
    return float(np.quantile(np.max(times, axis=0), 0.2))


def compare(cells: Cells, size: int, repeats: int) -> list[dict[str, Any]]:
    cells.command(f"restart -n {size} --gpus none")
    rows = []
    for name, (prepare, step) in PROGRAMS.items():
        source = _PROGRAM.format(prepare=prepare, step=step, repeats=repeats)
        # By turns, so that a change of the machine's load meets both.
        real, predicted = [], []
        for _ in range(3):
            real.append(figure(cells.run("--no-fold", source)))
            predicted.append(figure(cells.run(f"-n {size} --simulate --network here", source)))
        measured, said = min(real), min(predicted)
        rows.append({"ranks": size, "name": name, "measured": measured, "predicted": said})
    return rows


def cells_of_many(cells: Cells, size: int) -> list[dict[str, Any]]:
    rows = []
    for name, source in CELLS.items():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            cells.run(f"-n {size} --simulate", source)
            times.append(time.perf_counter() - began)
        nbytes = cells.run(f"-n {size} --simulate", _MEMORY)[0]
        rows.append({"name": name, "seconds": sorted(times)[1], "rss_nbytes": nbytes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    about = results.machine()
    cells = Cells()
    repeats = 10 if chosen.quick else 40
    compared = [row for size in chosen.sizes for row in compare(cells, size, repeats)]
    many = cells_of_many(cells, 1024)
    cells.command("stop")
    print("| ranks | | measured | predicted | difference |\n| --- | --- | --- | --- | --- |")
    for row in compared:
        error = row["predicted"] / row["measured"] - 1
        print(
            f"| {row['ranks']} | {row['name']} | {row['measured'] * 1e3:.3g} ms | "
            f"{row['predicted'] * 1e3:.3g} ms | {error:+.0%} |"
        )
    print("\n| 1,024 simulated ranks | time of the cell | memory |\n| --- | --- | --- |")
    for row in many:
        print(f"| {row['name']} | {row['seconds']:.2f} s | {row['rss_nbytes'] / 1e6:.0f} MB |")
    results.write("simulated_ranks", about, {"compared": compared, "many": many})


if __name__ == "__main__":
    main()
