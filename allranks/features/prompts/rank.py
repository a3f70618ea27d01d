"""Sends a cell's prompts to the notebook, which has the field to type in.

``input()``, ``getpass()`` and every debugger ask here; the thread that asked waits for the answer.
"""

from __future__ import annotations

import bdb
import builtins
import getpass
import pdb
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from traceback import walk_stack
from typing import Any

from IPython.core import debugger
from IPython.core.interactiveshell import InteractiveShell

from allranks.collectives import scope
from allranks.collectives.calls.sites import CELLS, shown_name
from allranks.engine.cell import in_rank
from allranks.engine.features import RankContext, RankFeature
from allranks.errors import UsageError
from allranks.records.ranks import Activity, ActivityState
from allranks.records.wire import Prompt, Record, Typed

#: How often a waiting cell checks for an interrupt.
_POLL_SECONDS = 0.05
ASKS = Activity(
    ActivityState("waiting for input", "◷", is_busy=True, waits=True, asks=True, is_named=True)
)
_FORKED = "a forked process cannot ask for input: call input() in the rank, before the fork."
_NO_CELL = (
    "input() needs a running cell: found a thread that goes on after it. Call it in the cell."
)


class RankPrompts(RankFeature):
    """Asks for one line at a time."""

    records = (Typed,)

    def __init__(self) -> None:
        #: Threads of a cell ask one after the other.
        self._turn = threading.Lock()
        self._number = 0
        # Not an event, whose wait is Python: an interrupt in it would leave the event's lock held,
        # for which the thread that receives would wait.
        self._typed: SimpleQueue[Typed] = SimpleQueue()

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        builtins.input = self.input
        getpass.getpass = self.getpass
        self._replace_debuggers(rank.shell)

    def _replace_debuggers(self, shell: InteractiveShell) -> None:
        interrupts = self._rank.interrupts

        class RankPdb(debugger.InterruptiblePdb):
            """A debugger that an interrupt leaves together with its cell; others go on."""

            def canonic(self, filename: str) -> str:
                # Not a file in a folder: with a path before it, its source would not be found.
                shown = shown_name(filename)
                own = shown != filename or shown in CELLS.values()
                return shown if own else str(super().canonic(filename))

            def interaction(self, *args: Any, **options: Any) -> None:
                before = interrupts.count
                super().interaction(*args, **options)  # type: ignore[no-untyped-call]
                if interrupts.count != before:
                    raise KeyboardInterrupt

        # As ipykernel does in a notebook.
        for module in (debugger, pdb):
            setattr(module, "Pdb", RankPdb)  # noqa: B010  a class, to mypy
        pdb.set_trace = debugger.set_trace
        shell.InteractiveTB.debugger_cls = RankPdb

    def input(self, prompt: object = "", /) -> str:
        """Returns a line that was typed in the notebook.

        Raises:
            UsageError: the notebook is shown where nothing can be typed.
            EOFError: there is no more to read.
        """
        return self._line(str(prompt), hidden=False)

    def getpass(self, prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
        """Returns a line whose characters were hidden while it was typed."""
        return self._line(str(prompt), hidden=True)

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Typed) and record.number == self._number:
            self._typed.put(record)

    def _line(self, prompt: str, *, hidden: bool) -> str:
        if not in_rank():
            raise UsageError(_FORKED)
        # Frame 2 has called `input` or `getpass`.
        callers = (frame for frame, _ in walk_stack(sys._getframe(2)))
        goes_on = any(isinstance(frame.f_locals.get("self"), bdb.Bdb) for frame in callers)
        with self._turn:
            rank = self._rank
            cell = rank.cell()
            if not cell:
                raise UsageError(_NO_CELL)
            self._number += 1
            typed: Typed | None = None
            presses = rank.interrupts.count
            with _shown_as_asking():
                rank.wire.send_output()
                rank.wire.send(
                    Prompt(rank.rank, cell, self._number, prompt, hidden, goes_on, presses > 0)
                )
                while typed is None or typed.number != self._number:
                    # Not `suppress`: an interrupt in its steps would have `Empty` as its context.
                    try:
                        typed = self._typed.get(timeout=_POLL_SECONDS)
                        continue
                    except Empty:
                        typed = None
                    if rank.interrupts.count != presses:
                        raise KeyboardInterrupt
                    if rank.cell() != cell:
                        raise UsageError(_NO_CELL)
        if typed.problem == EOFError.__name__:
            raise EOFError("end of input")
        if typed.problem:
            raise UsageError(f"input({prompt!r}) {typed.problem}")
        return typed.text


@contextmanager
def _shown_as_asking() -> Iterator[None]:
    # Ranks that wait for this one report that it waits for input.
    scope.asks(ASKS)
    try:
        yield
    finally:
        scope.asks()


FEATURE = RankPrompts
