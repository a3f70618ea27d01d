"""Starts the process of the simulated ranks, sends it cells, and shows them as those of ranks."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from html import escape
from typing import Any

from IPython.display import publish_display_data

from allranks.cluster.cell_run import CellRun
from allranks.cluster.cluster import Cluster
from allranks.cluster.connection import Connection
from allranks.cluster.failures import CellRecord
from allranks.cluster.features import CellRequest, NotebookFeature
from allranks.cluster.options import CellOption
from allranks.cluster.renewal import await_abandoned
from allranks.errors import ClusterLost, MissingDependency, UsageError
from allranks.features.simulate.calibration import at_size, here
from allranks.features.simulate.network import HERE, check_name
from allranks.features.simulate.picture import draw, explorable
from allranks.features.simulate.records import RunSimulated, SimulatedReport, SimulatedTime
from allranks.features.simulate.tokens import MOST_SCHEDULES, MOST_SECONDS, check_token
from allranks.records.telemetry import Pulse
from allranks.records.wire import Hello, Output, Record
from allranks.widgets.dashboard.view import cell_view

_MOST_RANKS, _MOST_EXPLORED = 4096, 64
_DEFAULT_RANKS = 4
_SCREEN_NBYTES, _LEAST_NBYTES = 128 * 1024, 1024


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(
            f"expected a number of schedules from 1 on, found {text!r}. Type for example: "
            "--explore 100"
        )
    return int(text)


class _OneProcess:
    """The connection of the process, as that of all its simulated ranks."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection, self.size = connection, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, ranks: Sequence[int], *messages: Any) -> object:
        return self._connection.send((0,), *messages) if ranks else None

    def ask_soon(self, name: str, arguments: dict[str, Any], deliver: Any, ranks: Any) -> None:
        self._connection.ask_soon(name, arguments, deliver, (0,))


def _of_process(batch: Output, log_dir: str, when: str = "") -> list[str]:
    """Returns lines about the output of the process; displays are in them as text."""
    text = ""
    for kind, *rest in batch.entries:
        if kind in ("out", "err"):
            text += rest[0]
        elif kind in ("display", "result"):
            text += f"{rest[0].get('text/plain', '')}\n"
        elif kind == "notice":
            text += f"{rest[0]}\n"
        elif kind == "hidden":
            text += "" if text.endswith("\n") else "\n"
            text += f"… {rest[1]:,} bytes are only in its log, {log_dir}/rank-0.log\n"
    return [f"the process of the simulated ranks{when}: {line}" for line in text.splitlines()]


def _late_lines(connection: Connection) -> list[str]:
    """Returns what the process has written since its last cell, and removes it."""
    late = connection.late.copy()
    connection.late.clear()
    when = " after its cell had ended"
    return [line for one in late for line in _of_process(one, connection.log_dir, when)]


class SimulatedRun(CellRun):
    """One cell on simulated ranks."""

    def take(self, record: CellRecord, payloads: list[bytes]) -> None:
        """Takes a record of a rank; the process's own output is that of no rank."""
        if isinstance(record, Output) and record.log_nbytes:
            for line in _of_process(record, self._connection.log_dir):
                self.view.notice(line)
            return
        if not isinstance(record, Pulse):  # the process's own
            super().take(record, payloads)

    def show_late(self) -> None:
        """Shows what threads of earlier cells have written, which belongs to no rank either."""
        for line in _late_lines(self._connection):
            self.view.notice(line)

    def end(self) -> None:
        """As of real ranks; names the process if it has ended."""
        try:
            super().end()
        except ClusterLost as error:
            raise ClusterLost(
                f"all simulated ranks ended with their process, which is rank 0 of its own: {error}"
            ) from None

    def _show_unsent(self, rank: int) -> None:
        if rank == 0:
            super()._show_unsent(rank)


