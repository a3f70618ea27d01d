"""Runs one cell in this rank, and tells the truth about how it ended."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from signal import signal as on_signal
from time import monotonic
from types import FrameType

import cloudpickle
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from allranks import collectives
from allranks.collectives.calls.peers import FINISHED
from allranks.collectives.calls.watch import INTERRUPTED
from allranks.engine.cells import forks
from allranks.engine.cells.commands import end_cells_too, fail_captured
from allranks.engine.cells.exceptions import Exceptions
from allranks.engine.cells.history import History
from allranks.engine.cells.interrupts import (
    Interrupts,
    ignore_interrupt,
    raise_what_events_drop,
    repeat_dropped_interrupts,
)
from allranks.engine.features import RankHooks
from allranks.engine.report import has_succeeded, is_a, report, text_of, traceback_of
from allranks.errors import Report
from allranks.records.requests import DEBUG
from allranks.records.wire import Reply, RunCell

_AFTERWARDS = "This failed when the cell had ended: its variables are there, its value is lost."


class CellRunner:
    """Runs cells in the main thread of a rank, one after the other.

    Args:
        shell: the engine's IPython shell.
        rank: this process's rank.
        device: what the rank computes on.
        mend: puts right what a cell has broken of what follows it.
        features: whose hooks a cell calls.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        rank: int,
        device: str,
        mend: Callable[[], object] = lambda: None,
        features: RankHooks | None = None,
    ) -> None:
        self.shell = shell
        self.rank = rank
        self.device = device
        self._mend = mend
        self.features = features or RankHooks()
        self._history = History(shell)
        self._keeps_history = True
        self.interrupts = Interrupts(self.features.interrupted)
        self._exceptions = Exceptions(shell, self.features, self.interrupts)
        end_cells_too(shell, lambda: self.interrupts.count)
        fail_captured(shell)
        repeat_dropped_interrupts(self.interrupts.repeat)
        raise_what_events_drop(shell, lambda: self.interrupts.count)
        self._transform_as_ipython: Callable[[str], str] = shell.transform_cell
        self._transformed: tuple[str | None, str] = None, ""
        setattr(shell, "transform_cell", self._transform)  # noqa: B010  a method, to mypy
        setattr(shell, "ask_exit", sys.exit)  # noqa: B010  exit and quit would end the engine
        warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")

    def _transform(self, source: str) -> str:
        """Returns a cell as plain Python; IPython asks again for what this cell has been."""
        (before, after), self._transformed = self._transformed, (None, "")
        return after if before is source else self._transform_as_ipython(source)

    async def run(
        self,
        cell: RunCell,
        payloads: list[bytes],
        prepare: Callable[[], None] | None = None,
    ) -> tuple[Reply, list[bytes]]:
        """Returns the reply to a cell and its payloads; never raises.

        Args:
            cell: what to run.
            payloads: instead of source, a pickled call.
            prepare: called first, as a part of the cell; such a cell is not kept in ``In``.
        """
        with self._history.kept() if cell.source == DEBUG else nullcontext():
            return await self._run(cell, payloads, prepare)

    async def _run(
        self, cell: RunCell, payloads: list[bytes], prepare: Callable[[], None] | None
    ) -> tuple[Reply, list[bytes]]:
        asked, text = None, None
        self._history.begin()
        started = monotonic()
        self.interrupts.begin(cell.cell)
        self._exceptions.begin()
        self.shell.execution_count = cell.number
        self.features.cell_started(cell)
        collectives.scope.enter(cell.label, cell.ranks or None, cell.cell)
        try:
            failed = self.features.take_failure()
            if failed is not None:  # within the scope, so that ranks that wait for this one go on
                raise failed
            self._keeps_history = prepare is None
            if prepare is not None:
                prepare()
            result = await (self._call(payloads[0]) if payloads else self._execute(cell.source))
            error = result.error_before_exec or result.error_in_exec
            if error is not None:  # now, while an interrupt is heard
                asked, text = error, self._exceptions.text_of(error)
        except BaseException as outside:
            if not forks.in_rank():
                forks.leave(outside, traceback.format_exception(outside))
            # IPython catches what a cell raises; this is an interrupt between two of its lines.
            result, error = ExecutionResult(None), outside
        finally:
            self._mend()
            try:
                self.interrupts.hear_no_more()
            except KeyboardInterrupt:  # it came when the cell had ended: too late to interrupt it
                self.interrupts.hear_no_more()
            _untraced()
        if error is not None and is_a(error, asyncio.CancelledError) and self.interrupts.count:
            # How an interrupt reaches a cell that awaits.
            error = KeyboardInterrupt().with_traceback(traceback_of(error))
        if error is not None:
            shown, error = error, self.features.error_raised(error)
            if error is not shown and is_a(error, KeyboardInterrupt):
                self._exceptions.show(error, traceback_of(error))
        if error is not None and has_succeeded(error):
            error, self._exceptions.lines = None, []
        error = self._or_failure(error)
        self._history.keep(error)
        interrupted = is_a(error, KeyboardInterrupt)
        told = self._report(error, text if error is asked else None) if error is not None else None
        where = f"line {told.line}: {told.source_line}" if told and told.line else None
        self.features.cell_finished(error)
        collectives.scope.leave(_reason(error, interrupted), failed=error is not None, where=where)
        if error is None and self._exceptions.lines:
            # The value could not be displayed: IPython showed a traceback and went on.
            sys.stderr.write("\n".join([*self._exceptions.lines, ""]))
        self.features.cell_left(error)
        late = self._or_failure(error)
        if late is not None and late is not error:
            error, told = late, self._report(late, None)
        value, problem = self._pickled(result.result, cell.want_value and error is None)
        status = "interrupted" if interrupted else "error" if error is not None else "ok"
        self._exceptions.forget()
        reply = Reply(
            rank=self.rank,
            cell=cell.cell,
            status=status,
            seconds=monotonic() - started,
            dirty=collectives.dirty(),
            has_value=bool(value),
            value_problem=problem,
            report=told,
        )
        return reply, value

    def _or_failure(self, error: BaseException | None) -> BaseException | None:
        """Returns what the cell fails with, which is a feature's failure only if it has no own."""
        failed = self.features.take_failure()
        if failed is not None and error is not None:
            sys.stderr.write(f"{failed}\n")
        return error or failed

    def not_told(self, cell: int, error: BaseException) -> Reply:
        """Returns the reply to a cell that has ended, where something failed before its own."""
        on_signal(signal.SIGINT, ignore_interrupt)
        collectives.scope.leave("failed when its cell had ended", failed=True)
        lines = traceback.format_exception(error)
        told = report(error, lines, self.rank, self.device, "", _AFTERWARDS)
        return Reply(self.rank, cell, "error", 0.0, collectives.dirty(), False, "", told)

    async def _execute(self, source: str) -> ExecutionResult:
        shell = self.shell
        problem = None
        try:
            transformed = shell.transform_cell(source)
        except Exception:
            transformed, problem = source, sys.exc_info()
        self._exceptions.cell_file = shell.compile.get_code_name(
            source, transformed, shell.execution_count
        )
        if not shell.should_run_async(
            source, transformed_cell=transformed, preprocessing_exc_tuple=problem
        ):
            if problem is None:
                self._transformed = source, transformed
            self.interrupts.hear()
            return self._in_rank(shell.run_cell(source, store_history=self._keeps_history))

        async def awaiting() -> ExecutionResult:
            return self._in_rank(
                await shell.run_cell_async(
                    source,
                    store_history=self._keeps_history,
                    transformed_cell=transformed,
                    preprocessing_exc_tuple=problem,
                )
            )

        task = asyncio.ensure_future(awaiting())
        result = None
        try:
            self.interrupts.hear(task)
            result = await task
            return result
        finally:
            shell.events.trigger("post_execute")
            if result is not None:
                shell.events.trigger("post_run_cell", result)

    async def _call(self, payload: bytes) -> ExecutionResult:
        """Calls a pickled ``(function, args, kwargs)``; its value stands for the cell's."""
        result = ExecutionResult(None)
        shell = self.shell
        try:
            self.interrupts.hear()
            function, args, kwargs = pickle.loads(payload)
            code = getattr(function, "__code__", None)
            self._exceptions.cell_file = code.co_filename if code else ""
            if getattr(function, "__module__", "") == "__main__":
                # It came by value, with the notebook's globals that it names: it sees ours too.
                function.__globals__.update(shell.user_ns | function.__globals__)
            result.result = function(*args, **kwargs)
        except BaseException as error:
            result.error_in_exec = error
            # The first frame is ours: it called the function.
            tb = traceback_of(error)
            for _ in range(1 + getattr(function, "own_frames", 0)):
                tb = tb and (tb.tb_next or tb)
            self._exceptions.show(error, tb)
        return self._in_rank(result)

    def _in_rank(self, result: ExecutionResult) -> ExecutionResult:
        """Returns how a cell's code ended, in the rank; a process that it has forked ends here."""
        if not forks.in_rank():
            forks.leave(result.error_before_exec or result.error_in_exec, self._exceptions.lines)
        return result

    def _report(self, error: BaseException, text: str | None) -> Report:
        shown = self._exceptions
        lines, more = shown.lines_of(error), self.features.error_details(error)
        return report(error, lines, self.rank, self.device, shown.cell_file, more, text)

    def _pickled(self, value: object, wanted: bool) -> tuple[list[bytes], str]:
        if not wanted:
            return [], ""
        try:
            return [cloudpickle.dumps(value, protocol=5)], ""
        except BaseException as error:  # an object's own way to be pickled may do anything
            return [], f"{type(value).__name__}: {text_of(error)}"


def _untraced() -> None:
    """Takes a debugger's hold off the frames below the cell, which go on when it has ended."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_trace is not None:
            frame.f_trace = None
        frame = frame.f_back


def _reason(error: BaseException | None, interrupted: bool) -> str:
    if error is None:
        return FINISHED
    if interrupted:
        return INTERRUPTED
    return f"raised {type(error).__name__}"
