"""The round trip of an empty cell: from the front end's request until the kernel is idle."""

from __future__ import annotations

from typing import Any

from benchmarks import frontend, results
from benchmarks.frontend import FrontEnd

SIZES = (1, 2, 4, 8, 16)
BLOCKS = 10
CELLS_A_BLOCK = 6
_WARM_UP = 5
CELLS = {
    "allranks": "%%distributed\npass",
    "ipyparallel": "%%px\npass",
    # The time of a plain cell, a lower limit for any magic.
    "kernel": "pass",
}


def main() -> None:
    described = results.machine()
    samples = {}
    with frontend.front_end() as end:
        end.do(frontend.LOAD)
        for n in SIZES:
            samples[str(n)] = _at(end, n)
    print(table(results.write("cells", described, {"unit": "ms", "samples": samples})))


def _at(end: FrontEnd, n: int) -> dict[str, list[float]]:
    # The two sides run in turns, block by block, so that other load affects both.
    end.do(frontend.START.format(n=n))
    frontend.start_peer(end, n)
    for cell in CELLS.values():
        for _ in range(_WARM_UP):
            end.do(cell)
    samples: dict[str, list[float]] = {peer: [] for peer in CELLS}
    for _ in range(BLOCKS):
        for peer, cell in CELLS.items():
            end.do(cell)  # the first cell after a change of sides is not counted
            samples[peer] += [1000 * end.do(cell).seconds for _ in range(CELLS_A_BLOCK)]
    end.do(frontend.STOP)
    end.do(frontend.STOP_PEER)
    return samples


def table(result: dict[str, Any]) -> str:
    rows = []
    for n, peers in result["samples"].items():
        figures = [results.middle_and_least(peers[peer]) for peer in CELLS]
        faster = results.times_faster(peers["ipyparallel"], peers["allranks"])
        rows.append([n, *figures, faster])
    count = len(next(iter(result["samples"].values()))["allranks"])
    return (
        f"Round trip of a cell with `pass`, in milliseconds: median (minimum) of {count}.\n\n"
        + results.markdown(["ranks", "`%%distributed`", "`%%px`", "no magic", "times faster"], rows)
    )


def at_a_glance(result: dict[str, Any]) -> list[str]:
    n = str(min(4, max(map(int, result["samples"]))))
    peers = result["samples"][n]
    what = f"round trip of a cell with `pass` on {n} ranks"
    return results.compared(what, peers["allranks"], peers["ipyparallel"], "ms")
