"""The overhead of a member, and the load of four ranks with uneven members.

All sides run the same small function: a loop on one rank, members of ``%%ensemble``, ipyparallel's
load-balanced view and ``concurrent.futures``. Members sleep, so the number of cores is irrelevant.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks import frontend, results
from benchmarks.frontend import FrontEnd

RANKS = 4
COUNT = 64
ROUNDS = 5
# Seconds, between 0.05 and 0.75, the same in every run.
_SOURCE = random.Random(7)
UNEVEN = [round(_SOURCE.uniform(0.05, 0.75), 3) for _ in range(COUNT)]
WORK = "result = sum(range(x + 1000))"

SET_UP = f"""
import time
members, uneven = list(range({COUNT})), {UNEVEN}
slow = [dict(seconds=seconds) for seconds in uneven]

def work(x):
    return sum(range(x + 1000))

def sleep(seconds):
    import time
    time.sleep(seconds)
"""
LOOP = "%%distributed -r 0\nfor x in range({count}):\n    {work}"
ENSEMBLE = "%%ensemble x=0:{count} --view {view}\n{work}"
OURS = {
    "loop": LOOP.format(count=COUNT, work=WORK),
    "allranks": ENSEMBLE.format(count=COUNT, view="auto", work=WORK),
    "allranks, plain": ENSEMBLE.format(count=COUNT, view="plain", work=WORK),
}
PEERS = {
    "ipyparallel": ("_view.map_sync(work, members)", "_view.map_sync(sleep, uneven)"),
    "concurrent.futures": ("list(_pool.map(work, members))", "list(_pool.map(sleep, uneven))"),
}
START_POOL = f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
_pool = ProcessPoolExecutor({RANKS}, mp_context=multiprocessing.get_context("fork"))
list(_pool.map(work, range({RANKS})))
"""
LOAD_BALANCED = "_view = _client.load_balanced_view()\n_view.map_sync(work, members)"


def main() -> None:
    described = results.machine()
    with frontend.front_end() as end:
        # The pool forks, so it starts before the kernel has threads.
        end.do(SET_UP)
        end.do(START_POOL)
        end.do(frontend.LOAD)
        # One rank first, where the overhead is the difference from the plain loop.
        end.do(frontend.START.format(n=1))
        alone = _overhead(end, OURS)
        end.do(f"%distributed restart -n {RANKS}")
        frontend.start_peer(end, RANKS)
        end.do(LOAD_BALANCED)
        measured = {
            "members": COUNT,
            "ranks": RANKS,
            "uneven_seconds": UNEVEN,
            "ms_a_member": {
                "1": alone,
                str(RANKS): _overhead(end, OURS | {p: source for p, (source, _) in PEERS.items()}),
            },
            "utilisation": _utilisation(end),
        }
        end.do(frontend.STOP_PEER)
        end.do(frontend.STOP)
    print(table(results.write("ensemble", described, measured)))


def _overhead(end: FrontEnd, sources: dict[str, str]) -> dict[str, list[float]]:
    for source in sources.values():
        end.do(source)
    samples: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(ROUNDS):
        for name, source in sources.items():
            samples[name].append(1000 * end.do(source).seconds / COUNT)
    return samples


def _utilisation(end: FrontEnd) -> dict[str, list[float]]:
    """Returns for each round the members' own time as a share of the ranks' time."""
    sources = {
        "allranks": "%%ensemble slow\nimport time\ntime.sleep(seconds)",
        **{peer: source for peer, (_, source) in PEERS.items()},
    }
    samples: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(3):
        for name, source in sources.items():
            seconds = end.do(source).seconds
            samples[name].append(sum(UNEVEN) / (RANKS * seconds))
    return samples


def table(result: dict[str, Any]) -> str:
    spent, used, ranks = result["ms_a_member"], result["utilisation"], str(result["ranks"])
    names = {
        "loop": "a loop on one rank",
        "allranks": "`%%ensemble`",
        "allranks, plain": "`%%ensemble --view plain`",
    }
    rows = []
    for name in spent[ranks]:
        cells = [names.get(name, f"`{name}`")]
        for size in ("1", ranks):
            found = spent[size].get(name)
            cells.append(results.middle_and_least(found) if found else "–")
        share = f"{100 * statistics.median(used[name]):.0f} %" if name in used else "–"
        rows.append([*cells, share])
    count = result["members"]
    least, most = min(result["uneven_seconds"]), max(result["uneven_seconds"])
    rounds = len(spent[ranks]["loop"])
    return (
        f"{count} members with almost no work: milliseconds per member, median (minimum) of "
        f"{rounds}, on one rank and on {ranks}. Then {count} members that sleep between {least:g} "
        f"and {most:g} s: their share of the time of {ranks} ranks.\n\n"
        + results.markdown(["", "1 rank", f"{ranks} ranks", "share"], rows)
    )


def at_a_glance(result: dict[str, Any]) -> list[str]:
    ranks = str(result["ranks"])
    spent = result["ms_a_member"][ranks]
    what = f"each of many tiny tasks (an ensemble) on {ranks} ranks"
    return results.compared(what, spent["allranks"], spent["ipyparallel"], "ms")


if __name__ == "__main__":
    main()
