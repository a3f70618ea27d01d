"""One cell on all simulated ranks, from its compilation to the reply of each rank."""

from __future__ import annotations

import ast
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import CO_COROUTINE
from threading import current_thread, main_thread
from types import CodeType, TracebackType
from typing import Any

import cloudpickle

from allranks.collectives.calls.rank_state import FINISHED, INTERRUPTED
from allranks.collectives.calls.sites import of_traceback
from allranks.engine.cell import end_fork, in_rank
from allranks.engine.exceptions import (
    from_cell,
    has_succeeded,
    is_a,
    plain,
    report,
    text_of,
    traceback_of,
    without_middle,
    without_own_frames,
)
from allranks.engine.features import RankContext, Replies
from allranks.errors import Report, UsageError
from allranks.features.simulate.choices import ChosenSchedule
from allranks.features.simulate.messages import Mail
from allranks.features.simulate.network import network_of
from allranks.features.simulate.output import RankOutput, RankStream, Screen
from allranks.features.simulate.records import RunSimulated, SimulatedReport
from allranks.features.simulate.sandbox import CLOCK, Ranks, Sandbox, Space, check_magics
from allranks.features.simulate.scheduler import Schedule, Scheduler, SeededSchedule, Task
from allranks.features.simulate.sketches import sketch
from allranks.features.simulate.times import time_records
from allranks.features.simulate.tokens import start_of
from allranks.records.telemetry import Points
from allranks.records.wire import Output, Record, Reply

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_IDLE_SWITCHES = 5000
"""After this many changes of the running rank without a message, all of them poll forever."""
_FORMATTED = 8
"""The most different tracebacks that IPython formats; Python formats further ones."""


@dataclass(frozen=True)
class Code:
    """A compiled cell: its statements, and its last expression."""

    file: str
    body: CodeType
    last: CodeType | None


@dataclass
class Outcome:
    """How one rank has left the cell."""

    error: BaseException | None = None
    value: Any = None
    seconds: float = 0.0
    left: bool = False


