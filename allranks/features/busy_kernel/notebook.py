"""Has the notebook's kernel answer its front end while a cell runs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from allranks.cluster.features import NotebookFeature


class BusyKernel(NotebookFeature):
    """Changes the kernel of a notebook, as long as the extension is loaded."""

    @classmethod
    def loaded(cls, shell: Any, undo: ExitStack) -> None:
        kernel = getattr(shell, "kernel", None)
        if kernel is None:
            return  # a terminal, or a shell within that of a kernel
        # Here: scripts need no shell.
        from allranks.features.busy_kernel.answers import (
            AnsweredWhileBusy,
            BusyStatus,
            CellReplies,
        )

        CellReplies(kernel, undo)
        AnsweredWhileBusy(kernel, undo, BusyStatus(kernel, undo))


FEATURE = BusyKernel
