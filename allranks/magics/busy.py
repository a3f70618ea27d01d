"""Keeps the kernel's status busy while a cell runs.

JupyterLab sends the messages of widgets over a subshell. ipykernel 7 publishes busy and then idle
for each, also while the main shell runs a cell, and Jupyter's server keeps the last status that it
saw: it would end the kernel of a running cell as idle. So busy is published again after each idle
that is not the cell's own. Source: ipykernel 7, `Kernel.dispatch_shell`.
"""

from __future__ import annotations

import threading
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_REQUEST = "execute_request"


class Busy:
    """Publishes the status of the running cell after the status of other messages.

    Args:
        shell: the notebook's shell; a terminal's is left as it is.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        #: The requests of the cells that run, by their subshell; the main shell's is None.
        self._running: dict[str | None, dict[str, Any]] = {}
        #: Without it, a subshell's busy could follow the idle of a cell that ends meanwhile.
        self._lock = threading.Lock()
        if self._kernel is None:
            return
        self._note(self._kernel.get_parent("shell"), "busy")
        self._publish = self._kernel._publish_status
        self._kernel._publish_status = self._published

    def remove(self) -> None:
        """Leaves the kernel as it was."""
        if self._kernel is not None:
            del self._kernel._publish_status

    def _published(self, status: str, channel: str, parent: dict[str, Any] | None = None) -> None:
        parent = parent or self._kernel.get_parent(channel)
        with self._lock:
            self._note(parent, status)
            self._publish(status, channel, parent)
            if status == "idle" and self._running:
                self._publish("busy", "shell", next(iter(self._running.values())))

    def _note(self, parent: dict[str, Any] | None, status: str) -> None:
        header = (parent or {}).get("header", {})
        if header.get("msg_type") != _REQUEST:
            return
        subshell = header.get("subshell_id")
        if status == "busy":
            self._running[subshell] = parent or {}
        else:
            self._running.pop(subshell, None)
