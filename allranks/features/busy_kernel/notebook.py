"""Has the notebook's kernel answer its front end while a cell runs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from allranks.cluster.features import NotebookFeature


class BusyKernel(NotebookFeature):
    """Changes the kernel of a notebook, as long as the extension is loaded."""

    _undo: ClassVar = ExitStack()

    @classmethod
    def loaded(cls, shell: Any) -> None:
        kernel = getattr(shell, "kernel", None)
        if kernel is None:
            return  # a terminal
        # Here: scripts need no shell.
        from allranks.features.busy_kernel.answers import (
            AnsweredWhileBusy,
            BusyStatus,
            CellReplies,
        )

        CellReplies(kernel, cls._undo)
        AnsweredWhileBusy(kernel, cls._undo, BusyStatus(kernel, cls._undo))

    @classmethod
    def unloaded(cls) -> None:
        cls._undo.close()


FEATURE = BusyKernel
