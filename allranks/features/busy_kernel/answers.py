"""What a notebook's kernel answers while a cell waits for its ranks: changes of ipykernel.

- `CellReplies`: the kernel replies to a cell that was interrupted just before or after its code.
- `BusyStatus`: the kernel stays busy while a cell runs.
- `AnsweredWhileBusy`: Tab and Shift-Tab also while a cell runs, and messages of widgets.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

from allranks.magics.shell import replace

_REQUEST = "execute_request"


class CellReplies:
    """Answers every request to run a cell, in a notebook but not in a terminal."""

    def __init__(self, kernel: Any, undo: ExitStack) -> None:
        self._kernel, self._execute = kernel, kernel.do_execute
        self._handle = kernel.shell_handlers[_REQUEST]
        kernel.shell_handlers[_REQUEST] = self._answer
        undo.callback(kernel.shell_handlers.update, {_REQUEST: self._handle})
        replace(undo, kernel, "do_execute", self._run)

    async def _run(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        # From its end on an interrupt comes too late, until the next cell.
        try:
            reply: dict[str, Any] = await self._execute(*arguments, **options)
            return reply
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, lambda *_: None)

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


class BusyStatus:
    """Publishes the status of the running cell after the status of other messages, not in a
    terminal.
    """

    def __init__(self, kernel: Any, undo: ExitStack) -> None:
        self._kernel, self._publish = kernel, kernel._publish_status
        #: The requests of the cells that run, by their subshell; the main shell's is None.
        self._running: dict[str | None, dict[str, Any]] = {}
        #: Without it, a subshell's busy could follow the idle of a cell that ends meanwhile.
        self._lock = threading.Lock()
        self._note(kernel.get_parent("shell"), "busy")
        replace(undo, kernel, "_publish_status", self._published)

    def request(self) -> dict[str, Any]:
        """Returns the request of the cell that runs in the main shell."""
        return self._running.get(None, {})

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


_COMMS = frozenset({"comm_open", "comm_msg", "comm_close"})


class AnsweredWhileBusy:
    """Answers Tab, Shift-Tab and a page that is opened while a cell waits for its ranks, not in a
    terminal.

    ipykernel answers them after the cell. A page of JupyterLab asks about the kernel first, and
    holds all other messages until it has the answer, or for three seconds. It asks for all widgets
    at once, and after four seconds for the list of comms instead.

    ipykernel handles messages of widgets during the cell, but version 7.4 then restores the parent
    of output that it found before: if the next cell has begun meanwhile, the end of that one is
    reported as the end of another, and JupyterLab shows that it still runs.
    """

    def __init__(self, kernel: Any, undo: ExitStack, busy: BusyStatus) -> None:
        channel = getattr(kernel, "shell_channel_thread", None)
        if channel is None:
            return  # this ipykernel has no subshells, and receives messages in another way
        self._kernel = kernel
        self._manager = channel.manager
        self._receive_later = kernel.shell_main
        self._busy = busy
        self._answers = {
            "complete_request": kernel.complete_request,
            "inspect_request": kernel.inspect_request,
            "kernel_info_request": kernel.kernel_info_request,
            "comm_info_request": kernel.comm_info_request,
        }
        # Older versions handle these messages after the cell.
        handles_comms = "concurrent" in inspect.signature(kernel.dispatch_shell).parameters
        self._comms = _COMMS if handles_comms else frozenset()
        self._manager.set_on_recv_callback(self._receive)
        undo.callback(self._manager.set_on_recv_callback, self._receive_later)

    async def _receive(self, subshell: str | None, frames: Any) -> None:
        kernel, session = self._kernel, self._kernel.session
        if subshell is None and session is not None and kernel._main_asyncio_lock.locked():
            ident, message = session.feed_identities(frames, copy=False)
            # A request with content is noted as read, and refused the second time.
            request = session.deserialize(message, content=False, copy=False)
            kind = request["header"]["msg_type"]
            if kind in self._comms:
                await self._handle_comm(frames)
                return
            answer = self._answers.get(kind)
            if answer is not None:
                request = session.deserialize(message, copy=False)
                # Not by ipykernel's dispatch, which sets the parent of the running cell's output.
                kernel._publish_status("busy", "shell", request)
                await answer(
                    self._manager.get_subshell_to_shell_channel_socket(None), ident, request
                )
                kernel._publish_status("idle", "shell", request)
                return
        await self._receive_later(subshell, frames)

    async def _handle_comm(self, frames: Any) -> None:
        kernel = self._kernel
        handled = kernel.dispatch_shell(frames, subshell_id=None, concurrent=True)
        try:
            await asyncio.create_task(handled, context=copy_context())
        finally:
            ident = kernel._get_shell_context_var(kernel._shell_parent_ident)
            kernel.set_parent(ident, self._busy.request() or kernel.get_parent("shell"))
