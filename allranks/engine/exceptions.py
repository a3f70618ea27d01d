"""The exception that ends a cell: its traceback as IPython shows it, and its report."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from signal import default_int_handler, getsignal
from signal import signal as on_signal
from threading import get_ident
from traceback import walk_tb  # here, because a cell may replace it
from types import TracebackType
from typing import Any, TypeVar, cast

import cloudpickle
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magics.execution import ExecutionMagics
from IPython.core.magics.history import HistoryMagics

from allranks.collectives.calls.sites import (
    CELLS,
    LIBRARY,
    MPI4PY,
    OURS,
    USER,
    kind_of,
    source_line,
)
from allranks.engine.features import RankHooks
from allranks.engine.interrupts import MAIN_THREAD, Interrupts, ignore_interrupt
from allranks.engine.shell_magics import replace_magic
from allranks.errors import CheckFailed, CollectiveError, RankLeft, Report, UsageError
from allranks.records.code_names import is_cell, with_numbers
from allranks.records.ranks import Activity

T = TypeVar("T")

#: Raised inside allranks on the user's behalf: their tracebacks end at the user's last frame.
_NOT_OUR_FRAMES = (CollectiveError, UsageError, KeyboardInterrupt, asyncio.CancelledError)
#: Includes the errors of libraries when a feature ends a wait in them.
_MAYBE_OTHERS = (*_NOT_OUR_FRAMES, RuntimeError, ValueError)
_BEFORE = "KeyboardInterrupt: it came before the cell's first statement, or after its last."
_EXIT = "sys.exit() ends the cell, not the rank: the rank keeps running, with its variables."
_NAME_CHARACTERS = 200
_MESSAGE_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 20_000
_KEPT_FRAMES = 10
_MOST_CHAINED = 30
#: Stands for the text of an exception whose ``__str__`` was interrupted.
INTERRUPTED_TEXT = "<str() of it was interrupted>"
_NO_RANK = (
    "Expected ranks from 0 to comm.size - 1 as dest, source and root, found another number. Type "
    "for example: dest=(rank + 1) % size"
)
#: The file name of code that dataclasses and similar tools generate.
_GENERATED = "<string>"
#: Where values are pickled that the user sends.
_PICKLES = os.path.dirname(cloudpickle.__file__) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Exceptions:
    """Replaces how IPython shows exceptions; keeps the lines for the cell's reply.

    Attributes:
        lines: the traceback that was shown last.
        cell_file: the file name of the cell's code.
        muted: exceptions whose ``__str__`` was interrupted. They keep the cell's frames alive.
    """

    def __init__(
        self, shell: InteractiveShell, features: RankHooks, interrupts: Interrupts
    ) -> None:
        self.lines: list[str] = []
        self.cell_file = ""
        self._shell = shell
        self._features = features
        self._interrupts = interrupts
        self.muted: list[BaseException] = []
        self._show_as_ipython = shell.showtraceback
        self._format_as_ipython = shell.InteractiveTB.structured_traceback
        setattr(shell, "_showtraceback", self._keep)  # noqa: B010  a method, to mypy
        setattr(shell, "showtraceback", self._show)  # noqa: B010
        setattr(shell, "show_usage_error", self._keep_usage_error)  # noqa: B010
        # IPython's own formats each traceback a second time, for a history that a rank lacks.
        setattr(shell, "_format_exception_for_storage", lambda *_, **__: {})  # noqa: B010
        setattr(shell.InteractiveTB, "structured_traceback", self._formatted)  # noqa: B010

    def begin(self) -> None:
        self.lines = []
        self.muted.clear()
        # For every cell, because IPython resets it if an interrupt comes while it formats.
        self._shell.set_custom_exc(_MAYBE_OTHERS, self.show)

    def lines_of(self, error: BaseException) -> list[str]:
        """Returns the traceback of a cell's exception, and shows it if IPython has not."""
        if is_a(error, SystemExit):
            # IPython explains how to leave a session, which a cell cannot.
            text = self.text_of(error)
            self.lines = [_EXIT, f"SystemExit: {text}"] if text else [_EXIT]
        elif not self.lines and self._is_interrupt_outside(error, traceback_of(error)):
            self.lines = [_BEFORE]
        elif not self.lines:
            # If the cell has replaced this method, as rich does, the replacement has shown it.
            if self._shell.showtraceback == self._show:
                self._shell.showtraceback((type(error), error, traceback_of(error)))
            else:
                self.lines = plain(error, self.cell_file)
        return self.lines

    def text_of(self, error: BaseException) -> str:
        """Returns an exception's text; after an interrupt of its ``__str__``, a substitute."""
        # IPython calls ``__str__`` several times, and takes an interrupt for an error of it.
        if any(error is one for one in self.muted):
            return INTERRUPTED_TEXT
        if not self._interrupts.heard or get_ident() != MAIN_THREAD:
            return text_of(error)
        text = _unless_interrupted(lambda: text_of(error))
        if text in (None, INTERRUPTED_TEXT):
            self.muted.append(error)
            return INTERRUPTED_TEXT
        return text

    def _keep(self, _etype: Any, _value: Any, lines: list[str]) -> None:
        self.lines = lines
        # A kernel's reply to a client has the traceback from here.
        setattr(self._shell, "_last_traceback", lines)  # noqa: B010

    def _keep_usage_error(self, error: BaseException) -> None:
        # IPython prints the message without a traceback.
        self.lines = [f"{type(error).__name__}: {self.text_of(error)}"]

    def _show(self, raised: tuple[Any, ...] | None = None, **options: Any) -> None:
        """Shows an exception as IPython does, or as Python does if IPython cannot."""
        error = raised[1] if raised else sys.exc_info()[1]
        if error is not None:
            self._hide_own_frames(error)
        if error is not None and not self._can_be_asked(error):
            self.lines = plain(error, self.cell_file, self.text_of(error))
        elif error is not None and is_beyond_ipython(error):
            self.lines = plain(error, self.cell_file)
        else:
            try:
                self._show_as_ipython(raised, **options)
            except UsageError as no_input:
                # Raised after the traceback, by the prompt of the debugger that ``%pdb on`` starts.
                if not self.lines:
                    raise
                print(no_input, file=sys.stderr)

    def _formatted(self, etype: Any, value: BaseException, *args: Any, **options: Any) -> list[str]:
        """Returns a traceback as IPython formats it, or as Python does if IPython cannot."""
        self._hide_own_frames(value)
        if not self._can_be_asked(value):
            return plain(value, self.cell_file, self.text_of(value))
        try:
            if not is_beyond_ipython(value):
                lines = self._as_ipython(etype, value, *args, **options)
                if lines is not None:
                    return lines
        except (Exception, SystemExit, GeneratorExit):
            pass  # for example, its search for the source fails, or the error's ``__str__``
        return plain(value, self.cell_file)

    def _as_ipython(self, *args: Any, **options: Any) -> list[str] | None:
        """Returns a traceback as IPython formats it; None after an interrupt.

        In the mode Verbose it has the texts of variables, and their ``__repr__`` may block.
        """
        verbose = self._shell.InteractiveTB.mode == "Verbose"

        def formatted() -> list[str]:
            lines: list[str] = self._format_as_ipython(*args, **options)
            return lines

        if verbose and self._interrupts.heard and get_ident() == MAIN_THREAD:
            return _unless_interrupted(formatted)
        return formatted()

    def show(
        self, shell: Any, etype: Any, value: BaseException, tb: Any, tb_offset: int | None = None
    ) -> list[str]:
        """Shows a traceback up to the user's last frame, formatted in bounded time."""
        if is_a(value, asyncio.CancelledError) and self._interrupts.count:
            value = KeyboardInterrupt()
        value = self._features.error_raised(value)
        etype = type(value)
        if self._is_interrupt_outside(value, tb):
            self.lines = [_BEFORE]
            return self.lines
        without_middle(tb)
        # The cell has ended: an interrupt now would end the formatting of its report.
        before = on_signal(signal.SIGINT, ignore_interrupt)
        try:
            lines: list[str] = shell.InteractiveTB.structured_traceback(
                etype, value, tb, tb_offset=tb_offset
            )
        finally:
            on_signal(signal.SIGINT, before)
        self._keep(etype, value, lines)
        return lines

    def _is_interrupt_outside(self, error: BaseException, tb: Any) -> bool:
        """Removes our frames from the end of a traceback; returns whether an interrupt has no
        others.
        """
        # An interrupt before the cell's first statement, or after its last, has only our frames.
        found = not is_a(error, _NOT_OUR_FRAMES) or without_own_frames(
            tb, *self._features.hidden_frames()
        )
        return not found and is_a(error, KeyboardInterrupt)

    def _hide_own_frames(self, error: BaseException) -> None:
        # Also of the exceptions that led to it: of a RankLeft, after which ``finally`` has failed.
        for one in shown_with(error):
            tb = traceback_of(one)
            if is_a(one, _NOT_OUR_FRAMES) or _is_deliberate(tb):
                without_own_frames(tb, *self._features.hidden_frames())

    def _can_be_asked(self, error: BaseException) -> bool:
        """Whether the texts of all exceptions that a traceback shows can be had in time."""
        return all(self.text_of(one) != INTERRUPTED_TEXT for one in shown_with(error))