class SimulatedCell:
    """One cell on all simulated ranks."""

    def __init__(
        self,
        context: RankContext,
        record: RunSimulated,
        known: dict[int, Any],
    ) -> None:
        self._context, self._record, self._known = context, record, known
        self._clear()
        self._eager_nbytes = 0
        self._ranks: Ranks
        self._spaces: list[Space] = []
        self._code: Code | None = None
        self._replayed: ChosenSchedule | None = None
        self._said = ""
        self.fits = True
        """Whether the schedule that is replayed is one of this source."""
        self.scheduler: Scheduler | None = None

    def _clear(self) -> None:
        record = self._record
        self._outcomes = [Outcome() for _ in range(record.size)]
        folder = os.path.join(self._context.config.log_dir, "simulated")
        self._outputs = [
            RankOutput(os.path.join(folder, f"rank-{rank}.log"), record.limit_nbytes, record.size)
            for rank in range(record.size)
        ]

    def run(self) -> None:
        """Runs the cell on all ranks; raises if it cannot begin."""
        self._begin()
        record = self._record
        seed = int(record.options.get("seed") or 0)
        schedule: Schedule = SeededSchedule(seed, self._eager_nbytes)
        given = record.options.get("compute") == "given"
        if "replay" in record.options:
            start, self.fits = start_of(record.options["replay"], record.source)
            self._replayed = ChosenSchedule(start)
            if self._run_watched(self._replayed):
                self._said = "the schedule never ends: its ranks poll, and no message comes"
            return
        self._ranks.failed = True
        self._run_schedule(schedule, measures=not given, before=self._ranks.mail)
        assert self.scheduler is not None
        self._ranks.mail = self.scheduler.mail
        self._ranks.failed = any(outcome.error is not None for outcome in self._outcomes)

    def _begin(self) -> None:
        record = self._record
        network = network_of(record.options)
        self._eager_nbytes = network.eager_nbytes
        if record.size not in self._known:
            self._known[record.size] = Ranks(record.size, network)
        ranks = self._ranks = self._known[record.size]
        ranks.move(network.hosts(record.size))
        self._spaces = ranks.spaces
        ranks.renew()
        CLOCK.begin()
        self._code = self._compiled(record.source)

    def _run_schedule(
        self,
        schedule: Schedule,
        *,
        measures: bool,
        before: Mail | None = None,
        watch: Callable[[Scheduler], object] = lambda scheduler: None,
    ) -> None:
        """Runs the cell in one order; ``before`` are the messages that an earlier cell has left,
        and ``watch`` is called before each rank that runs.
        """
        code, ranks, sandbox = self._code, self._ranks, Sandbox(self._ranks)
        assert code is not None
        network = network_of(self._record.options)  # idle

        def switched(task: Task | None) -> None:
            sandbox.switch(task)
            if task is not None:
                watch(scheduler)

        tasks = [Task(space.world.rank, space.world) for space in ranks.spaces]
        scheduler = Scheduler(tasks, schedule, network, switched)
        self.scheduler = sandbox.scheduler = scheduler
        scheduler.mail = Mail(scheduler, before)
        scheduler.measures = measures
        for space in ranks.spaces:
            space.world.scheduler = scheduler
            space.metrics.begin()
        shell: Any = self._context.shell
        screen = Screen(self._context.transcript, self._current_output)
        fakes = [
            *(
                (sys, name, RankStream(kind, getattr(sys, name), self._current_output))
                for name, kind in (("stdout", "out"), ("stderr", "err"))
            ),
            (shell.displayhook, "transcript", screen),
            (shell.display_pub, "transcript", screen),
        ]
        with sandbox.active(fakes):
            scheduler.run(lambda task: self._run_rank(task, code, sandbox))

    def _run_watched(self, schedule: ChosenSchedule) -> bool:
        """Runs the cell; returns whether it was ended because it never ends by itself."""
        idle, progress, endless = 0, -1, False

        def watch(scheduler: Scheduler) -> None:
            nonlocal idle, progress, endless
            now = scheduler.mail.count + len(scheduler.events)
            idle, progress = (0, now) if now != progress else (idle + 1, now)
            if idle > _IDLE_SWITCHES and not scheduler.interrupted:
                endless = scheduler.interrupted = True

        self._run_schedule(schedule, measures=False, watch=watch)
        return endless

    def _current_output(self) -> RankOutput | None:
        scheduler = self.scheduler
        if scheduler is None or scheduler.current is None or not self._in_thread():
            return None
        return self._outputs[scheduler.current.rank]

    def _in_thread(self) -> bool:
        return current_thread() is main_thread() and in_rank()

    def _compiled(self, source: str) -> Code:
        shell: Any = self._context.shell
        transformed = shell.transform_cell(source)
        tree = ast.parse(transformed)
        check_magics(tree)
        file = shell.compile.cache(transformed, self._record.number, raw_code=source)
        last: CodeType | None = None
        # As in IPython, a semicolon hides the value also from -o.
        hides = shell.displayhook.semicolon_at_end_of_expression(transformed)
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not hides:
            expression = tree.body.pop()
            assert isinstance(expression, ast.Expr)
            last = compile(ast.Expression(expression.value), file, "eval", _FLAGS, True)
        body = compile(tree, file, "exec", _FLAGS, True)
        if any(code is not None and code.co_flags & CO_COROUTINE for code in (body, last)):
            raise UsageError(
                "expected a cell without await on simulated ranks, which one thread runs, found "
                "one. Leave out --simulate to use real ranks: %%distributed -n 4"
            )
        return Code(file, body, last)

    def _run_rank(self, task: Task, code: Code, sandbox: Sandbox) -> None:
        """Runs the cell on one rank; never raises."""
        outcome, space = self._outcomes[task.rank], self._spaces[task.rank]
        names, scheduler = space.names, sandbox.scheduler
        space.world.enter(self._record.label, None, self._record.cell)
        try:
            if scheduler.interrupted:
                raise KeyboardInterrupt
            sandbox.names(space)
            exec(code.body, names)
            if code.last is not None:
                value = eval(code.last, names)
                if value is not None:
                    names["_"] = value
                    shell: Any = self._context.shell
                    shell.displayhook.write_format_data(*shell.display_formatter.format(value))
                if self._record.want_value:
                    outcome.value = value
            self._show_figures()
        except BaseException as error:
            if is_a(error, KeyboardInterrupt):
                scheduler.interrupted = True
            outcome.error = None if has_succeeded(error) else error
        if not in_rank():
            # A process that the cell has forked ends with its rank; the others run in the parent.
            raised = outcome.error
            end_fork(raised, None if raised is None else traceback.format_exception(raised))
        self._leave(task, outcome)

    def _show_figures(self) -> None:
        helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
        if helpers is not None and helpers.Gcf.figs:
            from matplotlib_inline.backend_inline import flush_figures

            flush_figures()  # type: ignore[no-untyped-call]

    def _leave(self, task: Task, outcome: Outcome) -> None:
        error, reason, where = outcome.error, FINISHED, ""
        if error is not None:
            reason = f"raised {type(error).__name__}"
            where = of_traceback(traceback_of(error)).place
            if is_a(error, KeyboardInterrupt):
                reason = INTERRUPTED
        if self.scheduler is not None and self.scheduler.current is task:
            try:
                self.scheduler.computed()
            except KeyboardInterrupt:  # while others computed
                self.scheduler.interrupted = True
        self._spaces[task.rank].world.leave(reason, error is not None, where)
        outcome.seconds, outcome.left = task.clock, True

    def news(self, final: bool = False) -> list[tuple[Record, list[bytes]]]:
        """Returns the records of new output and curves."""
        found: list[tuple[Record, list[bytes]]] = []
        cell = self._record.cell
        for rank, output in enumerate(self._outputs):
            entries, lines, nbytes = output.take(final)
            if entries:
                found.append((Output(rank, cell, tuple(entries), lines, nbytes, 0), []))
        for rank, space in enumerate(self._spaces):
            series, pairs = space.metrics.take()
            if series:
                found.append((Points(rank, cell, tuple(series), space.metrics.dropped), [pairs]))
        return found

    def replies(self, process: Reply) -> Replies:
        """Returns the last output, and the reply of each rank."""
        if process.report is not None:
            # It did not begin, or an interrupt came before its first rank or after its last.
            text = f"{process.report.etype}: {process.report.message}"
            told = replace(process.report, traceback=(text,), line=None, device="simulated")
            return tuple(
                (self._reply(rank, process.status, told), []) for rank in range(self._record.size)
            )
        found = self.news(final=True)
        found += self._further_records()
        scheduler = self.scheduler
        if scheduler is not None and scheduler.events:
            clocks = [task.clock for task in scheduler.tasks]
            name = scheduler.network.name
            found += time_records(
                self._record.cell, name, self._record.size, clocks, scheduler.events
            )
        reports = Reports(self._context, self._code.file if self._code else "")
        for rank, outcome in enumerate(self._outcomes):
            value, problem = list[bytes](), ""
            status, said = "ok", None
            if outcome.error is not None:
                said = reports.of(rank, outcome.error)
                status = "waiting" if said.waiting else "error"
                if is_a(outcome.error, KeyboardInterrupt):
                    status = "interrupted"
            elif self._record.want_value:
                sys.modules["__main__"], main = self._spaces[rank].module, sys.modules["__main__"]
                try:
                    value = [cloudpickle.dumps(outcome.value, protocol=5)]
                except BaseException as error:
                    problem = f"{type(outcome.value).__name__}: {text_of(error)}"
                finally:
                    sys.modules["__main__"] = main
            found.append((self._reply(rank, status, said, outcome.seconds, value, problem), value))
            outcome.error = None
        return tuple(found)

    def _further_records(self) -> list[tuple[Record, list[bytes]]]:
        replayed, text = self._replayed, self._said
        if replayed is not None and (replayed.misfits or not self.fits):
            text = (
                "this schedule was recorded for another cell: expected the same source and the "
                "same variables, found others. Type --explore to try all schedules of this one"
            )
        sketches = []
        if self._record.options.get("picture") and self.scheduler is not None:
            sketches.append(("", sketch(self.scheduler)))
        return self._report(text, sketches) if text or sketches else []

    def _report(
        self, text: str, sketches: Sequence[tuple[str, bytes]], tokens: tuple[str, ...] = ()
    ) -> list[tuple[Record, list[bytes]]]:
        names = tuple(name for name, _ in sketches)
        report = SimulatedReport(self._record.cell, text, names, tokens)
        return [(report, [data for _, data in sketches])]

    def _reply(
        self,
        rank: int,
        status: str,
        said: Report | None,
        seconds: float = 0.0,
        value: list[bytes] | None = None,
        problem: str = "",
    ) -> Reply:
        if said is not None and said.rank != rank:
            said = replace(said, rank=rank)
        return Reply(
            rank=rank,
            cell=self._record.cell,
            status=status,
            seconds=seconds,
            dirty=False,
            has_value=bool(value),
            value_problem=problem,
            report=said,
        )


