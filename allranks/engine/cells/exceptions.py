"""Shows what a cell raises as IPython does, without the frames that are not the user's."""

from __future__ import annotations

import asyncio
import signal
import sys
from signal import default_int_handler, getsignal
from signal import signal as on_signal
from threading import get_ident
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.cells.interrupts import MAIN_THREAD, Interrupts, ignore_interrupt
from allranks.engine.features import RankHooks
from allranks.engine.report import (
    INTERRUPTED_TEXT,
    is_a,
    is_beyond_ipython,
    plain,
    shown_with,
    text_of,
    traceback_of,
    without_middle,
    without_own_frames,
    without_text,
)
from allranks.errors import CollectiveError, UsageError

#: Raised inside allranks on the user's behalf: the frames there are not to blame.
_NOT_OUR_FRAMES = (CollectiveError, UsageError, KeyboardInterrupt, asyncio.CancelledError)
_MAYBE_OTHERS = (*_NOT_OUR_FRAMES, RuntimeError, ValueError)
"""What torch and JAX raise where a wait in them has been ended is among these."""
_BEFORE = "KeyboardInterrupt: it came before the cell's first statement, or after its last."
_EXIT = "sys.exit() ends the cell, not the rank: the rank keeps running, with its variables."


class Exceptions:
    """Takes from IPython how it shows exceptions, and keeps what is shown for the cell's reply.

    Args:
        shell: the engine's IPython shell.
        features: may replace an error.
        interrupts: of the cell that runs.

    Attributes:
        lines: the traceback that is shown last.
        cell_file: the name of the cell's source in tracebacks.
    """

    def __init__(
        self, shell: InteractiveShell, features: RankHooks, interrupts: Interrupts
    ) -> None:
        self.lines: list[str] = []
        self.cell_file = ""
        self._shell = shell
        self._features = features
        self._interrupts = interrupts
        #: What was interrupted as it said what it is about.
        self._mute: list[BaseException] = []
        self._show_as_ipython = shell.showtraceback
        self._format_as_ipython = shell.InteractiveTB.structured_traceback
        setattr(shell, "_showtraceback", self._keep)  # noqa: B010  a method, to mypy
        setattr(shell, "showtraceback", self._show)  # noqa: B010
        setattr(shell, "show_usage_error", self._keep_usage_error)  # noqa: B010
        # Formats each traceback a second time, for a history that a rank does not write.
        setattr(shell, "_format_exception_for_storage", lambda *_, **__: {})  # noqa: B010
        setattr(shell.InteractiveTB, "structured_traceback", self._formatted)  # noqa: B010

    def begin(self) -> None:
        """A cell begins."""
        self.lines = []
        self.forget()
        # For every cell: IPython takes it away where an interrupt comes while it formats.
        self._shell.set_custom_exc(_MAYBE_OTHERS, self._show_own_frames)

    def forget(self) -> None:
        """Lets go of exceptions, which keep what the cell's frames hold."""
        self._mute = []

    def show(self, error: BaseException, tb: Any) -> None:
        """Shows an exception with this traceback, as far as its frames are the user's."""
        self._show_own_frames(self._shell, type(error), error, tb)

    def lines_of(self, error: BaseException) -> list[str]:
        """Returns the traceback of what a cell has raised, and shows it where that was not done."""
        if is_a(error, SystemExit):
            # IPython says how to leave a session, which no cell can leave.
            self.lines = [_EXIT]
        elif not self.lines and self._is_interrupt_outside(error, traceback_of(error)):
            self.lines = [_BEFORE]
        elif not self.lines:
            # A cell may have put another one in its place, as rich does, which has shown it then.
            if self._shell.showtraceback == self._show:
                self._shell.showtraceback((type(error), error, traceback_of(error)))
            else:
                self.lines = plain(error, self.cell_file)
        return self.lines

    def text_of(self, error: BaseException) -> str:
        """Returns what an exception says; where an interrupt ends that, it is not asked again.

        IPython asks several times, and takes an interrupt for what the exception has raised.
        """
        if any(error is one for one in self._mute):
            return INTERRUPTED_TEXT
        if not self._interrupts.heard or get_ident() != MAIN_THREAD:
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

    def _keep(self, _etype: Any, _value: Any, lines: list[str]) -> None:
        self.lines = lines

    def _keep_usage_error(self, error: BaseException) -> None:
        """IPython prints what was typed wrong, and the traceback would be empty."""
        self.lines = [f"{type(error).__name__}: {self.text_of(error)}"]

    def _show(self, raised: tuple[Any, ...] | None = None, **options: Any) -> None:
        """Shows an exception as IPython does, or plainly where that is beyond IPython."""
        error = raised[1] if raised else sys.exc_info()[1]
        if error is not None and not self._can_be_asked(error):
            self.lines = self._without_text(error)
        elif error is not None and is_beyond_ipython(error):
            self.lines = plain(error, self.cell_file)
        else:
            try:
                self._show_as_ipython(raised, **options)
            except UsageError as nobody_types:
                # Behind the traceback, by the debugger that ``%pdb on`` asks for.
                if not self.lines:
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
        return plain(value, self.cell_file)

    def _show_own_frames(
        self, shell: Any, etype: Any, value: BaseException, tb: Any, tb_offset: int | None = None
    ) -> list[str]:
        """Formats a traceback as far as it is the user's, in bounded time."""
        if is_a(value, asyncio.CancelledError) and self._interrupts.count:
            value = KeyboardInterrupt()
        value = self._features.error_raised(value)
        etype = type(value)
        if self._is_interrupt_outside(value, tb):
            self.lines = [_BEFORE]
            return self.lines
        without_middle(tb)
        # The cell has ended: an interrupt that comes now would end its report.
        before = on_signal(signal.SIGINT, ignore_interrupt)
        try:
            lines: list[str] = shell.InteractiveTB.structured_traceback(
                etype, value, tb, tb_offset=tb_offset
            )
        finally:
            on_signal(signal.SIGINT, before)
        self.lines = lines
        return lines

    def _is_interrupt_outside(self, error: BaseException, tb: Any) -> bool:
        """Takes our frames off the end of a traceback; whether it is an interrupt without others.

        One that comes before the cell's first statement, or after its last, IPython does not see.
        """
        found = not is_a(error, _NOT_OUR_FRAMES) or without_own_frames(
            tb, *self._features.hidden_frames()
        )
        return not found and is_a(error, KeyboardInterrupt)

    def _can_be_asked(self, error: BaseException) -> bool:
        """Whether no text of what a traceback shows takes longer than a person waits for it."""
        return all(self.text_of(one) != INTERRUPTED_TEXT for one in shown_with(error))

    def _without_text(self, error: BaseException) -> list[str]:
        return without_text(error, self.cell_file, self.text_of(error))
