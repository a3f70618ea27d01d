"""Runs one cell in this rank, and tells the truth about how it ended."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from signal import default_int_handler, getsignal, pthread_kill
from signal import signal as on_signal
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any

import cloudpickle
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from allranks import collectives
from allranks.collectives.calls.peers import FINISHED
from allranks.collectives.calls.watch import INTERRUPTED
from allranks.engine.cells import forks
from allranks.engine.cells.commands import end_cells_too, fail_captured, interrupt_children
from allranks.engine.cells.dropped import raise_what_events_drop, repeat_dropped_interrupts
from allranks.engine.cells.history import History
from allranks.engine.cells.waking import listen, wake
from allranks.engine.devices.gpu import Gpu, is_out_of_memory
from allranks.engine.devices.gpu_memory import release
from allranks.engine.libraries.waits import Waits
from allranks.engine.report import (
    INTERRUPTED_TEXT,
    is_a,
    is_beyond_ipython,
    plain,
    report,
    shown_with,
    text_of,
    traceback_of,
    without_middle,
    without_own_frames,
    without_text,
)
from allranks.errors import CollectiveError, UsageError
from allranks.records.requests import DEBUG
from allranks.records.wire import Reply, Report, RunCell


def ignore_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The handler of SIGINT while no cell runs: an interrupt that comes late does nothing."""


# A cell may replace what other modules hold: what its end needs is taken from them here.
_MAIN_THREAD = threading.main_thread().ident or 0

#: Raised inside allranks on the user's behalf: the frames there are not to blame.
_NOT_OUR_FRAMES = (CollectiveError, UsageError, KeyboardInterrupt, asyncio.CancelledError)
_MAYBE_OTHERS = (*_NOT_OUR_FRAMES, RuntimeError, ValueError)
"""What torch and JAX raise where a wait in them has been ended is among these."""
_AFTERWARDS = "This failed when the cell had ended: its variables are there, its value is lost."
_EXIT = "sys.exit() ends the cell, not the rank: the rank keeps running, with its variables."


