"""Runs one cell in this rank, and reports how it ended.

`CellRunner._run` begins and ends a cell. The order of its steps must hold; comments there give the
reasons.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from asyncio import ensure_future
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import wraps
from os import _exit, getpid
from signal import SIGINT, default_int_handler, getsignal
from signal import signal as on_signal
from time import monotonic
from types import FrameType
from typing import Any, NoReturn, TypeVar

import cloudpickle
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.calls.rank_state import FINISHED, INTERRUPTED
from allranks.collectives.calls.sites import shown_name
from allranks.collectives.world import World
from allranks.engine.cell_source import CellNames, search_only_where_needed, show_numbers
from allranks.engine.exceptions import (
    Exceptions,
    has_succeeded,
    hint_of_mpi,
    is_a,
    is_outside_of_cell,
    plain,
    raise_in_magics,
    report,
    text_of,
    traceback_of,
)
from allranks.engine.features import RankFeature, RankHooks
from allranks.engine.given_names import GivenNames, hint, notice, several
from allranks.engine.interrupts import (
    Interrupts,
    end_cells_too,
    ignore_interrupt,
    repeat_dropped_interrupts,
)
from allranks.engine.transcript import Streams, Transcript
from allranks.errors import AllranksError, RankLeft, Report, UsageError
from allranks.records.requests import DEBUG
from allranks.records.wire import Reply, RunCell

T = TypeVar("T")

_CHANGED = (
    "If an earlier cell has changed Python itself on this rank, as sys.modules.clear() does, type: "
    "%distributed restart"
)
_BEFOREHAND = f"This failed before the cell's first line: no line has run here. {_CHANGED}"
_AFTERWARDS = "This failed after the cell's last line: its variables are kept, its value is lost."
_NOT_THE_CELL = f"This error was not raised by a line of the cell. {_CHANGED}"
_NOT_BEGUN = (
    "KeyboardInterrupt: the cell had not begun here, because a request of a client was to be "
    "answered first."
)
_LOW_LIMIT = "A cell has set the recursion limit of this rank to {}. Type: %distributed restart"
_RECURSION_LIMIT = sys.getrecursionlimit()
#: Raised without a line of the cell, too, but with a reason of their own.
_EXPLAINED = (AllranksError, KeyboardInterrupt, asyncio.CancelledError, SyntaxError, SystemExit)
#: A rank keeps this many results of cells, as ``_``, ``__``, ``___`` and in ``Out``.
_KEPT_RESULTS = 3
# A longer exception is described to the notebook, and not sent.
_ERROR_NBYTES = 1 << 20
_FORK_FAILED = 1
#: Programs have reasons to replace these: a replacement that can be called stays.
_OFTEN_REPLACED = {
    *("print", "input", "open", "help", "exit", "quit", "breakpoint", "__import__"),
    *("copyright", "credits", "license", "display", "get_ipython"),
}
_NAMES = vars(builtins)
_CALLABLE = {name: value for name, value in _NAMES.items() if callable(value)}
_OWN = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() - _OFTEN_REPLACED)
_OTHERS = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() & _OFTEN_REPLACED)
#: IPython hides these while a cell runs. An interrupt that comes while it restores them leaves them
#: hidden, so they are not a cell's doing.
_HIDDEN = ("exit", "quit")
#: The methods of a world that other ranks notice.
_SEEN_BY_OTHERS = (
    *("run", "join", "submit", "poll", "progress"),
    *("spoil", "enter", "leave", "depart", "give_up"),
)

_rank_pid = getpid()


class CellRunner:
    """Runs cells in the main thread of a rank, one after the other.

    Attributes:
        replaced: the builtins that a cell had replaced and that were restored.
        replaced_names: the rank's own names that a cell has replaced.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        rank: int,
        device: str,
        features: RankHooks,
        streams: Streams,
    ) -> None:
        self.shell = shell
        self._streams = streams
        self.rank = rank
        self.device = device
        self.features = features
        self.replaced: list[str] = []
        self.replaced_names: list[str] = []
        self._given = GivenNames(shell.user_ns)
        self._ends = ""
        self._keeps_history = True
        self._failed = False
        self.has_begun = False
        # IPython's own copies all that a cell prints into its history.
        setattr(shell, "_tee", lambda channel: nullcontext())  # noqa: B010  a method, to mypy
        self.interrupts = Interrupts(lambda: features.call(RankFeature.interrupted))
        self._exceptions = Exceptions(shell, self.features, self.interrupts)
        end_cells_too(shell, self.interrupts)
        raise_in_magics(shell)
        repeat_dropped_interrupts(self.interrupts.repeat)
        self._trigger_as_ipython: Callable[..., None] = shell.events.trigger
        setattr(shell.events, "trigger", self._trigger)  # noqa: B010  a method, to mypy
        self._transform_as_ipython: Callable[[str], str] = shell.transform_cell
        self._transformed: tuple[str | None, str] = None, ""
        setattr(shell, "transform_cell", self._transform)  # noqa: B010
        search_only_where_needed(shell)
        setattr(shell.compile, "get_code_name", CellNames().name)  # noqa: B010
        show_numbers()
        setattr(shell, "ask_exit", sys.exit)  # noqa: B010  exit and quit would end the engine
        warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")

    def end_rank(self, why: str) -> None:
        """Has the notebook end this rank once it has the reply to the cell that runs."""
        self._ends = why

    def _transform(self, source: str) -> str:
        # IPython transforms each cell twice.
        (before, after), self._transformed = self._transformed, (None, "")
        return after if before is source else self._transform_as_ipython(source)

    def _trigger(self, event: str, *arguments: Any, **options: Any) -> None:
        # IPython drops exceptions of these callbacks, KeyboardInterrupt included.
        before = self.interrupts.count
        self._trigger_as_ipython(event, *arguments, **options)
        # A cell that awaits is cancelled instead, which IPython does not drop.
        if self.interrupts.count != before and getsignal(SIGINT) is default_int_handler:
            raise KeyboardInterrupt

    async def run(
        self,
        cell: RunCell,
        payloads: list[bytes],
        prepare: Callable[[], None] | None = None,
    ) -> tuple[tuple[Reply, list[bytes]]]:
        """Returns the reply to a cell and its payloads, as `Replies`; never raises.

        ``payloads``, if any, is a pickled call in place of the source. ``prepare`` runs as a part
        of the cell; such a cell is not kept in ``In``.
        """
        interrupts, exceptions, features = self.interrupts, self._exceptions, self.features
        asked, text = None, None
        started, self.has_begun = monotonic(), False
        # A debugger inspects the last failure, which stays although the debugger's cell may fail.
        inspected = getattr(sys, "last_value", None) if cell.source == DEBUG else None
        # The begin, in this order: history, interrupts, capture of exceptions, features, scope. The
        # cell accepts interrupts last (`_execute`): an earlier one must not leave a part undone.
        self._forget()
        interrupts.number, interrupts.count = cell.cell, 0
        exceptions.begin()
        self.shell.execution_count = cell.number
        if features.in_cells:
            features.call(RankFeature.cell_started, cell)
        collectives.scope.enter(cell.label, cell.ranks or None, cell.cell)
        try:
            if features.failure is not None:
                # Raised within the scope, whose end releases the ranks that wait for this one.
                raise features.take_failure()
            self._keeps_history = prepare is None
            if prepare is not None:
                prepare()
            self._given.begin()
            self.has_begun = True
            result = await (self._call(payloads[0]) if payloads else self._execute(cell.source))
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                # Here, because ``__str__`` may block, and the cell still accepts interrupts.
                asked, text = error, exceptions.text_of(error)
            if (this := world.current()).queued and not is_a(error, KeyboardInterrupt):
                # Here, because the GPU's work may take long, and may fail.
                failed = error is not None and not has_succeeded(error)
                with suppress(Exception) if failed else nullcontext():
                    this.settle()
        except BaseException as outside:
            if not in_rank():
                end_fork(outside, traceback.format_exception(outside))
            # IPython catches exceptions of the cell; this is an interrupt between two of its lines.
            result, error = ExecutionResult(None), outside
        finally:
            # First: the next lines use Python's own functions, which the cell may have replaced.
            self._restore_builtins()
            self._hear_no_more()
            _untraced()
        if prepare is None:  # else it is a member's, whose names end with it
            self.replaced_names = self._given.end(exceptions.cell_file)
        if error is not None:
            error = self._as_raised(error)
        if features.failure is not None:
            error = self._or_failure(error)
        self._failed = error is not None
        if error is not None:
            self._remember(error)
        interrupted = error is not None and is_a(error, KeyboardInterrupt)
        found = self._report(error, text if error is asked else None) if error is not None else None
        where = f"{shown_name(exceptions.cell_file)}:{found.line}" if found and found.line else ""
        # Features end their waits before the scope is left, which releases the other ranks: those
        # must find that this rank waits no longer.
        if features.in_cells:
            features.call(RankFeature.cell_finished, error)
        reason = FINISHED
        if error is not None:
            reason = INTERRUPTED if interrupted else f"raised {type(error).__name__}"
        this = world.current()
        collectives.scope.leave(reason, failed=error is not None, where=where)
        dirty = this.dirty  # also if a call was pending, which `leave` has ended
        if error is None and exceptions.lines:
            # The value could not be displayed: IPython showed a traceback and went on.
            sys.stderr.write("\n".join([*exceptions.lines, ""]))
        # GPU memory is freed before the value is pickled, which may need some.
        if features.in_cells:
            features.call(RankFeature.cell_left, error)
        if features.failure is not None:
            late = self._or_failure(error)
            if late is not None and late is not error:
                error, found = late, self._report(late, None)
        value, problem = list[bytes](), ""
        try:
            if self._streams.replaced():
                self._interruptible(self._streams.flush_replaced, lambda _: None)
            if cell.want_value and error is None:
                value, problem = self._pickled(result.result)
            elif cell.want_value and is_a(error, Exception):
                value, _ = self._pickled(error)
                if sum(map(len, value)) > _ERROR_NBYTES:
                    value = []
        except KeyboardInterrupt as pressed:
            if error is None:
                exceptions.lines, self._failed, interrupted = [], True, True
                found = self._report(pressed, None)
        exceptions.muted.clear()
        if inspected is not None:
            self._remember(inspected)
        reply = Reply(
            rank=self.rank,
            cell=cell.cell,
            status="ok" if found is None else "interrupted" if interrupted else _failed_as(found),
            seconds=monotonic() - started,
            dirty=dirty,
            has_value=bool(value),
            value_problem=problem,
            report=found,
            epoch=this.epoch,
            traffic=bool(this.traffic),
            ends=self._ends,
            needs=this.needs,
        )
        return ((reply, value),)

    def _as_raised(self, error: BaseException) -> BaseException | None:
        """Returns the error that a cell fails with; None if it has ended by ``sys.exit(0)``."""
        if self.interrupts.count and is_a(error, asyncio.CancelledError):
            # How an interrupt reaches a cell that awaits.
            error = KeyboardInterrupt().with_traceback(traceback_of(error))
        shown, error = error, self.features.error_raised(error)
        if error is not shown and not is_a(error, RankLeft):  # its report has no traceback
            self._exceptions.show(self.shell, type(error), error, traceback_of(error))
        if has_succeeded(error):
            self._exceptions.lines = []
            return None
        return error

    def _or_failure(self, error: BaseException | None) -> BaseException | None:
        failed = self.features.take_failure()
        if error is not None:
            # A cell fails with one error, preferably its own.
            sys.stderr.write(f"{failed}\n")
        return error or failed

    def reply_after(self, cell: int, error: BaseException) -> Reply:
        """Returns the reply to a cell that failed outside of its lines, in place of its own."""
        on_signal(signal.SIGINT, ignore_interrupt)
        when = "failed when its cell had ended" if self.has_begun else "failed before its cell"
        collectives.scope.fail(cell, when)
        more = _AFTERWARDS if self.has_begun else _BEFOREHAND
        found = report(error, plain(error, ""), self.rank, self.device, "", more)
        return self._reply_outside(cell, _failed_as(found), found)

    def interrupted_before(self, cell: int) -> Reply:
        """Returns the reply to a cell that is left out, because an interrupt has come before it
        could begin. In any thread.
        """
        # First: other ranks need not wait for this one, also on their way out.
        world.current().leave_out(cell, INTERRUPTED)
        found = report(KeyboardInterrupt(), [_NOT_BEGUN], self.rank, self.device, "")
        return self._reply_outside(cell, "interrupted", found)

    def _reply_outside(self, cell: int, status: str, found: Report) -> Reply:
        this = world.current()
        return Reply(
            rank=self.rank,
            cell=cell,
            status=status,
            seconds=0.0,
            dirty=this.unfinished,
            has_value=False,
            value_problem="",
            report=found,
            epoch=this.epoch,
            traffic=bool(this.traffic),
            needs=this.needs,
        )

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
            # `run_cell` transforms the source again.
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

        task = ensure_future(awaiting())
        result = None
        try:
            self.interrupts.hear(task)
            result = await task
            return result
        finally:
            # `run_cell` does this itself, `run_cell_async` does not.
            self._end_cell(result)

    async def _call(self, payload: bytes) -> ExecutionResult:
        """Calls a pickled ``(function, args, kwargs)``; its value is the cell's."""
        result = ExecutionResult(None)
        shell = self.shell
        function: Any = None
        try:
            self.interrupts.hear()
            function, args, kwargs = pickle.loads(payload)
            code = getattr(function, "__code__", None)
            self._exceptions.cell_file = code.co_filename if code else ""
            if getattr(function, "__module__", "") == "__main__":
                # It was pickled by value, with the globals that it uses: add those of the rank.
                function.__globals__.update(shell.user_ns | function.__globals__)
            result.result = function(*args, **kwargs)
        except BaseException as error:
            result.error_in_exec = error
            # The first frame is ours: it called the function.
            tb = traceback_of(error)
            for _ in range(1 + getattr(function, "own_frames", 0)):
                tb = tb and (tb.tb_next or tb)
            self._exceptions.show(shell, type(error), error, tb)
        self._in_rank(result)
        self._end_cell(result)
        return result

    def _end_cell(self, result: ExecutionResult | None) -> None:
        """Triggers the events after a cell, as IPython's `run_cell`: figures are shown, closed."""
        self.shell.events.trigger("post_execute")
        if result is not None:
            self.shell.events.trigger("post_run_cell", result)

    def _in_rank(self, result: ExecutionResult) -> ExecutionResult:
        if not in_rank():
            # A process that the cell has forked ends with the cell.
            end_fork(result.error_before_exec or result.error_in_exec, self._exceptions.lines)
        return result

    def _report(self, error: BaseException, text: str | None) -> Report:
        shown = self._exceptions
        lines, more = shown.lines_of(error), self.features.error_details(error)
        limit = sys.getrecursionlimit()
        if is_a(error, RecursionError) and limit < _RECURSION_LIMIT:
            more = f"{more}\n{_LOW_LIMIT.format(limit)}".lstrip()
        elif not is_a(error, _EXPLAINED) and is_outside_of_cell(error, shown.cell_file):
            more = f"{more}\n{_NOT_THE_CELL}".lstrip()
        more = f"{more}\n{hint_of_mpi(error)}".strip()
        if is_a(error, Exception) and not is_a(error, (RankLeft, SyntaxError)):
            replaced = self._given.names_in(traceback_of(error))
            if replaced:
                more = f"{more}\n{hint(replaced)}".lstrip()
                self.replaced_names = [n for n in self.replaced_names if n not in replaced]
        return report(error, lines, self.rank, self.device, shown.cell_file, more, text)

    def _pickled(self, value: object) -> tuple[list[bytes], str]:
        """Returns a value's pickle, or why there is none; raises KeyboardInterrupt on one."""

        def problem(error: BaseException) -> tuple[list[bytes], str]:
            return [], f"{type(value).__name__}: {text_of(error)}"

        return self._interruptible(lambda: ([cloudpickle.dumps(value, protocol=5)], ""), problem)

    def _interruptible(self, call: Callable[[], T], failed: Callable[[BaseException], T]) -> T:
        """Calls what runs the code of an object of the cell, which may take its time and raise
        anything; raises KeyboardInterrupt only on an interrupt.
        """
        before = self.interrupts.count
        try:
            self.interrupts.hear()
            try:
                return call()
            except BaseException as error:
                if is_a(error, KeyboardInterrupt) and self.interrupts.count > before:
                    raise
                return failed(error)
        finally:
            self._hear_no_more()

    def _hear_no_more(self) -> None:
        try:
            self.interrupts.hear_no_more()
        except KeyboardInterrupt:  # it came when the cell had ended: too late to interrupt it
            self.interrupts.hear_no_more()

    def _restore_builtins(self) -> None:
        # No builtin can be called here that a cell may have replaced.
        for name, value in _OWN:
            if _NAMES.get(name) is not value:
                _NAMES[name] = value
                self.replaced.append(name)
        for name, value in _OTHERS:
            if not callable(_NAMES.get(name)):
                _NAMES[name] = value
                if name not in _HIDDEN:
                    self.replaced.append(name)

    def notices(self) -> list[str]:
        """Returns a line about the builtins that the cell had replaced, and one about names."""
        found = []
        if self.replaced:
            restored = "which all of Python uses. The originals are restored."
            found.append(f"this cell replaced {several(sorted(self.replaced))}, {restored}")
        if self.replaced_names:
            found.append(notice(self.replaced_names))
        self.replaced, self.replaced_names = [], []
        return found

    def _remember(self, error: BaseException) -> None:
        # For ``%debug`` and ``%tb``.
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = traceback_of(error)
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        self.shell.InteractiveTB.tb = traceback_of(error)

    def _forget(self) -> None:
        """Drops what IPython keeps of earlier cells, which would fill the memory.

        The log has their output. The last results stay, and the exception of the last cell.
        """
        shell = self.shell
        kept: Any = shell.history_manager
        kept.outputs.clear()
        kept.exceptions.clear()
        kept.output_hist_reprs.clear()
        values: dict[int, Any] = kept.output_hist
        for number in list(values)[:-_KEPT_RESULTS]:
            value, name = values.pop(number), f"_{number}"
            for names in (shell.user_ns, shell.user_ns_hidden):
                if names.get(name) is value:
                    del names[name]
        if self._failed:
            self._failed = False
            shell.last_execution_result = None
            shell.displayhook.exec_result = None
            # An exception and its frames refer to each other: only a collection frees them.
            gc.collect()


