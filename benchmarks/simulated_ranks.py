"""Compares predicted times of simulated ranks with real ranks, and measures simulated cells.

    python -m benchmarks.simulated_ranks [--sizes 2 3 4] [--hosts] [--quick]

The same programs run on real ranks and, with the network "here", on simulated ones. That network is
measured with other sizes of messages and arrays. A time is that of the slowest rank; a figure is
the lowest quintile of the repetitions, as other programs only add time. Other programs also make
the machine slower for a while, so the network is measured, the real and the simulated ranks run by
turns, several times, and the lowest figures are compared. With ``--hosts`` the ranks are on two
hosts of namespaces (as root; tests/hosts lists other requirements) with links of 1 Gbit/s. Prints
tables in Markdown and writes benchmarks/results/simulated_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from IPython.core.interactiveshell import InteractiveShell

from benchmarks import results

ROOT = Path(__file__).resolve().parents[1]
_ON_HOST = "--on-host"
_WHERE = "ssh:h0:2,h1:2"
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
_MEMORY = "import psutil\nfound = psutil.Process().memory_info().rss"


class Cells:
    """Runs cells in this process, as a notebook does."""

    def __init__(self) -> None:
        self._shell = InteractiveShell.instance()
        self._shell.run_line_magic("load_ext", "allranks")

    def command(self, line: str) -> None:
        self._shell.run_line_magic("distributed", line)

    def run(self, options: str, source: str) -> list[Any]:
        """Returns the value of the last expression on each rank."""
        self._shell.run_cell_magic("distributed", f"{options} --view plain -o found", f"{source}\n")
        found: list[Any] = self._shell.user_ns["found"]
        return found


def figure(times: list[list[float]]) -> float:
    return float(np.quantile(np.max(times, axis=0), 0.2))


def compare(cells: Cells, where: str, size: int, repeats: int, rounds: int) -> list[dict[str, Any]]:
    real: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    predicted: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        cells.command(f"restart {where} --gpus none")
        for name, (prepare, step) in PROGRAMS.items():
            source = _PROGRAM.format(prepare=prepare, step=step, repeats=repeats) + "\n"
            real[name].append(figure(cells.run("--no-fold", source)))
        cells.command("stop")  # also forgets what was measured of the network
        for name, (prepare, step) in PROGRAMS.items():
            source = _PROGRAM.format(prepare=prepare, step=step, repeats=repeats)
            simulated = f"{where if 'ssh' in where else ''} -n {size} --simulate --network here"
            predicted[name].append(figure(cells.run(simulated, source)))
    return [
        {"ranks": size, "where": where, "name": name, "measured": min(real[name]),
         "predicted": min(predicted[name]), "all": [real[name], predicted[name]]}
        for name in PROGRAMS
    ]  # fmt: skip


def cells_of_many(cells: Cells, size: int) -> list[dict[str, Any]]:
    rows = []
    for name, source in CELLS.items():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            cells.run(f"-n {size} --simulate", f"{source}\nNone")
            times.append(time.perf_counter() - began)
        nbytes = cells.run(f"-n {size} --simulate", f"{_MEMORY}\nfound if rank == 0 else None")[0]
        rows.append({"name": name, "seconds": sorted(times)[1], "rss_nbytes": nbytes})
    return rows


def on_hosts(quick: bool) -> list[dict[str, Any]]:
    """Compares on two hosts of namespaces with two ranks each."""
    from tests.hosts.hosts import Hosts, missing

    if why := missing():
        print(why)
        return []
    with Hosts(2) as hosts:
        for name in hosts.names:
            script = str(ROOT / "tests" / "hosts" / "hosts.sh")
            subprocess.run([script, "rate", name, "1gbit"], env=hosts.environment, check=True)
        words = [sys.executable, "-m", "benchmarks.simulated_ranks", _ON_HOST]
        words += ["--quick"] if quick else []
        done = subprocess.run(
            hosts.command("h0", words, ROOT), stdout=subprocess.PIPE, text=True, check=True
        )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        where = "two hosts" if "ssh" in row["where"] else "one host"
        times = (f"{row[side] * 1e3:.3g} ms" for side in ("measured", "predicted"))
        lines.append([str(row["ranks"]), where, row["name"], *times, f"{error:+.0%}"])
    return results.markdown(["ranks", "on", "", "measured", "predicted", "difference"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(_ON_HOST, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    repeats, rounds = (20, 1) if chosen.quick else (40, 3)
    about = results.machine()
    cells = Cells()
    if chosen.on_host:
        print(json.dumps(compare(cells, f"--on {_WHERE}", 4, repeats, rounds)))
        return
    compared = []
    for size in chosen.sizes:
        compared += compare(cells, f"-n {size}", size, repeats, rounds)
    if chosen.hosts:
        compared += on_hosts(chosen.quick)
    many = cells_of_many(cells, 1024)
    cells.command("stop")
    print(table(compared))
    lines = [
        [row["name"], f"{row['seconds']:.2f} s", f"{row['rss_nbytes'] / 1e6:.0f} MB"]
        for row in many
    ]
    print("\n" + results.markdown(["1,024 simulated ranks", "time of the cell", "memory"], lines))
    results.write("simulated_ranks", about, {"compared": compared, "many": many})


if __name__ == "__main__":
    main()