class CellRunner:
    """Runs cells in the main thread of a rank, one after the other.

    Args:
        shell: the engine's IPython shell.
        rank: this process's rank.
        device: what the rank computes on.
        sharers: the other ranks on its GPU, by pid.
        mend: puts right what a cell has broken of what follows it.
        waits: looks after what waits in torch and JAX.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        rank: int,
        device: str,
        sharers: dict[int, int] | None = None,
        mend: Callable[[], object] = lambda: None,
        waits: Waits | None = None,
    ) -> None:
        self.shell = shell
        self.rank = rank
        self.device = device
        self.sharers = sharers or {}
        self._mend = mend
        self.waits = waits or Waits()
        self._history = History(shell)
        self._traceback: list[str] = []
        #: What was interrupted as it said what it is about.
        self._mute: list[BaseException] = []
        self._cell_file = ""
        self._number = 0
        self._keeps_history = True
        self._hearing = 0
        self._interrupted_early = 0
        self._hearing_lock = threading.Lock()
        self._over = threading.Event()
        listen()
        #: How many interrupts the cell has been sent.
        self.interrupts = 0
        end_cells_too(shell, lambda: self.interrupts)
        fail_captured(shell)
        repeat_dropped_interrupts(self._press_again)
        raise_what_events_drop(shell, lambda: self.interrupts)
        self._transform_as_ipython: Callable[[str], str] = shell.transform_cell
        self._transformed: tuple[str | None, str] = None, ""
        setattr(shell, "transform_cell", self._transform)  # noqa: B010
        setattr(shell, "ask_exit", sys.exit)  # noqa: B010  exit and quit would end the engine
        setattr(shell, "_showtraceback", self._keep_traceback)  # noqa: B010  a method, to mypy
        self._show_as_ipython = shell.showtraceback
        self._format_as_ipython = shell.InteractiveTB.structured_traceback
        setattr(shell, "showtraceback", self._show_traceback)  # noqa: B010
        setattr(shell, "show_usage_error", self._keep_usage_error)  # noqa: B010
        # Formats each traceback a second time, for a history that a rank does not write.
        setattr(shell, "_format_exception_for_storage", lambda *_, **__: {})  # noqa: B010
        setattr(shell.InteractiveTB, "structured_traceback", self._formatted)  # noqa: B010
        warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")

    def _transform(self, source: str) -> str:
        """Returns a cell as plain Python; IPython asks again for what this cell has been."""
        (before, after), self._transformed = self._transformed, (None, "")
        return after if before is source else self._transform_as_ipython(source)

    def _keep_traceback(self, _etype: Any, _value: Any, lines: list[str]) -> None:
        self._traceback = lines

    def _keep_usage_error(self, error: BaseException) -> None:
        """IPython prints what was typed wrong, and the traceback would be empty."""
        self._traceback = [f"{type(error).__name__}: {self._text_of(error)}"]

    def _show_traceback(self, raised: tuple[Any, ...] | None = None, **options: Any) -> None:
        """Shows an exception as IPython does, or plainly where that is beyond IPython."""
        error = raised[1] if raised else sys.exc_info()[1]
        if error is not None and not self._can_be_asked(error):
            self._keep_traceback(type(error), error, self._without_text(error))
        elif error is not None and is_beyond_ipython(error):
            self._keep_traceback(type(error), error, plain(error, self._cell_file))
        else:
            try:
                self._show_as_ipython(raised, **options)
            except UsageError as nobody_types:
                # Behind the traceback, by the debugger that ``%pdb on`` asks for.
                if not self._traceback:
                    raise
                print(nobody_types, file=sys.stderr)

    def _formatted(self, etype: Any, value: BaseException, *args: Any, **options: Any) -> list[str]:
        """Returns a traceback as IPython formats it, or a plain one where IPython cannot."""
        if not self._can_be_asked(value):
            return self._without_text(value)
        try:
            if not is_beyond_ipython(value):
                lines: list[str] = self._format_as_ipython(etype, value, *args, **options)
                return lines
        except Exception:
            pass  # as where its search for the source fails
        return plain(value, self._cell_file)

    def _can_be_asked(self, error: BaseException) -> bool:
        """Whether no text of what a traceback shows takes longer than a person waits for it."""
        return all(self._text_of(one) != INTERRUPTED_TEXT for one in shown_with(error))

    def _text_of(self, error: BaseException) -> str:
        """Returns what an exception says; where an interrupt ends that, it is not asked again.

        IPython asks several times, and takes an interrupt for what the exception has raised.
        """
        if any(error is one for one in self._mute):
            return INTERRUPTED_TEXT
        if not self._hearing or get_ident() != _MAIN_THREAD:
            return text_of(error)
        text = INTERRUPTED_TEXT
        before = getsignal(signal.SIGINT)
        try:
            # Not what has an awaiting cell end: nothing is awaited here.
            on_signal(signal.SIGINT, default_int_handler)
            text = text_of(error)
            on_signal(signal.SIGINT, ignore_interrupt)
        except KeyboardInterrupt:
            pass  # it came between two steps of the above
        on_signal(signal.SIGINT, before)
        if text == INTERRUPTED_TEXT:
            self._mute.append(error)
        return text

    def _without_text(self, error: BaseException) -> list[str]:
        return without_text(error, self._cell_file, self._text_of(error))

    def _show_own_frames(
        self, shell: Any, etype: Any, value: BaseException, tb: Any, tb_offset: int | None = None
    ) -> list[str]:
        """Formats a traceback as far as it is the user's, in bounded time."""
        if is_a(value, asyncio.CancelledError) and self.interrupts:
            etype, value = KeyboardInterrupt, KeyboardInterrupt()
        value = self.waits.instead_of(value)
        etype = type(value)
        if is_a(value, _NOT_OUR_FRAMES):
            without_own_frames(tb, *self.waits.not_to_blame)
        without_middle(tb)
        # The cell has ended: an interrupt that comes now would end its report.
        before = on_signal(signal.SIGINT, ignore_interrupt)
        try:
            lines: list[str] = shell.InteractiveTB.structured_traceback(
                etype, value, tb, tb_offset=tb_offset
            )
        finally:
            on_signal(signal.SIGINT, before)
        self._keep_traceback(etype, value, lines)
        return lines

    def interrupt(self, cell: int) -> None:
        """Raises KeyboardInterrupt in the main thread, while or before it runs this cell."""
        with self._hearing_lock:
            if self._hearing == cell:
                self.interrupts += 1
                self.waits.press()
                pthread_kill(_MAIN_THREAD, signal.SIGINT)
                interrupt_children()
                self._over = threading.Event()
                wake(_MAIN_THREAD, self._over)
            else:
                self._interrupted_early = cell

    def _press_again(self) -> None:
        # Only the main thread, which this is, sets what is heard.
        if self._hearing:
            signal.raise_signal(signal.SIGINT)

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
        self._traceback = []
        self._mute = []
        self.interrupts = 0
        # For every cell: IPython takes it away where an interrupt comes while it formats.
        self.shell.set_custom_exc(
            (*_NOT_OUR_FRAMES, RuntimeError, ValueError), self._show_own_frames
        )
        self.shell.execution_count = cell.number
        self.waits.begin()
        collectives.scope.enter(cell.label, cell.ranks or None, cell.cell)
        try:
            self._number = cell.cell
            self._keeps_history = prepare is None
            if prepare is not None:
                prepare()
            result = await (self._call(payloads[0]) if payloads else self._execute(cell.source))
            error = result.error_before_exec or result.error_in_exec
            if error is not None:  # now, while an interrupt is heard
                asked, text = error, self._text_of(error)
        except BaseException as outside:
            if not forks.in_rank():
                forks.leave(outside, traceback.format_exception(outside))
            # IPython catches what a cell raises; this is an interrupt between two of its lines.
            result, error = ExecutionResult(None), outside
        finally:
            self._mend()
            try:
                self._hear_no_more()
            except KeyboardInterrupt:  # it came when the cell had ended: too late to interrupt it
                self._hear_no_more()
            _untraced()
        if error is not None and is_a(error, asyncio.CancelledError) and self.interrupts:
            # How an interrupt reaches a cell that awaits.
            error = KeyboardInterrupt().with_traceback(traceback_of(error))
        if error is not None:
            shown, error = error, self.waits.instead_of(error)
            if error is not shown and is_a(error, KeyboardInterrupt):
                self._show_own_frames(self.shell, type(error), error, traceback_of(error))
        self._history.keep(error)
        interrupted = is_a(error, KeyboardInterrupt)
        told = self._report(error, text if error is asked else None) if error is not None else None
        where = f"line {told.line}: {told.source_line}" if told and told.line else None
        self.waits.leave(error)
        collectives.scope.leave(_reason(error, interrupted), failed=error is not None, where=where)
        if error is None and self._traceback:
            # The value could not be displayed: IPython showed a traceback and went on.
            sys.stderr.write("\n".join([*self._traceback, ""]))
        if error is not None and self.device != "cpu":
            release(error)
        value, problem = self._pickled(result.result, cell.want_value and error is None)
        status = "interrupted" if interrupted else "error" if error is not None else "ok"
        self._mute = []  # they would keep what the cell's frames hold
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
        self._cell_file = shell.compile.get_code_name(source, transformed, shell.execution_count)
        if not shell.should_run_async(
            source, transformed_cell=transformed, preprocessing_exc_tuple=problem
        ):
            if problem is None:
                self._transformed = source, transformed
            self._hear_interrupts()
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
            self._hear_interrupts(task)
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
            self._hear_interrupts()
            function, args, kwargs = pickle.loads(payload)
            code = getattr(function, "__code__", None)
            self._cell_file = code.co_filename if code else ""
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
            self._show_own_frames(shell, type(error), error, tb)
        return self._in_rank(result)

    def _in_rank(self, result: ExecutionResult) -> ExecutionResult:
        """Returns how a cell's code ended, in the rank; a process that it has forked ends here."""
        if not forks.in_rank():
            forks.leave(result.error_before_exec or result.error_in_exec, self._traceback)
        return result

    def _hear_interrupts(self, task: asyncio.Task[Any] | None = None) -> None:
        """Lets SIGINT end the cell; an interrupt that came before it had begun counts too.

        Args:
            task: the cell, where it awaits: raising would hit the event loop instead.
        """

        def cancel(_signal: int, _frame: FrameType | None) -> None:
            assert task is not None
            task.get_loop().call_soon_threadsafe(task.cancel)

        # Python's own handler is no Python function: it leaves no frame in the traceback.
        on_signal(signal.SIGINT, cancel if task else signal.default_int_handler)
        with self._hearing_lock:
            self._hearing = self._number
            early = self._interrupted_early == self._number
        if early:
            raise KeyboardInterrupt

    def _hear_no_more(self) -> None:
        on_signal(signal.SIGINT, ignore_interrupt)
        with self._hearing_lock:
            self._hearing = 0
        self._over.set()

    def _report(self, error: BaseException, text: str | None) -> Report:
        if is_a(error, SystemExit):
            # IPython says how to leave a session, which no cell can leave.
            self._traceback = [_EXIT]
        elif not self._traceback:
            # A cell may have put another one in its place, as rich does, which has shown it then.
            if self.shell.showtraceback == self._show_traceback:
                self.shell.showtraceback((type(error), error, traceback_of(error)))
            else:
                self._traceback = plain(error, self._cell_file)
        more = ""
        if is_out_of_memory(error):
            more = Gpu(self.device).out_of_memory(self.rank, os.getpid(), self.sharers)
        return report(error, self._traceback, self.rank, self.device, self._cell_file, more, text)

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
