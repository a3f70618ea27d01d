"""An interrupt reaches what a cell has started, and where that was a ``!command``, the cell too.

IPython ends the command and goes on with the cell's next line. A cell of several commands would
then have to be interrupted several times, and the second time ends the ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import ipykernel.zmqshell
import IPython.core.interactiveshell
import IPython.core.magics.execution  # once, before the ranks are made
import psutil
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from allranks.engine.ipengine import CELL_FILE
from allranks.engine.report import from_cell


def end_cells_too(shell: InteractiveShell, interrupts: Callable[[], int]) -> None:
    """Has ``!command``, ``x = !command`` and ``%%bash`` raise the KeyboardInterrupt they caught.

    Args:
        shell: the engine's IPython shell.
        interrupts: returns how many interrupts this cell has been sent so far.
    """

    def loud(quiet: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(quiet)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = interrupts()
            try:
                return quiet(*args, **kwargs)
            finally:
                if interrupts() > before:
                    raise KeyboardInterrupt from None

        return run

    # The shell's own methods look at their caller's frame, so that what they call is wrapped.
    for module, name in (
        (ipykernel.zmqshell, "system"),
        (IPython.core.interactiveshell, "getoutput"),
    ):
        setattr(module, name, loud(getattr(module, name)))
    # Asked for by its key, because the registry may load what it holds when that is asked for.
    scripts = shell.magics_manager.registry["ScriptMagics"]
    scripts.shebang = loud(scripts.shebang)


def fail_captured(shell: InteractiveShell) -> None:
    """Has ``%%capture`` raise what its cell raised, which IPython only shows."""
    manager = shell.magics_manager
    magics = manager.magics["cell"]
    # Loaded now, which would take the place of this one later.
    quiet = manager.registry["ExecutionMagics"].capture

    @wraps(quiet)
    def capture(line: str, cell: str) -> None:
        run_cell: Callable[..., ExecutionResult] = shell.run_cell
        results: list[ExecutionResult] = []

        def remembering(*args: Any, **options: Any) -> ExecutionResult:
            results.append(run_cell(*args, **options))
            return results[-1]

        setattr(shell, "run_cell", remembering)  # noqa: B010  a method, to mypy
        try:
            quiet(line, cell)
        finally:
            setattr(shell, "run_cell", run_cell)  # noqa: B010
        error = results[0].error_before_exec or results[0].error_in_exec
        if error is not None:
            tb = from_cell(error, lambda file: file.startswith(CELL_FILE))
            raise BaseException.with_traceback(error, tb)

    magics["capture"] = capture


def interrupt_children() -> None:
    """Sends SIGINT to the processes that this one started, as a terminal does.

    Those in a process group of their own have asked to be left alone.
    """
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(child.pid) == os.getpgrp():
                os.kill(child.pid, signal.SIGINT)
