"""The live view: bytes sent to the page, limit of logged values, cost in a training loop."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks import frontend, results
from benchmarks.frontend import FrontEnd

RANKS = 2
ROUNDS = 9
FLOOD_SECONDS = 4.0

SETUP = """%%distributed
import time
import numpy as np

def train(steps, logs):
    weights, data = np.zeros((256, 64), np.float32), np.ones((512, 256), np.float32)
    began = time.perf_counter()
    for step in range(steps):
        for _ in range(4):
            error = data @ weights - 1
            gradient = allreduce(data.T @ error, name="gradient")
            weights -= 1e-6 * gradient
        if logs:
            log(step=step, loss=float((error * error).mean()), norm=float(gradient[0, 0]))
    return time.perf_counter() - began

def logging(calls):
    began = time.perf_counter()
    for step in range(calls):
        log(step=step, loss=0.5)
    return (time.perf_counter() - began) / calls

def flood(seconds):
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        log(step=count, loss=0.5)
        count += 1
    return count
"""
TRAIN = "%%distributed -o seconds --view {view}\ntrain({steps}, {logs})"
STEPS = 300
_SETTLE_SECONDS, _WATCHED_SECONDS = 0.3, 2.0
READ = "print(*{name})"


def main() -> None:
    described = results.machine()
    with frontend.front_end() as end:
        end.do(frontend.LOAD)
        end.do(frontend.START.format(n=RANKS))
        end.do(SETUP)
        measured = {
            "ranks": RANKS,
            "log_seconds": _log_cost(end),
            "training": _training(end),
            "page": _page(end),
            "flood": _flood(end),
        }
        end.do(frontend.STOP)
    print(table(results.write("dashboard", described, measured)))


def table(result: dict[str, Any]) -> str:
    training, page, flood = result["training"], result["page"], result["flood"]
    plain, live = statistics.median(training["plain"]), statistics.median(training["live"])
    shares = [b / a - 1 for a, b in zip(training["plain"], training["live"], strict=True)]
    rows = [
        ["one `log()` of one value, µs", f"{1e6 * statistics.median(result['log_seconds']):.1f}"],
        [f"training loop, plain, s (median of {len(training['plain'])})", f"{plain:.3f}"],
        ["training loop, logging, with the live view, s", f"{live:.3f}"],
        ["overhead, median of pairs", f"{100 * statistics.median(shares):+.1f} %"],
        ["first show, kB", f"{page['first_nbytes'] / 1e3:.0f}"],
        ["while it trains, kB a second", f"{page['nbytes_a_second'] / 1e3:.1f}"],
        ["values a second that get through", f"{flood['kept'] / flood['seconds']:,.0f}"],
    ]
    return f"{result['ranks']} ranks, a page that listens.\n\n" + results.markdown(["", ""], rows)


def _log_cost(end: FrontEnd) -> list[float]:
    end.do("%%distributed -o seconds\nlogging(20_000)")
    end.do("%%distributed -o seconds\nlogging(20_000)")
    return _read(end)


def _training(end: FrontEnd) -> dict[str, list[float]]:
    """Returns the seconds of the loop on its slowest rank; the two kinds run in turns."""
    samples: dict[str, list[float]] = {"plain": [], "live": []}
    for number in range(ROUNDS + 1):
        kinds = [("plain", "plain", 0), ("live", "full", 1)]
        for name, view, logs in kinds if number % 2 else kinds[::-1]:
            cell = end.start(TRAIN.format(view=view, steps=STEPS, logs=logs))
            if logs:
                listen(end, cell)
            cell.wait(120)
            if number:  # the first of each is a warm-up
                samples[name].append(max(_read(end)))
    return samples


def _page(end: FrontEnd) -> dict[str, float]:
    """Returns the bytes of the first display, and of every second after it."""
    before = end.nbytes
    cell = end.start(TRAIN.format(view="full", steps=20 * STEPS, logs=1))
    listen(end, cell)
    end.drain(_SETTLE_SECONDS)
    first = end.nbytes
    end.drain(_WATCHED_SECONDS)
    rate = (end.nbytes - first) / _WATCHED_SECONDS
    cell.wait(120)
    return {"first_nbytes": first - before, "nbytes_a_second": rate}


def _flood(end: FrontEnd) -> dict[str, float]:
    """Returns the numbers of values that were logged at full speed, and that were kept."""
    cell = end.start(f"%%distributed -o seconds --view full\nflood({FLOOD_SECONDS})")
    listen(end, cell)
    cell.wait(120)
    message = re.search(r"([\d,]+) values of .* came too fast", cell.text)
    dropped = int(message.group(1).replace(",", "")) if message else 0
    logged = sum(_read(end))
    return {"seconds": FLOOD_SECONDS, "logged": logged, "kept": logged - dropped}


def _read(end: FrontEnd) -> list[float]:
    return [float(word) for word in end.do(READ.format(name="seconds")).stdout.split()]


def listen(end: FrontEnd, cell: Any) -> None:
    """Sends the message that a page sends when it shows the panel."""
    opened: list[str] = []

    def is_open() -> bool:
        opened[:] = [
            comm["comm_id"]
            for comm in cell.comms
            if comm["msg_type"] == "comm_open" and "_esm" in comm["data"]["state"]
        ]
        return bool(opened)

    end.pump(is_open, 60, "the panel", cell)
    content = {"comm_id": opened[-1], "data": {"method": "custom", "content": {"kind": "ready"}}}
    session = end._client.session
    end._client.shell_channel.send(session.msg("comm_msg", content))
