"""Compares predicted times of simulated ranks with real ranks, and measures simulated cells.

    python -m benchmarks.simulated_ranks [--sizes 2 3 4] [--hosts] [--rounds 3]

The same programs run on real ranks and, with the network "here", on simulated ones. That network is
measured with other programs: loops of one call, or of computing and a barrier, with other sizes.
A time is that of a step in a loop of steps, on the slowest rank: the median of some loops after a
first one. In each round the real ranks start anew some times, and the network is measured anew; the
medians of all starts, and of all rounds, are compared. With ``--hosts`` the ranks are also on two
hosts of namespaces (as root; tests/hosts lists other requirements) with links of 1 Gbit/s. Prints
tables in Markdown and writes benchmarks/results/simulated_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from IPython.core.interactiveshell import InteractiveShell

from allranks.features.simulate.notebook import as_time
from benchmarks import results

ROOT = Path(__file__).resolve().parents[1]
_LOOPS, _SIMULATED_LOOPS = 9, 3
_STARTS = 3
"""Starts of the real ranks in a round."""
_GOOD = 0.15
_ON_HOST = "--on-host"
_WHERE = "ssh:h0:2,h1:2"
_SOURCE = """
import time
import numpy as np
right, left = (rank + 1) % size, (rank - 1) % size
{prepare}
def step():
    {step}
times = []
for _ in range({loops} + 1):
    barrier()
    began = time.perf_counter()
    for _ in range({steps}):
        step()
    times.append((time.perf_counter() - began) / {steps})
times[1:]
"""


_WARM_UP = """
import time
began = time.perf_counter()
while comm.bcast(time.perf_counter() - began < 0.5):
    barrier()
None
"""
"""Other processes are still busy just after a start."""


class Program(NamedTuple):
    """What is measured: a preparation, a step, and the number of steps in a loop."""

    prepare: str
    step: str
    steps: int

    def source(self, loops: int) -> str:
        return _SOURCE.format(prepare=self.prepare, step=self.step, steps=self.steps, loops=loops)


def _allreduce(nbytes: int, steps: int) -> Program:
    return Program(f"x = np.ones({nbytes // 8})", "allreduce(x, op=Sum)", steps)


def _ring(nbytes: int, steps: int) -> Program:
    prepare = f"x, y = np.ones({nbytes // 8}), np.empty({nbytes // 8})"
    return Program(prepare, "comm.Sendrecv(x, right, 0, y, left, 0)", steps)


_TRAINING = """
draw = np.random.default_rng(rank)
x, y = draw.random(({batch}, {inputs})), draw.random(({batch}, 10))
shapes = [({inputs}, {width}), ({width}, {width}), ({width}, 10)]
weights = [0.1 * draw.random(shape) for shape in shapes]
def train():
    layers = [x]
    for w in weights[:-1]:
        layers.append(np.tanh(layers[-1] @ w))
    error = (layers[-1] @ weights[-1] - y) / len(x)
    for at in reversed(range(len(weights))):
        gradient = layers[at].T @ error
        if at:
            error = (error @ weights[at].T) * (1 - layers[at] ** 2)
        weights[at] -= 1e-4 * allreduce(gradient, op=Average)
