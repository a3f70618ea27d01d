"""Has the notebook's kernel answer a cell that was interrupted just before or after its code ran.

ipykernel lets an interrupt raise KeyboardInterrupt from the moment at which it has taken a request
until the reply is sent. Where the cell's own code does not run, that ends the request without a
reply, and the notebook waits for ever. Source: ipykernel 7, `Kernel.dispatch_shell`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_REQUEST = "execute_request"


class Answering:
    """Answers every request to run a cell.

    Args:
        shell: the notebook's shell; a terminal's is left as it is.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        if self._kernel is None:
            return
        self._handle = self._kernel.shell_handlers[_REQUEST]
        self._execute = self._kernel.do_execute
        self._kernel.shell_handlers[_REQUEST] = self._answer
        self._kernel.do_execute = self._run

    def remove(self) -> None:
        """Leaves the kernel as it was."""
        if self._kernel is not None:
            self._kernel.shell_handlers[_REQUEST] = self._handle
            del self._kernel.do_execute

    async def _run(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As the kernel does it; from its end on an interrupt comes too late, until the next."""
        try:
            reply: dict[str, Any] = await self._execute(*arguments, **options)
            return reply
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, _too_late)

    async def _answer(self, stream: Any, ident: Any, request: dict[str, Any]) -> None:
        try:
            await self._handle(stream, ident, request)
        except KeyboardInterrupt:
            # No reply has been sent: after the cell's end no interrupt is raised.
            error = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}
            reply = {"status": "error", "execution_count": self._kernel.execution_count, **error}
            self._kernel.send_response(self._kernel.iopub_socket, "error", error)
            self._kernel.session.send(stream, "execute_reply", reply, request, ident=ident)
            if request["content"].get("stop_on_error", True):
                self._kernel._abort_queues(request["header"].get("subshell_id"))


def _too_late(_signal: int, _frame: FrameType | None) -> None:
    pass