def is_a(error: object, kinds: type | tuple[type, ...]) -> bool:
    # A user's exception may make ``isinstance`` raise.
    return issubclass(type(error), kinds)


def has_succeeded(error: BaseException) -> bool:
    # As a program: ``sys.exit()`` without a value, or with the integer 0, reports success.
    if not is_a(error, SystemExit):
        return False
    # Its class may redefine ``code``, and what is in it ``==``.
    code = vars(SystemExit)["code"].__get__(error)
    return code is None or (is_a(code, int) and int.__eq__(code, 0))


def is_outside_of_cell(error: BaseException, cell_file: str) -> bool:
    """Whether no line of a cell's source has led to an error; false for a function's call."""
    return is_cell(cell_file) and not _lines_in(error, cell_file)


def _lines_in(error: BaseException, cell_file: str) -> list[int]:
    """Returns the numbers of the lines of a cell that have led to an error, in the order of calls.

    The group of the exceptions that ``except*`` raises has no lines: then those of its first member
    that has some.
    """
    pending, seen = [error], 0
    while pending and seen < _MOST_CHAINED:
        one, seen = pending.pop(0), seen + 1
        frames = walk_tb(traceback_of(one))
        lines = [line for frame, line in frames if frame.f_code.co_filename == cell_file]
        if lines:
            return lines
        if is_a(one, BaseExceptionGroup):
            pending += vars(BaseExceptionGroup)["exceptions"].__get__(one)
    return []


