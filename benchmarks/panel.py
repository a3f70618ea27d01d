"""The cost of the live panel: bytes to the front end, and CPU time of the kernel.

    python -m benchmarks.panel                      this checkout
    python -m benchmarks.panel --before FOLDER      and another one, in turns

Ranks make twenty steps a second, each with an allreduce and three logged values, and print a line
a second. The same cell is measured with ``--view plain``, with the panel and with ``--view full``.
The cost of the panel is the difference from ``--view plain``. Prints a table and
writes benchmarks/results/panel.json.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import dashboard, frontend, results
from benchmarks.frontend import ROOT, Failed, FrontEnd

RANKS = (4, 64)
VIEWS = ("plain", "auto", "full")
ROUNDS = 3
SECONDS, SETTLE_SECONDS = 20.0, 4.0
_START_SECONDS = 300.0
# The collective makes all ranks stop at the same step.
CELL = """%%distributed --view {view}
import os, time
import numpy as np
began = time.time()
step, gradient = 0, np.zeros(1000, np.float32)
while gradient[0] < 1:
    step += 1
    time.sleep(max(0.0, began + 0.05 * step - time.time()))
    gradient[0] = rank == 0 and os.path.exists("enough")
    gradient = allreduce(gradient, op=Max, name="gradients")
    log(step=step, loss=1 / step + 0.01 * rank, accuracy=1 - 1 / step, rate=0.001)
    if step % 20 == 0:
        print(f"step {{step}}: loss {{1 / step + 0.01 * rank:.4f}}")
if rank == 0: print("steps a second:", step / (time.time() - began))
"""
WHERE = "import allranks; print(allranks.__file__)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.panel", description=__doc__)
    parser.add_argument("--before", type=Path, help="the folder of another checkout")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--views", nargs="+", default=VIEWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    described = results.machine()
    sides = {"now": ROOT} | ({"before": chosen.before.resolve()} if chosen.before else {})
    samples: list[dict[str, Any]] = []
    for turn in range(chosen.rounds):
        for ranks in chosen.ranks:
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                for one in _kernel(sides[side], ranks, turn, chosen.views):
                    samples.append({"side": side, **one})
                    sys.stderr.write(f"{samples[-1]}\n")
    measured = {"seconds": SECONDS, "samples": samples}
    print(table(results.write("panel", described, measured)))


def table(result: dict[str, Any]) -> str:
    rows = []
    sizes = sorted({one["ranks"] for one in result["samples"]})
    sides = list(dict.fromkeys(one["side"] for one in result["samples"]))
    for size in sizes:
        for side in sides:
            for view in VIEWS:
                of = [
                    one
                    for one in result["samples"]
                    if (one["ranks"], one["side"], one["view"]) == (size, side, view)
                ]
                if of:
                    rows.append([_named(size, side, view), *_row(of, _plain(result, size, side))])
    head = [
        "",
        "to the front end, kB per minute",
        "the kernel's CPU, % of a core",
        "the panel's part",
        "steps per second",
    ]
    rounds = len({one["turn"] for one in result["samples"]})
    return (
        "The live panel of ranks that make up to twenty steps a second, each with an allreduce and "
        "three logged values, and print a line a second: median of "
        f"{rounds} samples of {result['seconds']:g} s. The panel's part is the difference from "
        "`--view plain`.\n\n" + results.markdown(head, rows)
    )


def _named(size: int, side: str, view: str) -> str:
    return f"{size} ranks, `--view {view}`" + (", before" if side == "before" else "")


def _plain(result: dict[str, Any], size: int, side: str) -> dict[int, float]:
    return {
        one["turn"]: one["cpu_share"]
        for one in result["samples"]
        if (one["ranks"], one["side"], one["view"]) == (size, side, "plain")
    }


def _row(samples: list[dict[str, Any]], plain: dict[int, float]) -> list[str]:
    def middle(key: str) -> float:
        return statistics.median(one[key] for one in samples)

    more = statistics.median(one["cpu_share"] - plain[one["turn"]] for one in samples)
    return [
        f"{60 * middle('nbytes_a_second') / 1e3:,.0f}",
        f"{100 * middle('cpu_share'):.1f}",
        "–" if samples[0]["view"] == "plain" else f"{100 * more:.1f}",
        f"{middle('steps_a_second'):.1f}",
    ]


def _kernel(checkout: Path, ranks: int, turn: int, views: list[str]) -> list[dict[str, Any]]:
    """Returns a sample of every view, from one kernel with the package of the checkout."""
    with frontend.front_end({"PYTHONPATH": str(checkout)}) as end:
        found = Path(end.do(WHERE).stdout.strip())
        if not found.is_relative_to(checkout):
            raise Failed(f"expected the package of {checkout}, found {found}")
        end.do(frontend.LOAD)
        end.do(frontend.START.format(n=ranks), _START_SECONDS)
        at = turn % len(views)
        samples = [_look(end, view) for view in [*views[at:], *views[:at]]]
        end.do(frontend.STOP)
    return [{"ranks": ranks, "turn": turn, **one} for one in samples]


def _look(end: FrontEnd, view: str) -> dict[str, Any]:
    """Runs the cell with a simulated page, and measures after the panel has appeared."""
    enough = end.cwd / "enough"
    enough.unlink(missing_ok=True)
    cell = end.start(CELL.format(view=view))
    if view != "plain":
        dashboard.listen(end, cell)
    end.pump(lambda: "step 20:" in cell.text, 120, "the cell's first second", cell)
    end.drain(SETTLE_SECONDS)
    kernel = psutil.Process(end.pid)
    began, busy, nbytes = time.perf_counter(), _busy(kernel), end.nbytes
    end.drain(SECONDS)
    took, busy, nbytes = time.perf_counter() - began, _busy(kernel) - busy, end.nbytes - nbytes
    enough.touch()
    cell.wait(120)
    return {
        "view": view,
        "nbytes_a_second": nbytes / took,
        "cpu_share": busy / took,
        "steps_a_second": float(re.findall(r"steps a second: ([\d.]+)", cell.text)[-1]),
    }


def _busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
