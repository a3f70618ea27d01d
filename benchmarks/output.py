"""Every rank prints many lines: time, bytes to the front end, and kept lines."""

from __future__ import annotations

import statistics
import threading
from typing import Any

from benchmarks import frontend, results
from benchmarks.frontend import FrontEnd

RANKS = 4
LINES = 100_000
REPETITIONS = 3
_SETTLE_SECONDS = 1.0
_SAMPLE_SECONDS = 0.05
_CELL = f"for i in range({LINES}): print(f'rank {{rank}} line {{i:06}}')"
_WARM_UP = "print('rank', rank)"
# The lines of each engine's output that ipyparallel keeps after the cell.
_KEPT_BY_PEER = """
for _out in get_ipython().find_line_magic("pxresult").__self__.last_result.stdout:
    print(_out.count("\\n"))
"""


def main() -> None:
    described = results.machine()
    samples: dict[str, list[dict[str, float]]] = {"allranks": [], "ipyparallel": []}
    for _ in range(REPETITIONS):
        samples["allranks"].append(_allranks())
        samples["ipyparallel"].append(_ipyparallel())
    measured = {"ranks": RANKS, "lines_a_rank": LINES, "samples": samples}
    print(table(results.write("output", described, measured)))


def table(result: dict[str, Any]) -> str:
    ours, theirs = (result["samples"][peer] for peer in ("allranks", "ipyparallel"))
    printed = result["ranks"] * result["lines_a_rank"]

    def row(title: str, key: str, unit: float, digits: int) -> list[str]:
        middle = [statistics.median(sample[key] / unit for sample in s) for s in (ours, theirs)]
        return [title, *(f"{value:,.{digits}f}" for value in middle)]

    rows = [
        row("seconds", "seconds", 1, 1),
        row("sent to the front end, MB", "sent_nbytes", 1e6, 2),
        row("kernel's memory after − before, MB", "growth_nbytes", 1e6, 1),
        row("maximum of the kernel's memory − before, MB", "peak_nbytes", 1e6, 1),
        row("lines on the screen (the others are counted)", "shown_lines", 1, 0),
        row(f"lines kept, of {printed:,}", "kept_lines", 1, 0),
    ]
    return (
        f"{result['ranks']} ranks print {result['lines_a_rank']:,} lines each: "
        f"median of {len(ours)}.\n\n"
        + results.markdown(["", "`%%distributed`", "`%%px`, streaming"], rows)
    )


def at_a_glance(result: dict[str, Any]) -> list[str]:
    sides = [[sample["seconds"] for sample in samples] for samples in result["samples"].values()]
    what = f"{result['ranks']} ranks print {result['lines_a_rank']:,} lines each"
    return results.compared(f"{what}, until the last is shown", *sides, "s")


def _allranks() -> dict[str, float]:
    with frontend.front_end() as end:
        end.do(frontend.LOAD)
        end.do(frontend.START.format(n=RANKS))
        sample = _flood(end, "%%distributed\n")
        kept = 0
        for log in end.cwd.rglob("rank-*.log"):
            rank = log.stem.removeprefix("rank-")
            lines = [line for line in log.read_text().splitlines() if " line " in line]
            wanted = [f"rank {rank} line {i:06}" for i in range(LINES)]
            kept += LINES if lines == wanted else len(set(lines) & set(wanted))
        end.do(frontend.STOP)
    return {**sample, "kept_lines": kept}


def _ipyparallel() -> dict[str, float]:
    with frontend.front_end() as end:
        frontend.start_peer(end, RANKS)
        sample = _flood(end, "%%px\n")
        kept = sum(map(int, end.do(_KEPT_BY_PEER).stdout.split()))
        end.do(frontend.STOP_PEER)
    return {**sample, "kept_lines": kept}


def _flood(end: FrontEnd, magic: str) -> dict[str, float]:
    """Runs the cell; returns its time, the sent bytes and the growth of the kernel."""
    end.do(magic + _WARM_UP)
    end.drain(_SETTLE_SECONDS)
    before, sent_before = end.rss(), end.nbytes
    highest, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            highest[0] = max(highest[0], end.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cell = end.do(magic + _CELL)
        end.drain(_SETTLE_SECONDS)
    finally:
        over.set()
        watcher.join()
    return {
        "seconds": cell.seconds,
        "sent_nbytes": end.nbytes - sent_before,
        "growth_nbytes": end.rss() - before,
        "peak_nbytes": highest[0] - before,
        "shown_lines": cell.text.count("\n"),
    }
