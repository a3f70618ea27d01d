"""A script on ranks of this machine, in a terminal: what ``horovodrun`` runs."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from html import escape
from pathlib import Path
from typing import NamedTuple, NoReturn

from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import plain
from allranks.cluster.run import check_timeout
from allranks.errors import (
    CellFailed,
    CellInterrupted,
    CellTimeout,
    ClusterLost,
    UsageError,
)
from allranks.horovod.script import Exited, Script
from allranks.records.ranks import label
from allranks.widgets.dashboard.still import page
from allranks.widgets.dashboard.terminal import TerminalDashboard

_STYLE = (
    "body { font: 15px sans-serif; margin: 2em } td, th { padding: 2px 10px; text-align: right } "
    "pre { overflow-x: auto; background: #f4f4f4; padding: 1em }"
)
_TIMED_OUT, _INTERRUPTED, _TERMINATED = 124, 130, 143

_FOR_NOTEBOOKS = "The next cell starts a fresh cluster. "


class Job(NamedTuple):
    """What is to be run.

    Attributes:
        size: on how many ranks.
        arguments: the script's path and its arguments.
        timeout: seconds after which the ranks are interrupted, or None.
        log_dir: a folder for the ranks' logs; empty for none.
        report: a file for the picture of what was measured; empty for none.
    """

    size: int
    arguments: list[str]
    timeout: float | None = None
    log_dir: str = ""
    report: str = ""


class _View(TerminalDashboard):
    """Prints what ranks write, and keeps what they measure."""

    def finish(self) -> None:
        """Prints the rest."""
        self._print()
        self.figures.end()


def run(job: Job) -> int:
    """Runs a script on ranks that are started for it; returns an exit code.

    It is 0 where all went well, the script's own where it ended with one, 124 where its time was
    over, 130 after Ctrl-C, else 1.

    Raises:
        UsageError: it cannot be run so, or what is to be written cannot be.
        StartFailed: the ranks did not come up.
    """
    check_timeout(job.timeout, "--timeout", " ")
    _check_folders(job)
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    code, failure = 0, ""
    with Cluster(job.size) as cluster:
        view = _View("auto", list(cluster.hellos.values()), cluster.log_dir, True)
        try:
            cluster.call(Script(job.arguments), timeout=job.timeout, view=view)
        except ClusterLost as error:
            code, failure = 1, str(error).replace(_FOR_NOTEBOOKS, "")
        except CellFailed as error:
            code, failure = _ended(error)
        if job.log_dir:
            _keep_logs(cluster, Path(job.log_dir))
    if failure:
        sys.stderr.write(f"{failure if sys.stderr.isatty() else plain(failure)}\n")
    if job.report:
        Path(job.report).write_text(
            _html(job, view, code, plain(failure), time.monotonic() - began)
        )
    return code


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _check_folders(job: Job) -> None:
    """Makes the folders of what is to be written: not after hours of training."""
    try:
        if job.log_dir:
            Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        if job.report:
            Path(job.report).parent.mkdir(parents=True, exist_ok=True)
            Path(job.report).touch()
    except OSError as error:
        raise UsageError(f"expected a place to write to, found {error}. Name another.") from error


def _ended(error: CellFailed) -> tuple[int, str]:
    """An exit code, and what a person is told."""
    if isinstance(error, CellTimeout):
        return _TIMED_OUT, error.text
    if isinstance(error, CellInterrupted):
        return _INTERRUPTED, error.text
    exits = [report for report in error.reports if report.etype == Exited.__name__]
    if not exits:
        return 1, error.text
    said = exits[0].message
    who = label(report.rank for report in exits if report.message == said)
    if not said.isdecimal():
        return 1, f"{who} ended the script: {said}"
    return int(said), f"{who} ended the script with exit code {said}."


def _keep_logs(cluster: Cluster, folder: Path) -> None:
    for log in sorted(Path(cluster.log_dir).glob("rank-*.log")):
        shutil.copy(log, folder / log.name)


def _html(job: Job, view: _View, code: int, failure: str, seconds: float) -> str:
    """A page that needs nothing else: what was run, how it ended, curves and timings."""
    title = shlex.join(job.arguments)
    ended = "ended well" if code == 0 else f"ended with exit code {code}"
    told = [f"{job.size} ranks, {seconds:.0f} s, {ended}", time.strftime("%d %B %Y, %H:%M")]
    if job.log_dir:
        told.append(f"logs in {Path(job.log_dir).resolve()}")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style>",
            f"<h1><code>{escape(title)}</code></h1>",
            *(f"<p>{escape(line)}</p>" for line in told),
            *([f"<pre>{escape(failure)}</pre>"] if failure else []),
            page(view.figures),
            "</html>\n",
        ]
    )