def traceback_of(error: BaseException) -> TracebackType | None:
    # A class may redefine ``__traceback__``.
    found: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return found


def without_own_frames(tb: TracebackType | None, *others: str) -> bool:
    """Ends a traceback at the last frame that is not in this package; returns whether there is one.

    Frames of libraries below this package's are removed too: one may call it back. So are those of
    files whose names contain one of ``others``.
    """
    last, ours = None, False
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        kind = kind_of(file)
        passes = kind == LIBRARY or file == _GENERATED
        ours = kind == OURS or (ours and passes) or any(other in file for other in others)
        if not ours:
            last = tb
        tb = tb.tb_next
    if last is not None:
        last.tb_next = None
    return last is not None


def _is_deliberate(tb: TracebackType | None) -> bool:
    # Raised by a `raise` of this package, or in what it calls for the user: no error of its code.
    name, line = "", 0
    while tb is not None:
        name, line, tb = tb.tb_frame.f_code.co_filename, tb.tb_lineno, tb.tb_next
    if name.startswith((MPI4PY, _PICKLES)):
        return True
    return kind_of(name) == OURS and source_line(name, line).startswith("raise ")


def without_middle(tb: TracebackType | None) -> None:
    # IPython takes seconds for a thousand frames.
    chain = []
    while tb is not None:
        chain.append(tb)
        tb = tb.tb_next
    if len(chain) > 2 * _KEPT_FRAMES:
        chain[_KEPT_FRAMES - 1].tb_next = chain[-_KEPT_FRAMES]


def is_beyond_ipython(error: BaseException) -> bool:
    # IPython hides the members of a group, and never ends if an exception is its own cause.
    try:
        chains = _chain(error, by_cause=True), _chain(error, by_cause=False)
    except Exception:  # a class may have a ``__cause__`` of its own
        return True
    return any(
        len(chain) > _MOST_CHAINED or isinstance(chain[-1], BaseExceptionGroup) for chain in chains
    )


