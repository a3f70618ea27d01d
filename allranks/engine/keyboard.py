"""What a cell on a rank asks a person: ``input()``, ``getpass()``, and so every debugger.

The prompt goes to the notebook, which has the field to type in; the thread that asked waits here.
"""

from __future__ import annotations

import bdb
import builtins
import getpass
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from IPython.core import debugger
from IPython.core.interactiveshell import InteractiveShell

from allranks.collectives import scope
from allranks.engine.cells.forks import in_rank
from allranks.engine.ipengine import CELL_FILE
from allranks.errors import UsageError
from allranks.records.wire import Prompt, Typed

#: So often a waiting cell looks whether it was interrupted: one that awaits hears it only here.
_LOOK_SECONDS = 0.05
_FORKED = "a forked process cannot ask for input: call input() in the rank, before the fork."
_NO_CELL = "input() needs a running cell."


class Keyboard:
    """Asks a person one line at a time.

    Args:
        rank: this process's rank.
        ask: sends a prompt to the notebook, behind all that was written before it.
        cell: returns the number of the cell that runs now, or 0.
        interrupts: returns how many interrupts it has been sent.
    """

    def __init__(
        self,
        rank: int,
        ask: Callable[[Prompt], None],
        cell: Callable[[], int],
        interrupts: Callable[[], int],
    ) -> None:
        self._rank = rank
        self._ask = ask
        self._cell = cell
        self._interrupts = interrupts
        #: Threads of a cell ask one after the other.
        self._turn = threading.Lock()
        self._came = threading.Event()
        self._number = 0
        self._typed: Typed | None = None

    def install(self, shell: InteractiveShell) -> None:
        """Has Python's own functions ask here, and an interrupt end a debugger that asks."""
        builtins.input = self.input
        getpass.getpass = self.getpass
        interrupts = self._interrupts

        class RankPdb(debugger.InterruptiblePdb):
            """A debugger that an interrupt leaves together with its cell; others go on."""

            def canonic(self, filename: str) -> str:
                # Not a file in a folder: with a path before it, its source would not be found.
                own = filename.startswith(CELL_FILE)
                return filename if own else str(super().canonic(filename))

            def interaction(self, *args: Any, **options: Any) -> None:
                before = interrupts()
                super().interaction(*args, **options)  # type: ignore[no-untyped-call]
                if interrupts() != before:
                    raise KeyboardInterrupt

        # As ipykernel does in a notebook.
        for module in (debugger, pdb):
            setattr(module, "Pdb", RankPdb)  # noqa: B010  a class, to mypy
        pdb.set_trace = debugger.set_trace
        shell.InteractiveTB.debugger_cls = RankPdb

    def input(self, prompt: object = "", /) -> str:
        """Returns a line that a person has typed.

        Raises:
            UsageError: nobody can type where the notebook is shown.
            EOFError: there is no more to read.
        """
        return self._line(str(prompt), hidden=False)

    def getpass(self, prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
        """Returns a line that nobody could read while it was typed."""
        return self._line(str(prompt), hidden=True)

    def take(self, typed: Typed) -> None:
        """Takes in what was typed, in another thread than the one that waits for it."""
        if typed.number == self._number:
            self._typed = typed
            self._came.set()

    def _line(self, prompt: str, *, hidden: bool) -> str:
        if not in_rank():
            raise UsageError(_FORKED)
        goes_on = _asked_by_a_debugger(sys._getframe(2))
        with self._turn:
            cell = self._cell()
            if not cell:
                raise UsageError(_NO_CELL)
            self._number += 1
            self._came.clear()
            presses = self._interrupts()
            with _told():
                self._ask(
                    Prompt(self._rank, cell, self._number, prompt, hidden, goes_on, presses > 0)
                )
                while not self._came.wait(_LOOK_SECONDS):
                    if self._interrupts() != presses:
                        raise KeyboardInterrupt
                    if self._cell() != cell:
                        raise UsageError(_NO_CELL)
            typed = self._typed
        assert typed is not None
        if typed.problem == EOFError.__name__:
            raise EOFError("end of input")
        if typed.problem:
            raise UsageError(f"input({prompt!r}) {typed.problem}")
        return typed.text


@contextmanager
def _told() -> Iterator[None]:
    """Within, ranks that wait for this one know that it waits for a person."""
    scope.asks(True)
    try:
        yield
    finally:
        scope.asks(False)


def _asked_by_a_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), bdb.Bdb):
            return True
        frame = frame.f_back
    return False
