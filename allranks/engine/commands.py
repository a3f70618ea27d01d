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
import psutil
from IPython.core.interactiveshell import InteractiveShell


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


def interrupt_children() -> None:
    """Sends SIGINT to the processes that this one started, as a terminal does.

    Those in a process group of their own have asked to be left alone.
    """
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(child.pid) == os.getpgrp():
                os.kill(child.pid, signal.SIGINT)
