"""What a rank is doing, as a record and as a line of the status tree."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from allranks.records.wire import Hello


@dataclass(frozen=True)
class RankStatus:
    """One rank now. ``state`` is idle, running, waiting, stopped or silent."""

    rank: int
    host: str
    pid: int
    device: str
    rss_nbytes: int
    state: str
    line: str


def read_status(hello: Hello, answer: dict[str, Any]) -> RankStatus:
    """Returns a rank's status from its answer, or from the system where it gave none."""
    if answer:
        activity = str(answer.get("activity") or "")
        state = activity if activity.startswith("waiting") else str(answer["state"])
        rss, line = int(answer["rss_nbytes"]), str(answer["line"])
    else:
        rss, state, line = 0, "silent", ""
        try:
            if hello.host != socket.gethostname():
                raise psutil.NoSuchProcess(hello.pid)
            process = psutil.Process(hello.pid)
            rss = process.memory_info().rss
            state = "stopped" if process.status() == psutil.STATUS_STOPPED else "silent"
        except psutil.Error:
            pass  # on another host, where that number is another process, or gone
    return RankStatus(hello.rank, hello.host, hello.pid, hello.device, rss, state, line)


def tree(statuses: Sequence[RankStatus], title: str) -> str:
    """Returns the status tree: one branch a host, one leaf a rank."""
    lines = [title]
    hosts = list(dict.fromkeys(status.host for status in statuses))
    for host in hosts:
        lines.append(f"└── {host}")
        here = [status for status in statuses if status.host == host]
        for status in here:
            branch = "└──" if status is here[-1] else "├──"
            memory = f"{status.rss_nbytes / 1e6:.0f} MB"
            at = f"  {status.line}" if status.line else ""
            lines.append(
                f"    {branch} rank {status.rank}  pid {status.pid}  {status.device}  {memory}  "
                f"{status.state}{at}"
            )
    return "\n".join(lines)