class SimulatedRanks(Cluster):
    """The process of the simulated ranks."""

    def __init__(self) -> None:
        # A rank of several has one thread for numeric libraries as well, see `share_cores`.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        super().__init__(1, gpus="none", launcher="local", show_output=False, settings=threads)
        self.heal_when("off")

    def begin_simulated(self, request: CellRequest, size: int, options: dict[str, Any]) -> CellRun:
        """Sends a cell, and returns it in flight."""
        cells = self.cells
        with cells.turns.taken():
            cells.catch_up()
            cells.check_idle()
            await_abandoned(cells.connection)
            hello, log_dir = self.hellos[0], os.path.join(self.log_dir, "simulated")
            hellos = [
                Hello(
                    rank=rank,
                    size=size,
                    local_rank=rank,
                    local_size=size,
                    host=hello.host,
                    pid=hello.pid,
                    device="simulated",
                    engine="",
                    mpi="simulated",
                    log=os.path.join(log_dir, f"rank-{rank}.log"),
                )
                for rank in range(size)
            ]
            view = cell_view(request.view, hellos, None, fold=request.fold)
            cell = RunSimulated(
                cell=cells.roster.cells + 1,
                source=request.source,
                number=request.number,
                size=size,
                label=f"cell In[{request.number}]",
                want_value=request.want_value,
                limit_nbytes=max(_LEAST_NBYTES, _SCREEN_NBYTES // size),
                options=options,
            )
            connection: Any = _OneProcess(cells.connection, size)
            try:
                run = SimulatedRun(cell.cell, range(size), connection, view, request.timeout)
            except BaseException:
                cells.connection.end_cell()  # it was not sent
                raise
            run.show_late()
            cells.send(cell, run)
            return run


class Simulate(NotebookFeature):
    """``%%distributed --simulate``."""

    commands = frozenset({"simulate"})
    records = (SimulatedTime, SimulatedReport)
    in_cells = False  # until a report comes
    shows_time = False
    """Whether the cell asks for a line with its simulated time."""
    cell_options = (
        CellOption(
            "simulate",
            "simulate",
            {"action": "store_true", "help": "run the cell on simulated ranks, in one process"},
        ),
        CellOption(
            "seed",
            "simulate",
            {"type": int, "metavar": "N", "help": "the order in which simulated ranks run"},
        ),
        CellOption(
            "network",
            "simulate",
            {"metavar": "NAME", "help": "the simulated network: laptop, ethernet …; shows times"},
        ),
        CellOption(
            "compute",
            "simulate",
            {
                "choices": ("measured", "given"),
                "help": "the simulated time of computing: measured, or by simulate.compute() only",
            },
        ),
        CellOption(
            "explore",
            "simulate",
            {
                "type": _count,
                "nargs": "?",
                "const": MOST_SCHEDULES,
                "metavar": "N",
                "help": f"try all orders of messages on simulated ranks, at most N "
                f"({MOST_SCHEDULES})",
            },
        ),
        CellOption(
            "replay",
            "simulate",
            {"metavar": "SCHEDULE", "help": "run a schedule that --explore has shown"},
        ),
        CellOption(
            "picture",
            "simulate",
            {"action": "store_true", "help": "draw the messages of simulated ranks over time"},
        ),
    )

    def __init__(self) -> None:
        self._reported: tuple[SimulatedReport, list[bytes]] | None = None
        self._ranks: SimulatedRanks | None = None
        self._measured: dict[str | None, dict[int, dict[str, Any]]] = {}
        self._size = _DEFAULT_RANKS

    def command(self, name: str, *arguments: Any) -> Any:
        (request,) = arguments
        return self._run(request)

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, SimulatedTime) and self.shows_time and self.cell is not None:
            self.cell.notice(time_line(record))
        if isinstance(record, SimulatedReport) and self.cell is not None and self.cell.shown:
            self._reported, self.in_cells = (record, payloads), True

    def cell_finished(self) -> None:
        if self._reported is not None:
            (report, sketches), self._reported, self.in_cells = self._reported, None, False
            show_report(report, sketches)

    def _run(self, request: CellRequest) -> tuple[Cluster, CellRun]:
        options = dict(request.options)
        simulates = options.pop("simulate", False) or {"explore", "replay"} & options.keys()
        if not simulates:
            given = next(iter(options))
            raise UsageError(f"--{given} needs --simulate. Type: --simulate --{given} …")
        if request.ranks:
            raise UsageError("expected --simulate without -r, found both. Leave out -r")
        size = self._size if request.cluster.n is None else request.cluster.n
        if not 1 <= size <= _MOST_RANKS:
            raise UsageError(
                f"expected between 1 and {_MOST_RANKS} simulated ranks, found {size}. "
                f"Type for example: %%distributed -n 1024 --simulate"
            )
        if {"explore", "replay"} <= options.keys():
            raise UsageError("expected --explore or --replay, found both. Leave one of them out")
        if "explore" in options and size > _MOST_EXPLORED:
            raise UsageError(
                f"expected at most {_MOST_EXPLORED} ranks with --explore, found {size}: they have "
                f"too many orders of messages. Type for example: %%distributed -n 4 --explore"
            )
        if "explore" in options:
            # The report has to come before the time limit ends the cell.
            options["seconds"] = MOST_SECONDS if request.timeout is None else 0.8 * request.timeout
        if "replay" in options:
            check_token(options["replay"])
        if "network" in options:
            check_name(options["network"])
        ranks = self._started()
        if options.get("network") == HERE:
            where = request.cluster.launcher
            if where not in self._measured:
                self._measured[where] = here(where)
            options["measured"] = at_size(self._measured[where], size)
        self._size = size
        # The process's cluster has features of its own, which get its records.
        for feature in ranks.cells.hooks.features:
            if isinstance(feature, Simulate):
                feature.shows_time = "network" in options
        return ranks, ranks.begin_simulated(request, size, options)

    def _started(self) -> SimulatedRanks:
        try:
            import greenlet  # type: ignore[import-untyped]  # noqa: F401
        except ImportError:
            raise MissingDependency(
                "expected greenlet for simulated ranks, found none installed. "
                "Type: pip install 'allranks[simulate]'"
            ) from None
        if self._ranks is None or self._ranks.state != "running":
            self._ranks = SimulatedRanks()
            self._ranks.start()
        return self._ranks

    def ended(self) -> str:
        """Ends the process; returns a line about it."""
        ranks, self._ranks = self._ranks, None
        self._measured = {}
        if ranks is None or ranks.state != "running":
            return ""
        ranks.stop()
        return "\n".join([*_late_lines(ranks.cells.connection), "The simulated ranks are stopped."])