def _untraced() -> None:
    """Ends a debugger's trace of the frames below the cell, which go on after the cell."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_trace is not None:
            frame.f_trace = None
        frame = frame.f_back


def _failed_as(found: Report) -> str:
    return "waiting" if found.waiting else "error"


# A process that a cell forks is not a rank, though it has a copy of the rank's memory and shares
# its sockets and its place in MPI. It runs the cell to its end and ends there. What it prints
# reaches the rank's log, its displays are printed as text, and a collective in it is an error.


def in_rank() -> bool:
    return getpid() == _rank_pid


def watch_forks(
    transcript: Transcript, call_soon: Callable[[Callable[[], object]], object]
) -> None:
    global _rank_pid
    _rank_pid = getpid()
    whole = world.current()

    def in_child() -> None:
        transcript.forked()
        for one in (whole, world.current()):
            _refuse_collectives(one)
        # A forked process that returns to the event loop ends there.
        call_soon(end_fork)

    def before() -> None:
        # Buffered text would be written twice, by the rank and by the forked process.
        transcript.streams.flush_replaced()
        transcript.streams.flush(c_streams=True)

    os.register_at_fork(before=before, after_in_child=in_child)
    for name in ("execv", "execve"):  # all other functions of os call one of them
        setattr(os, name, _in_forks_only(getattr(os, name), whole.rank))


def _in_forks_only(execute: Callable[..., NoReturn], rank: int) -> Callable[..., NoReturn]:
    # The program would never reply to the cell, and nothing would tell it from a rank that is late.
    @wraps(execute)
    def executing(*args: Any, **options: Any) -> NoReturn:
        if in_rank():
            raise UsageError(
                f"expected rank {rank} to go on after the cell, found os.{execute.__name__}(), "
                "which replaces its process by another program. Type: subprocess.run([...])"
            )
        execute(*args, **options)

    return executing


def _refuse_collectives(this: World) -> None:
    rank, parent = this.rank, _rank_pid

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a collective must be called by a rank: process {getpid()} was forked by rank {rank} "
            f"(pid {parent}). Return the value to the rank, and make the call there."
        )

    # Rank and size stay readable.
    for name in _SEEN_BY_OTHERS:
        setattr(this, name, refuse)


def end_fork(error: BaseException | None = None, lines: list[str] | None = None) -> NoReturn:
    """Ends a forked process as Python ends a program, but without the rank's exit functions."""
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else _FORK_FAILED if error.code else 0
            lines = [str(error.code)] if isinstance(error.code, str) else []
        elif error is not None:
            code = _FORK_FAILED
        for line in lines or []:
            print(line, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        _exit(code)
