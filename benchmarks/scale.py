"""Costs against the number of hosts, which are namespaces of this machine (as root).

    python -m benchmarks.scale [--hosts 2 4 8 16] [--ranks N] [--seconds S]

The notebook's side runs beside the hosts and reaches them by a command. Measured are the start, a
cell `pass`, an allreduce of 4 bytes, the network traffic of each host while the ranks are idle and
while all but one wait, and how soon an exception, an interrupt and a death end the cell of all
ranks. All hosts share the machine's cores, so times grow with the number of processes. Traffic is
sent and received together, of the host with most of it. Prints a table in Markdown and writes
benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import ranks as output
from benchmarks import results

_INSIDE = "--inside"
_REDUCE = """
import time
import numpy as np
def seconds(calls):
    one, began = np.ones(1, np.float32), time.perf_counter()
    for _ in range(calls):
        allreduce(one, Sum)
    return (time.perf_counter() - began) / calls
seconds({})
"""
_CALLS = 100
_WAIT = "import time\nif rank == size - 1: time.sleep({})\nbarrier()"
BEFORE_SECONDS = 3
SETTLED_SECONDS = 10
"""A loaded machine takes seconds until all ranks of many hosts know which one they wait for."""
_RAISE = f"import time\nif rank == size - 1: time.sleep({BEFORE_SECONDS}); 1 / 0\nbarrier()"
_DIE = _RAISE.replace("1 / 0", "import os; os.kill(os.getpid(), 9)")


class Traffic(NamedTuple):
    """What a host has sent and received."""

    nbytes: int
    packets: int


def traffic(prefix: str) -> dict[str, Traffic]:
    """The traffic of each host, by the switch's counters."""
    found = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name.startswith(prefix):
            received, sent = numbers.split()[:8], numbers.split()[8:]
            found[f"h{name.removeprefix(prefix)}"] = Traffic(
                *(int(received[at]) + int(sent[at]) for at in (0, 1))
            )
    return found


def mb_a_minute(prefix: str, seconds: float) -> float:
    before, began = traffic(prefix), time.monotonic()
    time.sleep(seconds)
    after, took = traffic(prefix), time.monotonic() - began
    most = max(after[host].nbytes - before[host].nbytes for host in before)
    return most / took * 60 / 1e6


def seconds_of(what: Callable[[], object]) -> tuple[float, str]:
    """The seconds until a call ends, and the text of its error."""
    began, why = time.monotonic(), ""
    try:
        what()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, why


def inside(place: str, prefix: str, seconds: float) -> None:
    """Measures one number of hosts, where ``/proc/net/dev`` lists the switch's ports."""
    from allranks import Cluster

    began = time.monotonic()
    with Cluster(launcher=place, show_output=False) as cluster:
        found: dict[str, Any] = {"ranks": cluster.size, "start_s": time.monotonic() - began}
        cluster.run("pass")
        taken = [seconds_of(lambda: cluster.run("pass"))[0] for _ in range(9)]
        found["pass_ms"] = median(taken) * 1e3
        cluster.run(_REDUCE.format(3))
        before = traffic(prefix)
        found["allreduce_us"] = max(cluster.run(_REDUCE.format(_CALLS))) * 1e6
        after = traffic(prefix)
        most = max(after[host].packets - before[host].packets for host in before)
        found["allreduce_packets"] = most / _CALLS
        time.sleep(5)
        found["idle_mb_min"] = mb_a_minute(prefix, seconds)
        began_to_wait = Path(os.environ["ALLRANKS_LOG_DIR"], "waits")
        together = f"barrier()\nif rank == 0: open({str(began_to_wait)!r}, 'w').close()\n"
        waiting = cluster.submit(together + _WAIT.format(SETTLED_SECONDS + seconds + 5))
        while not began_to_wait.exists():
            time.sleep(0.1)
        time.sleep(SETTLED_SECONDS)
        found["waiting_mb_min"] = mb_a_minute(prefix, seconds)
        waiting.result()
        for name, cell, limit in (
            ("exception", _RAISE, None),
            ("interrupt", _WAIT.format(999), BEFORE_SECONDS),
            ("death", _DIE, None),
        ):
            took, why = seconds_of(lambda cell=cell, limit=limit: cluster.run(cell, timeout=limit))
            found |= {f"{name}_s": took - BEFORE_SECONDS, name: why}
    output.write(0, found)


def measure(hosts: int, ranks: int, seconds: float = 30) -> dict[str, Any]:
    from tests.hosts.hosts import HERE, Hosts

    with Hosts(hosts) as up:
        (up.shared / "allranks.toml").write_text(
            f'[boxes]\nreach = "{HERE}/hosts.sh on {{host}}"\n'
        )
        own = {
            "ALLRANKS_SITES": str(up.shared / "allranks.toml"),
            "ALLRANKS_ADDRESS": "10.77.0.1",
            "ALLRANKS_LOG_DIR": str(up.shared / "logs"),
            "PYTHONPATH": str(HERE.parent.parent),
        }
        place = "boxes:" + ",".join(f"{name}:{ranks}" for name in up.names)
        words = [sys.executable, "-m", "benchmarks.scale", _INSIDE, place, up.prefix]
        done = subprocess.run(
            up.beside([*words, "--seconds", str(seconds)], HERE.parent.parent),
            env=up.environment | own,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        left = up.left()
    return {"hosts": hosts, **output.read(done.stdout), "left": left}


HEAD = {
    "start_s": ("start s", ".1f"),
    "pass_ms": ("`pass` ms", ".0f"),
    "allreduce_us": ("allreduce of 4 B µs", ",.0f"),
    "allreduce_packets": ("its packets", ".1f"),
    "idle_mb_min": ("idle MB/min", ".2f"),
    "waiting_mb_min": ("waiting MB/min", ".2f"),
    "exception_s": ("exception s", ".2f"),
    "interrupt_s": ("interrupt s", ".2f"),
    "death_s": ("death s", ".2f"),
}


def table(result: dict[str, Any]) -> str:
    rows = []
    for run in result["runs"]:
        figures = [f"{run[name]:{form}}" for name, (_, form) in HEAD.items()]
        rows.append([f"{run['hosts']} × {run['ranks'] // run['hosts']}", *figures])
    return (
        "Costs against the number of hosts, which are namespaces of one machine and share its "
        "cores, so times grow with the number of processes. Traffic is what the host with most of "
        "it sends and receives, while ranks are idle, and while all but one wait, from 10 s after "
        "they have begun to. The last columns are the times until a cell has ended on all ranks "
        "after an exception on the last one, an interrupt, and the death of the last one.\n\n"
        + results.markdown(["hosts × ranks", *(title for title, _ in HEAD.values())], rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--seconds", type=float, default=30, help="of each count of traffic")
    parser.add_argument(_INSIDE, nargs=2, metavar=("PLACE", "PREFIX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(*options.inside, options.seconds)
        return
    from tests.hosts.hosts import missing

    if why := missing():
        print(why)
        return
    described, runs = results.machine(), []
    for hosts in options.hosts:
        runs.append(measure(hosts, options.ranks, options.seconds))
        print(json.dumps(runs[-1]), flush=True)
    print(table(results.write("scale", described, {"runs": runs})))


if __name__ == "__main__":
    main()