"""
_UNEQUAL = "[x.T @ np.tanh(x @ x) for _ in range(rank + 1)]; barrier()"
_STENCIL = """x[1:-1] = (x[2:] + x[:-2]) / 2
    comm.Sendrecv(x[1], left, 0, y, right, 0)
    comm.Sendrecv(x[-2], right, 1, y, left, 1)"""
PROGRAMS = {
    "allreduce of 1 KB": _allreduce(1 << 10, 300),
    "allreduce of 64 KB": _allreduce(64 << 10, 200),
    "allreduce of 1 MB": _allreduce(1 << 20, 50),
    "allreduce of 16 MB": _allreduce(16 << 20, 4),
    "ring of 1 KB": _ring(1 << 10, 300),
    "ring of 64 KB": _ring(64 << 10, 200),
    "ring of 1 MB": _ring(1 << 20, 50),
    "ring of 16 MB": _ring(16 << 20, 4),
    "ring of a small object": Program(
        "x = list(range(10))", "comm.send(x, right); comm.recv(source=left)", 200
    ),
    "training step, 2 MB of weights a layer": Program(
        _TRAINING.format(batch=256, inputs=512, width=512), "train()", 3
    ),
    "training step, 64 KB of weights a layer": Program(
        _TRAINING.format(batch=32, inputs=64, width=90), "train()", 60
    ),
    "matrix products, one more on each rank": Program("x = np.random.rand(320, 320)", _UNEQUAL, 4),
    "stencil of 5 MB with two neighbours": Program(
        "x, y = np.random.rand(800, 800), np.empty(800)", _STENCIL, 10
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
_HEADING = (
    "Simulated ranks with the network `here`: the time of a step on real ranks, in brackets its "
    "shortest and longest one after different starts, and the difference of the predicted time. "
    "The two hosts have two ranks each, are namespaces of one machine, and have links of 1 Gbit/s."
)
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
        names = self._shell.user_ns
        names.pop("found", None)
        with redirect_stdout(StringIO()) as shown:
            options = f"{options} --view plain -o found"
            self._shell.run_cell_magic("distributed", options, f"{source}\n")
        if "found" not in names:
            raise RuntimeError(shown.getvalue())
        found: list[Any] = names["found"]
        return found


def slowest(times: list[list[float]]) -> float:
    return float(np.median(np.max(times, axis=0)))


def compare(cells: Cells, wheres: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """Compares on ranks at some places, each with its number of ranks."""
    times: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[], []])
    for _ in range(rounds):
        for where in [*wheres] * _STARTS:
            cells.command(f"restart {where} --gpus none")
            cells.run("", _WARM_UP)
            for name, program in PROGRAMS.items():
                found = slowest(cells.run("--no-fold", program.source(_LOOPS)))
                times[where, name][0].append(found)
                print(f"{where}: {name} takes {as_time(found)}", file=sys.stderr)
        cells.command("stop")  # also forgets what was measured of the network
        for where, size in wheres.items():
            simulated = f"{where if 'ssh' in where else ''} -n {size} --simulate --network here"
            for name, program in PROGRAMS.items():
                found = slowest(cells.run(simulated, program.source(_SIMULATED_LOOPS)))
                times[where, name][1].append(found)
                print(f"{where}: {name} is predicted to take {as_time(found)}", file=sys.stderr)
    return [
        {
            "ranks": wheres[where],
            "where": where,
            "name": name,
            "measured": statistics.median(real),
            "predicted": statistics.median(predicted),
            "all": [real, predicted],
        }
        for (where, name), (real, predicted) in times.items()
    ]


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


def on_hosts(rounds: int) -> list[dict[str, Any]]:
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
        words += ["--rounds", str(rounds)]
        done = subprocess.run(
            hosts.command("h0", words, ROOT), stdout=subprocess.PIPE, text=True, check=True
        )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table(result: dict[str, Any]) -> str:
    """The predictions in Markdown, for docs/benchmarks.md."""
    found: dict[str, dict[str, str]] = {}
    for row in result["compared"]:
        where = _place(row)
        error, real = row["predicted"] / row["measured"] - 1, row["all"][0]
        spread = f"{as_time(min(real))} – {as_time(max(real))}"
        text = f"{as_time(row['measured'])} ({spread}), {error:+.0%}"
        found.setdefault(row["name"], {})[where] = text.replace("-", "−").replace("%", " %")
    places = list(next(iter(found.values())))
    shown = results.markdown(
        ["a step", *places], [[name, *row.values()] for name, row in found.items()]
    )
    lines = [f"{_HEADING}\n\n{shown}\n", *(_count(where, result["compared"]) for where in places)]
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> str:
    return "two hosts" if "ssh" in row["where"] else f"{row['ranks']} ranks"


def _count(place: str, compared: list[dict[str, Any]]) -> str:
    rows = [row for row in compared if _place(row) == place]
    good = [row for row in rows if abs(row["predicted"] / row["measured"] - 1) <= _GOOD]
    among = [
        row
        for row in rows
        if row not in good and min(row["all"][0]) <= row["predicted"] <= max(row["all"][0])
    ]
    return (
        f"{place}: of {len(rows)} programs, {len(good)} differ by at most {_GOOD:.0%}, and "
        f"{len(among)} more are between the measured times of two starts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(_ON_HOST, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    about = results.machine()
    cells = Cells()
    if chosen.on_host:
        print(json.dumps(compare(cells, {f"--on {_WHERE}": 4}, chosen.rounds)))
        return
    compared = compare(cells, {f"-n {size}": size for size in chosen.sizes}, chosen.rounds)
    if chosen.hosts:
        compared += on_hosts(chosen.rounds)
    many = cells_of_many(cells, 1024)
    cells.command("stop")
    print(table({"compared": compared}))
    lines = [
        [row["name"], f"{row['seconds']:.2f} s", f"{row['rss_nbytes'] / 1e6:.0f} MB"]
        for row in many
    ]
    print("\n" + results.markdown(["1,024 simulated ranks", "time of the cell", "memory"], lines))
    results.write("simulated_ranks", about, {"compared": compared, "many": many})


if __name__ == "__main__":
    main()