def show_report(report: SimulatedReport, sketches: Sequence[bytes]) -> None:
    """Displays a report below the cell; its metadata name its schedules."""
    shown = f"<pre>{escape(report.text)}</pre>" if report.text else ""
    lines = [report.text] if report.text else []
    for name, data in zip(report.names, sketches, strict=True):
        heading, svg = draw(data)
        shown += f"<div><div>{escape(f'{name}: {heading}' if name else heading)}</div>"
        shown += f"{explorable(svg)}</div>"
        if not name:
            lines.append(f"a picture: {heading}")
    publish_display_data(
        {"text/plain": "\n".join(lines)} | ({"text/html": shown} if sketches else {}),
        {"allranks": {"schedules": list(report.tokens)}} if report.tokens else {},
    )


def time_line(found: SimulatedTime) -> str:
    total = found.rank_seconds or 1.0
    wait, transfer = found.wait_seconds / total, found.transfer_seconds / total
    computing = max(0.0, 1 - wait - transfer)  # no rounding error is shown as "-0%"
    return (
        f"simulated time on {found.network}: {as_time(found.seconds)}, rank {found.last} ended "
        f"last; computing {computing:.0%}, waiting {wait:.0%}, transfer {transfer:.0%}"
    )


def as_time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


FEATURE = Simulate