def _chain(error: BaseException, by_cause: bool) -> list[BaseException]:
    chain = [error]
    while len(chain) <= _MOST_CHAINED and not isinstance(chain[-1], BaseExceptionGroup):
        before = (chain[-1].__cause__ if by_cause else None) or chain[-1].__context__
        if before is None:
            break
        chain.append(before)
    return chain


def plain(error: BaseException, cell_file: str, text: str | None = None) -> list[str]:
    """Returns a traceback as Python prints it, from the cell's first frame on.

    With ``text``, the error's, it calls no exception's ``__str__``.
    """
    tb = from_cell(error, cell_file.__eq__)
    try:
        if text is None:
            lines = traceback.format_exception(type(error), error, tb)
        else:
            last = f"{type(error).__name__}: {text}"
            lines = ["Traceback (most recent call last):\n", *traceback.format_tb(tb), last]
    except Exception:
        lines = [f"{type(error).__name__}: {text_of(error)}"]
    return with_numbers("".join(lines), CELLS).splitlines()


def shown_with(error: BaseException) -> list[BaseException]:
    """Returns an exception and the others that its traceback shows, up to a limit."""
    found, new = [error], [error]
    while new and len(found) <= _MOST_CHAINED:
        one = new.pop(0)
        try:
            behind = [one.__cause__, one.__context__]
            behind += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        except Exception:  # a class may have a ``__cause__`` of its own
            continue
        for other in behind:
            if is_a(other, BaseException) and not any(other is known for known in found):
                found.append(cast(BaseException, other))
                new.append(found[-1])
    return found


