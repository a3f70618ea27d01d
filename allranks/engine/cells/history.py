"""What IPython keeps of cells, and a rank forgets: it would fill the memory, and nobody reads it.

What was printed is in the log. Of values the last three stay, as ``_``, ``__``, ``___`` and in
``Out``; of exceptions the last one stays, for ``%debug`` and ``%tb``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.report import traceback_of

_VALUES = 3


class History:
    """Bounds what a shell keeps.

    Args:
        shell: the engine's IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._failed = False
        setattr(shell, "_tee", _not_kept)  # noqa: B010  a method, to mypy

    def keep(self, error: BaseException | None) -> None:
        """Takes in how a cell has ended."""
        self._failed = error is not None
        if error is not None:
            self._remember(error)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, the last failure is looked at, and no other one takes its place."""
        last = getattr(sys, "last_value", None)
        try:
            yield
        finally:
            if last is not None:
                self._remember(last)

    def _remember(self, error: BaseException) -> None:
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = traceback_of(error)
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        self._shell.InteractiveTB.tb = traceback_of(error)

    def begin(self) -> None:
        """A cell starts: forgets the values and the failures before the last ones."""
        shell = self._shell
        kept: Any = shell.history_manager
        kept.outputs.clear()
        kept.exceptions.clear()
        kept.output_hist_reprs.clear()
        self._forget_values(kept.output_hist)
        if self._failed:
            self._failed = False
            shell.last_execution_result = None
            shell.displayhook.exec_result = None
            # An exception's frames hold the exception: they are only found together.
            gc.collect()

    def _forget_values(self, values: dict[int, Any]) -> None:
        shell = self._shell
        for number in list(values)[:-_VALUES]:
            value, name = values.pop(number), f"_{number}"
            for names in (shell.user_ns, shell.user_ns_hidden):
                if names.get(name) is value:
                    del names[name]


def _not_kept(channel: str) -> AbstractContextManager[None]:
    """Stands for what copies all that a cell prints into IPython's history."""
    return nullcontext()
