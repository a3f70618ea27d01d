"""Ends the processes that a measurement has left, including orphans."""

from __future__ import annotations

from contextlib import suppress

import psutil

MARK = "ALLRANKS_BENCHMARK"
"""The environment variable by which the processes of one measurement are known."""
_GONE_SECONDS = 10.0


def end_marked(mark: str) -> None:
    """Kills every process with this mark in its environment; returns when they have ended."""
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, _GONE_SECONDS)
