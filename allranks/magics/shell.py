"""What the extension changes in IPython's shell and in ipykernel, until it is unloaded.

- `EveryCell`: ``%distributed on`` sends every following cell to the ranks, until ``off``.
- `AwaitedMagics`: widgets react while a cell runs, because IPython awaits our cell magics.
- `CellReplies`: the kernel replies to a cell that was interrupted just before or after its code.
- `BusyStatus`: the kernel stays busy while a cell runs.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

_CELL_MAGIC = "%%distributed\n"
_COMMAND = "%distributed"
_LOCAL = "%%local"
_EVERY_CELL = [
    *(_COMMAND, f"%{_COMMAND}", "%%ensemble", "%%px", "%%rank"),
    *("%load_ext allranks", "%reload_ext allranks", "%unload_ext allranks"),
    # Once for all ranks of this machine.
    *("%pip", "%conda", "%mamba", "%uv"),
]
"""What stays in the notebook where every other cell is for the ranks."""


class EveryCell:
    """Prefixes the cells of a shell with ``%%distributed`` while it is on."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.is_on = False
        # Patched on the instance, in `vars`: other shells of this process keep the class's method.
        self._manager = shell.input_transformer_manager
        self._checks = False
        self._prefixed = False
        self._kept_here: str | None = None
        #: Beginnings of lines that run in the notebook.
        self.commands = [_COMMAND, "%%", "%load_ext", "%reload_ext"]

    def on(self) -> None:
        if not self.is_on:
            self._shell.input_transformers_cleanup.append(self._send)
            vars(self._manager)["check_complete"] = self._check_complete
            self.is_on = True

    def every_cell(self) -> None:
        # Also those that begin with IPython's own magics.
        self.commands[:] = _EVERY_CELL
        self.on()

    def off(self) -> None:
        if self.is_on:
            self._shell.input_transformers_cleanup.remove(self._send)
            del vars(self._manager)["check_complete"]
            self.is_on = False

    def _check_complete(self, cell: str) -> tuple[str, int | None]:
        # For consoles: below a cell magic, IPython takes no cell for complete.
        self._checks = True
        try:
            found: tuple[str, int | None] = TransformerManager.check_complete(self._manager, cell)
            return found
        finally:
            self._checks = False

    def _send(self, lines: list[str]) -> list[str]:
        """Prefixes a cell, except with our own commands or a magic that chooses where it runs."""
        first = next((line.strip() for line in lines if line.strip()), "")
        request = self._request()
        if first.split()[:1] == [_LOCAL]:
            self._kept_here = request.get("msg_id")
            return _without_first(lines)
        if (
            self._checks
            or not first
            or first.startswith(tuple(self.commands))
            or not request.get("seen", True)
        ):
            return lines
        # A cell that a magic of a local cell runs, as %%capture does, is local too.
        if request and request["msg_id"] == self._kept_here:
            return lines
        self._prefixed = True
        return [_CELL_MAGIC, *lines]

    def _request(self) -> dict[str, Any]:
        """Returns the id of the front end's request, and whether a person sent it.

        A front end also runs code of its own, unseen, as for a list of variables.
        """
        kernel = getattr(self._shell, "kernel", None)
        parent = kernel.get_parent("shell") if kernel is not None else None
        if not parent:
            return {}
        content = parent.get("content", {})
        seen = not content.get("silent") and content.get("store_history", True)
        return {"msg_id": parent["header"]["msg_id"], "seen": seen}

    def took_cell(self) -> bool:
        # Whether the running cell was prefixed here; true once.
        prefixed, self._prefixed = self._prefixed, False
        return prefixed


def _without_first(lines: list[str]) -> list[str]:
    # The other lines keep their numbers.
    at = next(number for number, line in enumerate(lines) if line.strip())
    rest = lines[at + 1 :]
    # A magic must be the first line of its cell.
    return rest if rest and rest[0].lstrip().startswith("%%") else ["\n"] * (at + 1) + rest


_CALL = "get_ipython().run_cell_magic('{}'"
#: Below one of these a cell is run by another magic, as ``%%time``, which awaits nothing.
_MAGICS = (InteractiveShell.run_cell_magic.__code__, InteractiveShell.run_line_magic.__code__)


class AwaitedMagics:
    """Puts an ``await`` before our cell magics in the cells of a notebook, not of a terminal."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._calls = [_CALL.format(name) for name in ("distributed", "ensemble")]
        self._added = getattr(shell, "kernel", None) is not None
        if self._added:
            shell.input_transformers_post.append(self._transform)
            shell.events.register("pre_run_cell", self._begin)

    def add(self, name: str) -> None:
        self._calls.append(_CALL.format(name))

    def drop(self, name: str) -> None:
        self._calls.remove(_CALL.format(name))

    def remove(self) -> None:
        if self._added:
            self._shell.input_transformers_post.remove(self._transform)
            self._shell.events.unregister("pre_run_cell", self._begin)

    def _begin(self, _: object) -> None:
        # A value that could not be shown fails its cell. Where the next one is awaited, ipykernel
        # would report that as failed as well.
        vars(self._shell)["_last_traceback_during_displayhook"] = False

    def _transform(self, lines: list[str]) -> list[str]:
        if not lines or not lines[0].startswith(tuple(self._calls)) or not self._shell.autoawait:
            return lines
        # Another package may have replaced the magic, as view.activate() does with %%px.
        magic = self._shell.find_cell_magic(lines[0].split("'", 2)[1])
        ours = getattr(magic, "__module__", "").startswith("allranks.")
        if not ours or _called_by_a_magic(sys._getframe()):
            return lines
        return ["await " + lines[0], *lines[1:]]


def is_awaited() -> bool:
    """Whether the calling cell magic stands behind an ``await`` in the notebook's cell."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MAGICS[0]:
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code.co_name != "<module>":
        return False
    return bool(caller.f_code.co_flags & inspect.CO_COROUTINE)


def nothing_to_run() -> Coroutine[Any, Any, None] | None:
    """Returns the result of the calling cell magic if it has nothing to run."""

    async def nothing() -> None:
        pass

    return nothing() if is_awaited() else None


def _called_by_a_magic(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _MAGICS:
            return True
        frame = frame.f_back
    return False


_REQUEST = "execute_request"


class CellReplies:
    """Answers every request to run a cell, in a notebook but not in a terminal."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        if self._kernel is None:
            return
        self._handle = self._kernel.shell_handlers[_REQUEST]
        self._execute = self._kernel.do_execute
        self._kernel.shell_handlers[_REQUEST] = self._answer
        self._kernel.do_execute = self._run

    def remove(self) -> None:
        if self._kernel is not None:
            self._kernel.shell_handlers[_REQUEST] = self._handle
            del self._kernel.do_execute

    async def _run(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        # From its end on an interrupt comes too late, until the next cell.
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


class BusyStatus:
    """Publishes the status of the running cell after the status of other messages, not in a
    terminal.
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
