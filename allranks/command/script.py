"""A script on ranks of this machine: ``allranks run``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple, NoReturn

from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import NEXT_CELL, SHOWN_NBYTES, log_end, log_length, plain
from allranks.cluster.options import check_timeout
from allranks.errors import (
    CellFailed,
    CellInterrupted,
    CellTimeout,
    ClusterLost,
    RankDied,
    UsageError,
)
from allranks.records.ranks import label
from allranks.records.wire import Hello, Output
from allranks.script import Script, ScriptExited
from allranks.widgets.dashboard.saved_panel import page
from allranks.widgets.dashboard.view import TerminalDashboard

_STYLE = (
    "body { font: 15px sans-serif; margin: 2em } td, th { padding: 2px 10px; text-align: right } "
    "pre { overflow-x: auto; background: #f4f4f4; padding: 1em }"
)
_TIMED_OUT, _INTERRUPTED, _TERMINATED = 124, 130, 143

_NEXT = re.escape(NEXT_CELL)
_FOR_NOTEBOOKS = re.compile(rf"(?m)^{_NEXT} ?| ?{_NEXT}")
_FIRST_LINES, _LAST_LINES = 500, 2000
"""Of what ranks print, so much is in a report; all of it is in their logs."""


class ScriptRun(NamedTuple):
    """A script and its options. With ``size`` None it has as many ranks as a cell starts.
    ``arguments`` begins with the script's path, or with the name of a module; ``timeout`` is in
    seconds; "" is no ``log_dir`` or ``report``.
    """

    size: int | None
    arguments: list[str]
    timeout: float | None = None
    log_dir: str = ""
    report: str = ""
    is_module: bool = False


class _View(TerminalDashboard):
    """Prints output of ranks, and keeps it and their timings for the report."""

    def __init__(self, hellos: Sequence[Hello], log_dir: str) -> None:
        super().__init__("auto", hellos, log_dir, True)
        self._hellos = hellos
        #: Of each rank, how much of its log was shown, or is from before the script.
        self._shown = {hello.rank: log_length(hello.log) for hello in hellos}
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._count = 0

    def write(self, text: str) -> None:
        """Prints lines, and keeps the first and the last of them."""
        super().write(text)
        for line in plain(text).split("\n"):
            self._count += 1
            (self._first if self._count <= _FIRST_LINES else self._last).append(line)

    def written(self) -> str:
        """Returns the printed text, without its middle if it is long."""
        hidden = self._count - len(self._first) - len(self._last)
        note = [f"… {hidden:,} lines are not shown; the ranks' logs have them …"] if hidden else []
        return "\n".join([*self._first, *note, *self._last])

    def output(self, batch: Output) -> None:
        if batch.log_nbytes:  # late output has none
            self._shown[batch.rank] = batch.log_nbytes
        super().output(batch)

    def show_rest(self) -> None:
        """Prints what ranks have written since the script has ended, as in functions of atexit."""
        for hello in self._hellos:
            shown = self._shown[hello.rank]
            rest = log_end(hello.log, shown)
            hidden = log_length(hello.log) - shown - SHOWN_NBYTES
            if rest and hidden > 0:
                rest = f"… {hidden:,} bytes are not shown; {hello.log} has them …\n{rest}"
            if rest:
                self.output(Output(hello.rank, 0, (["out", rest],), 0, 0, 0))
        self._print()

    def finish(self) -> None:
        self._print()
        self.make_figures().end()


def run_script(job: ScriptRun) -> int:
    """Runs a script on ranks that are started for it; returns an exit code.

    It is 0 after success, the script's own if it ended with one, 124 after a timeout, 130 after
    Ctrl-C, else 1.
    """
    check_timeout(job.timeout, "--timeout", " ")
    _check_files(job)
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    code, failure, ended = 0, "", True
    started = Cluster(job.size)
    started.roster.replacing = "off"  # no cell follows on these ranks
    try:
        with started as cluster:
            view = _View(list(cluster.hellos.values()), cluster.log_dir)
            try:
                cluster.call(Script(job.arguments, job.is_module), timeout=job.timeout, view=view)
            except ClusterLost as error:
                code, failure, ended = 1, str(error), False
            except CellFailed as error:
                code, failure = _exit_code(error)
                ended = not isinstance(error, RankDied | CellInterrupted | CellTimeout)
        if ended:  # else the last words of ranks that were ended are shown already
            view.show_rest()
        _copy_logs(job, cluster)
    except KeyboardInterrupt:  # while the ranks started, or ended
        with suppress(ClusterLost):
            _copy_logs(job, started)
        return _INTERRUPTED
    failure = _FOR_NOTEBOOKS.sub("", failure)
    if failure:
        sys.stderr.write(f"{failure if sys.stderr.isatty() else plain(failure)}\n")
    if job.report:
        Path(job.report).write_text(
            _html(job, view, started.size, code, plain(failure), time.monotonic() - began),
            encoding="utf-8",
            errors="backslashreplace",
        )
    return code


def _copy_logs(job: ScriptRun, cluster: Cluster) -> None:
    for log in sorted(Path(cluster.log_dir).glob("rank-*.log")) if job.log_dir else ():
        shutil.copy(log, Path(job.log_dir) / log.name)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _check_files(job: ScriptRun) -> None:
    """Creates the folders of the results now: errors must not come after hours of training."""
    name = job.arguments[0]
    if job.is_module:
        _check_module(name)
    elif not os.path.isfile(name):
        found = f"found no file {name!r}"
        raise UsageError(f"expected a script, {found}. Type its path.")
    try:
        if job.log_dir:
            Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        if job.report:
            Path(job.report).parent.mkdir(parents=True, exist_ok=True)
            Path(job.report).open("a").close()
    except OSError as error:
        raise UsageError(f"expected a place to write to, found {error}. Name another.") from error


def _check_module(name: str) -> None:
    """Raises UsageError if there is no such module; it imports none, not even a package."""
    if os.path.isfile(name):
        raise UsageError(
            f"expected the name of a module after -m, found the file {name}. "
            f"Type: allranks run {name}"
        )
    top = name.partition(".")[0]
    if not top.isidentifier() or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise UsageError(
            f"expected the name of a module after -m, found none named {name} in this folder or "
            "this Python. Type the name that follows python -m, or the path of a script."
        )


def _exit_code(error: CellFailed) -> tuple[int, str]:
    if isinstance(error, CellTimeout):
        return _TIMED_OUT, error.text
    if isinstance(error, CellInterrupted):
        return _INTERRUPTED, error.text
    exits = [report for report in error.reports if report.etype == ScriptExited.__name__]
    if not exits:
        return 1, error.text
    said = exits[0].message
    who = label(report.rank for report in exits if report.message == said)
    if not said.removeprefix("-").isdecimal():
        return 1, f"{who} ended the script: {said}"
    return int(said), f"{who} ended the script with exit code {said}."


def _html(job: ScriptRun, view: _View, size: int, code: int, failure: str, seconds: float) -> str:
    """A self-contained page: the script, its end, curves, timings, output."""
    title, written = shlex.join(["-m"] * job.is_module + job.arguments), view.written()
    ended = "finished" if code == 0 else f"ended with exit code {code}"
    told = [f"{size} ranks, {seconds:.0f} s, {ended}", time.strftime("%d %B %Y, %H:%M")]
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
            page(view.make_figures()),
            *([f"<h2>Output</h2><pre>{escape(written)}</pre>"] if written else []),
            "</html>\n",
        ]
    )