class Reports:
    """The reports of failed ranks; equal tracebacks are formatted once."""

    def __init__(self, context: RankContext, file: str) -> None:
        self._context, self._file = context, file
        self._known: dict[Any, tuple[str, list[str]]] = {}

    def of(self, rank: int, error: BaseException) -> Report:
        tb: TracebackType | None = from_cell(error, self._file.__eq__)
        if is_a(error, KeyboardInterrupt) and not any(
            frame.f_code.co_filename == self._file for frame, _ in traceback.walk_tb(tb)
        ):
            tb = None
        without_own_frames(tb)
        places = tuple(
            (frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(tb)
        )
        # Equal tracebacks are formatted once: it takes some 10 ms.
        key, text = (type(error), places), text_of(error)
        if key not in self._known:
            self._known[key] = text, self._formatted(error, tb)
        known, lines = self._known[key]
        if text != known and lines[-1].endswith(known):
            lines = [*lines[:-1], lines[-1].removesuffix(known) + text]
        return report(error, lines, rank, "simulated", self._file)

    def _formatted(self, error: BaseException, tb: Any) -> list[str]:
        if len(self._known) >= _FORMATTED:
            return plain(error, self._file)
        if tb is None:
            return ["KeyboardInterrupt: it came before this rank had begun the cell."]
        if is_a(error, SystemExit):
            kept, text = "the rank keeps its variables.", text_of(error)
            said = f"sys.exit() ends the cell, not the rank: {kept}"
            return [said, f"SystemExit: {text}"] if text else [said]
        without_middle(tb)
        shell: Any = self._context.shell
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, tb)
        return lines