def from_cell(error: BaseException, is_cell: Callable[[str], bool]) -> TracebackType | None:
    raised_at = tb = traceback_of(error)
    while tb is not None and not is_cell(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb or raised_at


def report(
    error: BaseException,
    formatted: list[str],
    rank: int,
    device: str,
    cell_file: str,
    more: str = "",
    text: str | None = None,
) -> Report:
    """Returns the report of an exception that ended a cell.

    ``formatted`` is the traceback as IPython shows it, with colour codes. ``more`` is added to the
    exception's text, which is ``text`` if given.
    """
    line, source = None, ""
    lines = _lines_in(error, cell_file)
    if lines:
        line, source = lines[-1], source_line(cell_file, lines[-1])
    if is_a(error, CheckFailed):
        # The line has the source of the check, and the answer perhaps.
        line, source = None, ""
        formatted = cast(CheckFailed, error)._render_traceback_()
    if is_a(error, SyntaxError):
        said = cast(SyntaxError, error)
        if said.filename == cell_file:
            line, source = said.lineno, (said.text or "").strip()
    waited = interrupted_wait(error, "cell")
    text = waited or (text_of(error) if text is None else text)
    return Report(
        rank=rank,
        host=socket.gethostname(),
        device=device,
        etype=_bounded(type(error).__name__, _NAME_CHARACTERS),
        message=text + (f"\n{more}" if more else ""),
        traceback=(
            _bounded("\n".join([*formatted, more] if more else formatted), _TRACEBACK_CHARACTERS),
        ),
        line=line,
        source_line=_bounded(source, _MESSAGE_CHARACTERS),
        # A rank that could not go on because another one left is reported as waiting.
        waiting=is_a(error, RankLeft) or bool(waited),
    )


def interrupted_wait(error: BaseException | None, what: str) -> str:
    """Returns in which call a rank waited when ``what`` was interrupted; "" if it did not wait."""
    waited = vars(error).get("waited") if type(error) is KeyboardInterrupt else None
    if not isinstance(waited, Activity) or not waited.waits_for:
        return ""
    return f"{waited.text} waited for {waited.waits_for} when the {what} was interrupted."


def _unless_interrupted(call: Callable[[], T]) -> T | None:
    """Returns what a call returns; None after an interrupt of it. In the main thread."""
    result = None
    before = getsignal(signal.SIGINT)
    try:
        # Not the handler that cancels an awaiting cell: nothing is awaited here.
        on_signal(signal.SIGINT, default_int_handler)
        result = call()
        on_signal(signal.SIGINT, ignore_interrupt)
    except KeyboardInterrupt:
        pass  # it came between the two calls of on_signal
    finally:
        on_signal(signal.SIGINT, before)
    return result


def text_of(error: BaseException) -> str:
    try:
        # A user's ``__str__`` may raise, or return any amount of text.
        return _bounded(str(error), _MESSAGE_CHARACTERS)
    except KeyboardInterrupt:
        return INTERRUPTED_TEXT
    except BaseException as problem:
        return f"<its text cannot be shown: {type(problem).__name__}>"


def hint_of_mpi(error: BaseException) -> str:
    """Returns what to type after the commonest mistake that MPI reports in two words; else ""."""
    # mpi4py is imported where a rank starts.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not is_a(error, mpi.Exception):
        return ""
    kind = mpi.Exception.Get_error_class(error)
    return _NO_RANK if kind == mpi.ERR_RANK else ""


def _bounded(text: str, most: int) -> str:
    """Returns a text, or its two ends around the number of characters left out."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}\x1b[0m … {left_out:,} characters … {text[-(most // 2) :]}"


_CAPTURE, _RERUN, _RUN = ExecutionMagics.capture, HistoryMagics.rerun, ExecutionMagics.run


def raise_in_magics(shell: InteractiveShell) -> None:
    """Has the magics that run code raise its exception, which IPython only shows."""
    replace_magic(shell, ExecutionMagics, "capture", "capture", _raising(shell, _CAPTURE))
    replace_magic(shell, HistoryMagics, "rerun", "rerun", _raising(shell, _RERUN))
    replace_magic(shell, ExecutionMagics, "run", "run", _raising_script(shell, _RUN))


def _raising(shell: InteractiveShell, quiet: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a magic that raises the exception of the cell that it runs."""

    @wraps(quiet)
    def raising(*arguments: Any) -> None:
        __tracebackhide__ = True
        run_cell: Callable[..., ExecutionResult] = shell.run_cell
        results: list[ExecutionResult] = []

        def remembering(*args: Any, **options: Any) -> ExecutionResult:
            results.append(run_cell(*args, **options))
            return results[-1]

        setattr(shell, "run_cell", remembering)  # noqa: B010  a method, to mypy
        try:
            quiet(*arguments)
        finally:
            setattr(shell, "run_cell", run_cell)  # noqa: B010
        for result in results:
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                tb = from_cell(error, is_cell)
                raise BaseException.with_traceback(error, tb)

    return raising


def _raising_script(shell: InteractiveShell, quiet: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``%run`` that raises the exception of its script.

    It does so at its end: until then IPython gives the cell the script's variables.
    """
    #: What the script of the innermost ``%run`` has raised: a script may run another one.
    running: ContextVar[list[BaseException] | None] = ContextVar("running", default=None)
    execute_as_ipython: Callable[..., None] = shell.safe_execfile

    def execute(
        *where: Any, exit_ignore: bool = False, raise_exceptions: bool = False, **options: Any
    ) -> None:
        raised = running.get()
        if raised is None or raise_exceptions:
            options |= {"exit_ignore": exit_ignore, "raise_exceptions": raise_exceptions}
            execute_as_ipython(*where, **options)
            return
        if raised:  # the option -N repeats a script
            return
        try:
            execute_as_ipython(*where, raise_exceptions=True, **options)
        except BaseException as error:
            if not (exit_ignore and is_a(error, SystemExit)):
                raised.append(error)

    def execute_module(name: str, names: dict[str, Any]) -> None:
        raised = running.get()
        if raised:
            return
        try:
            names.update(runpy.run_module(str(name), run_name="__main__", alter_sys=True))
        except BaseException as error:
            if raised is None:
                raise
            if not has_succeeded(error):
                raised.append(error)

    @wraps(quiet)
    def run(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        raised: list[BaseException] = []
        before = running.set(raised)
        try:
            value = quiet(*arguments, **options)
        finally:
            running.reset(before)
        for error in raised:
            tb = from_cell(error, lambda file: kind_of(file) == USER)
            raise BaseException.with_traceback(error, tb)
        return value

    setattr(shell, "safe_execfile", execute)  # noqa: B010
    setattr(shell, "safe_run_module", execute_module)  # noqa: B010
    return run
