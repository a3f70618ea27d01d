"""A real ipykernel to drive as a notebook front end would: run cells, interrupt, restart, kill.

What a cell left behind is kept as a front end keeps it: a later ``update_display`` changes the
display that it names, ``clear_output`` empties the cell, and streams of one kind are joined.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import zmq
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec

from tests.ports import free_port

MARK = "ALLRANKS_TEST_KERNEL"
"""The environment variable by which the processes of a kernel, a server or a command are known."""

WARNINGS_AS_ERRORS = "error" + (
    ",ignore:There is no current event loop:DeprecationWarning" * (sys.version_info >= (3, 12))
)
"""PYTHONWARNINGS that makes every warning an error, but tornado's own, which ends ipykernel."""


ANSI = re.compile(r"\x1b\[[0-9;]*m")


class KernelDied(Exception):
    """The kernel was gone before the cell's reply came."""


@dataclass(eq=False)
class Cell:
    """One executed cell: what a reader sees under it, and how it ended.

    ``status`` is ``"running"`` until the reply is in, then ``"ok"``, ``"error"`` or ``"aborted"``;
    ``begun`` says whether the kernel has begun to run it.
    """

    source: str
    msg_id: str
    _kernel: Kernel = field(repr=False)
    status: str = "running"
    execution_count: int | None = None
    error_name: str = ""
    error_value: str = ""
    traceback: list[str] = field(default_factory=list)
    payload: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    comms: list[dict[str, Any]] = field(default_factory=list, repr=False)
    iopub_nbytes: int = 0
    seconds: float = 0.0
    begun: bool = False
    prompts: list[dict[str, Any]] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic, repr=False)
    _idle: bool = False
    _clear_next: bool = False

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The mime bundles of ``display()`` and of the cell's value, updates applied, in order."""
        return [output["data"] for output in self.outputs if any(output.get("data", {}).values())]

    @property
    def text(self) -> str:
        """What a reader without HTML or colours sees: streams, text/plain and the traceback."""
        parts = []
        for output in self.outputs:
            if output["output_type"] == "stream":
                parts.append(output["text"])
            elif output["output_type"] == "error":
                parts.append("\n".join(output["traceback"]) + "\n")
            elif text := output["data"].get("text/plain"):  # others show nothing, or no text
                parts.append(text + "\n")
        return ANSI.sub("", "".join(parts))

    @property
    def done(self) -> bool:
        return self._idle and self.status != "running"

    def wait(self, timeout: float = 60) -> Self:
        """Returns this cell once it has ended; see `Kernel.pump`."""
        self._kernel.pump(lambda: self.done, timeout, f"the end of {self.source!r}", self)
        return self

    def wait_for_begin(self, timeout: float = 60) -> Self:
        """Returns this cell once the kernel runs it: an interrupt before that does nothing."""
        what = f"the begin of {self.source!r}"
        self._kernel.pump(lambda: self.begun or self.done, timeout, what, self)
        return self

    def wait_for(self, text: str, timeout: float = 60) -> Self:
        """Returns this cell once ``text`` stands in its output, whether or not it has ended."""
        self._kernel.pump(lambda: text in self.text, timeout, f"{text!r}", self)
        return self

    def ok(self) -> Self:
        assert self.status == "ok", self.text
        return self

    def fails(self, name: str, *parts: str) -> Self:
        """Raises unless an error of this name has ended the cell, with these parts in its value."""
        assert self.error_name == name, self.text
        for part in parts:
            assert part in self.error_value, f"{part!r} is not in {self.error_value}"
        return self

    def says(self, *parts: str) -> Self:
        for part in parts:
            assert part in self.text, f"{part!r} is not in {self.text}"
        return self

    def lacks(self, *parts: str) -> Self:
        for part in parts:
            assert part not in self.text, f"{part!r} is in {self.text}"
        return self

    def prompt(self, count: int = 1, timeout: float = 60) -> str:
        """Returns the prompt behind which the cell waits for input, its ``count``-th."""
        self._kernel.pump(lambda: len(self.prompts) >= count, timeout, f"prompt {count}", self)
        return str(self.prompts[-1]["content"]["prompt"])

    def answer(self, text: str) -> None:
        self._kernel.type(text, self.prompts[-1])

    def _stream(self, name: str) -> str:
        return "".join(out["text"] for out in self.outputs if out.get("name") == name)


def lines_of_two(text: str) -> dict[int, list[str]]:
    """What each of two ranks wrote; a label counts until the next one."""
    found: dict[int, list[str]] = {0: [], 1: []}
    ranks: tuple[int, ...] = ()
    for name, line in re.findall(r"(?m)^(ranks 0–1|rank \d|) *[│!→·] ?(.*)$", text):
        ranks = {"": ranks, "ranks 0–1": (0, 1)}.get(name) or (int(name[-1]),)
        for rank in ranks:
            found[rank].append(line)
    return found


def spec_of(python: str) -> KernelSpec:
    command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return KernelSpec(argv=command, display_name="tests", language="python")


class Kernel:
    """A kernel in a directory of its own, as a context manager.

    Args:
        cwd: where the kernel runs; its IPython and Jupyter directories are made there too.
        env: additions to the environment; a value of None removes the name.
        python: the interpreter whose kernel it is.
        spec: another kernel than IPython's.

    Attributes:
        pid: the process id of the kernel itself; another one after a restart.
    """

    pid: int

    def __init__(
        self,
        cwd: Path,
        env: dict[str, str | None] | None = None,
        python: str = sys.executable,
        spec: KernelSpec | None = None,
    ) -> None:
        self.cwd, self.python = cwd, python
        self._spec = spec or spec_of(python)
        self.mark = uuid.uuid4().hex
        self._env = _private_env(cwd) | {MARK: self.mark} | (env or {})
        self._cells: dict[str, Cell] = {}
        self._shown: dict[str, list[dict[str, Any]]] = {}
        #: What widgets have said, in cells and between them.
        self.comms: list[dict[str, Any]] = []
        #: Events of the front end's debugger.
        self.debug_events: list[dict[str, Any]] = []
        self._debug_requests = 0

    def __enter__(self) -> Self:
        self._manager = KernelManager(kernel_name="python3")
        # The spec that is found by name may belong to another environment.
        self._manager._kernel_spec = self._spec
        self._manager.connection_file = str(self.cwd / f"kernel-{self.mark}.json")
        self._manager.cache_ports = False
        for channel in ("shell", "iopub", "stdin", "hb", "control"):
            setattr(self._manager, f"{channel}_port", free_port())
        self._start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        return bool(self._manager.is_alive())

    def run(self, source: str, timeout: float = 60) -> Cell:
        """Runs ``source`` as a cell and returns it once it has ended, well or badly."""
        return self.start(source).wait(timeout)

    def value(self, expression: str) -> str:
        return str(self.run(expression).ok().displays[0]["text/plain"])

    def start(
        self,
        source: str,
        *,
        typing: bool = False,
        metadata: dict[str, Any] | None = None,
        history: bool = True,
    ) -> Cell:
        """Sends ``source`` as a cell and returns it while it runs.

        Args:
            source: the cell's text.
            typing: whether its front end has somebody who can answer a prompt.
            metadata: what its front end says of the cell, as JupyterLab ``{"cellId": …}``.
            history: False for what a front end asks for itself.
        """
        content = {"code": source, "silent": False, "store_history": history}
        content |= {"user_expressions": {}, "allow_stdin": typing, "stop_on_error": True}
        message = self._client.session.msg("execute_request", content, metadata=metadata)
        self._client.shell_channel.send(message)
        cell = Cell(source, message["header"]["msg_id"], self)
        self._cells[cell.msg_id] = cell
        return cell

    def type(self, text: str, prompt: dict[str, Any]) -> None:
        reply = self._client.session.msg("input_reply", {"value": text}, parent=prompt)
        self._client.stdin_channel.send(reply)

    def complete(self, source: str, timeout: float = 60) -> list[str]:
        """Returns the completions at the end of ``source``."""
        reply = self._client.complete(source, reply=True, timeout=timeout)
        return list(reply["content"]["matches"])

    def inspect(self, source: str, timeout: float = 60) -> str:
        """Returns what ``?`` shows for the name at the end of ``source``, or ''."""
        reply = self._client.inspect(source, reply=True, timeout=timeout)
        return str(reply["content"].get("data", {}).get("text/plain", ""))

    def open_page(self, timeout: float = 60) -> set[str]:
        """Asks what a page asks when it is opened; returns the ids of the comms."""
        self._client.kernel_info(reply=True, timeout=timeout)
        reply = self._client.comm_info(reply=True, timeout=timeout)
        return set(reply["content"]["comms"])

    def is_complete(self, source: str, timeout: float = 60) -> str:
        """Returns what a console asks before it runs a cell: complete, incomplete or invalid."""
        self._client.is_complete(source)
        while True:
            reply = self._client.get_shell_msg(timeout=timeout)
            if reply["msg_type"] == "is_complete_reply":
                return str(reply["content"]["status"])

    def debug(self, command: str, arguments: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Returns the response to a request of the front end's debugger."""
        self._debug_requests += 1
        content = {"type": "request", "seq": self._debug_requests, "command": command}
        message = self._client.session.msg("debug_request", {**content, "arguments": arguments})
        channel = self._client.control_channel
        channel.send(message)
        replies: list[dict[str, Any]] = []

        def answered() -> bool:
            while channel.msg_ready():
                reply = channel.get_msg(timeout=1)
                if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                    replies.append(reply["content"])
            return bool(replies)

        self.pump(answered, timeout, f"the response to {command}")
        return replies[0]

    def say(
        self, comm: str, data: dict[str, Any], *buffers: bytes, kind: str = "comm_msg", **more: str
    ) -> None:
        content = {"comm_id": comm, "data": data, **more}
        metadata = {"version": "1.0.0"}  # of what asks for all widgets
        message = self._client.session.msg(kind, content, metadata=metadata)
        channel = self._client.shell_channel
        self._client.session.send(channel.socket, message, buffers=list(buffers))

    def interrupt(self) -> None:
        """Interrupts as the front end's button does: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def restart(self, timeout: float = 60) -> None:
        """Restarts as the front end's button does: a shutdown request, then force."""
        self._manager.restart_kernel()
        self._client.wait_for_ready(timeout=timeout)
        self.pid = self._manager.provisioner.pid
        self._forget()

    def shutdown(self) -> None:
        """Shuts down as the front end does: a shutdown request, then force."""
        self._manager.shutdown_kernel()

    def kill9(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.is_alive, lambda: "the kernel's end")

    def children(self) -> list[psutil.Process]:
        """Returns every live process that came from this kernel, orphans included, oldest first."""
        return [process for process in marked(self.mark) if process.pid != self.pid]

    def wait_for_no_children(self, timeout: float = 60) -> None:
        def left() -> list[psutil.Process]:
            time.sleep(0.05)
            return self.children()

        # Twice where there are none: one that just begins has no environment yet.
        wait_until(
            lambda: not left() and not left(),
            lambda: "\n".join(["the end of", *map(_describe, self.children())]),
            timeout,
        )

    def drain(self, seconds: float = 0.5) -> None:
        """Takes in what arrives after cells have ended, for ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._take(left)

    def stop(self) -> None:
        """Ends the kernel and everything that came from it; says nothing of what it finds."""
        if hasattr(self, "_client"):
            self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        # What cleans up after itself is given the time to; the suite of faults says if it does.
        with suppress(TimeoutError):
            wait_until(lambda: not marked(self.mark), seconds=5)
        for process in marked(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._manager.cleanup_resources()

    def pump(
        self, until: Callable[[], bool], timeout: float, what: str, cell: Cell | None = None
    ) -> None:
        """Takes in messages until ``until()`` is true.

        Raises:
            TimeoutError: after ``timeout`` seconds, naming ``what`` was waited for.
            KernelDied: the kernel ended and no message is left.
        """
        deadline = time.monotonic() + timeout
        while not until():
            if time.monotonic() > deadline:
                seen = f"; its output so far:\n{cell.text}" if cell else ""
                raise TimeoutError(f"waited {timeout:g} s for {what}{seen}")
            if not self._take(0.1) and not self.is_alive and not self._take(0.5):
                raise KernelDied(f"the kernel died while waiting for {what}")

    def _start(self) -> None:
        env = {name: value for name, value in (os.environ | self._env).items() if value is not None}
        self._manager.start_kernel(cwd=str(self.cwd), env=env)
        self.pid = self._manager.provisioner.pid
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def _forget(self) -> None:
        # A restarted kernel answers nothing that was asked of the one before.
        for cell in self._cells.values():
            if not cell.done:
                cell.status, cell._idle = "aborted", True
        self._cells.clear()
        self._shown.clear()

    def _take(self, seconds: float) -> bool:
        """Takes in what is there, or comes within ``seconds``; tells whether anything did."""
        iopub, shell = self._client.iopub_channel, self._client.shell_channel
        poller = zmq.Poller()
        poller.register(iopub.socket, zmq.POLLIN)
        poller.register(shell.socket, zmq.POLLIN)
        stdin = self._client.stdin_channel
        poller.register(stdin.socket, zmq.POLLIN)
        ready = dict(poller.poll(1000 * seconds))
        if shell.socket in ready:
            self._take_reply(shell.get_msg(timeout=1))
        if iopub.socket in ready:
            self._take_output(iopub.get_msg(timeout=1))
        if stdin.socket in ready:
            message = stdin.get_msg(timeout=1)
            cell = self._cells.get(message["parent_header"].get("msg_id"))
            if cell is not None:
                cell.prompts.append(message)
        return bool(ready)

    def _take_reply(self, message: dict[str, Any]) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id"))
        content = message["content"]
        if cell is None or message["msg_type"] != "execute_reply":
            return
        cell.status = content["status"]
        cell.execution_count = content.get("execution_count")
        cell.error_name = content.get("ename", "")
        cell.payload = content.get("payload", [])
        cell.error_value = content.get("evalue", "")
        cell.traceback = content.get("traceback", [])
        cell.seconds = time.monotonic() - cell._started

    def _take_output(self, message: dict[str, Any]) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id"))
        kind, content = message["msg_type"], message["content"]
        if kind == "update_display_data":
            self._update(content)
        if kind == "debug_event":
            self.debug_events.append(content)
        if kind.startswith("comm_"):
            buffers = [bytes(buffer) for buffer in message["buffers"]]
            self.comms.append({"msg_type": kind, **content, "buffers": buffers})
        if cell is None:
            return
        cell.iopub_nbytes += len(repr(content)) + sum(map(len, message.get("buffers", [])))
        if kind == "status":
            cell._idle = cell._idle or content["execution_state"] == "idle"
        elif kind == "execute_input":
            cell.begun = True
        elif kind.startswith("comm_"):
            cell.comms.append(self.comms[-1])
        elif kind == "clear_output":
            cell._clear_next = content.get("wait", False)
            if not cell._clear_next:
                cell.outputs.clear()
        elif kind in ("stream", "display_data", "execute_result", "error"):
            self._append(cell, kind, content)

    def _append(self, cell: Cell, kind: str, content: dict[str, Any]) -> None:
        if cell._clear_next:
            cell.outputs.clear()
            cell._clear_next = False
        last = cell.outputs[-1] if cell.outputs else {}
        if kind == "stream" and last.get("name") == content["name"]:
            last["text"] += content["text"]
            return
        output = {"output_type": kind, **content}
        cell.outputs.append(output)
        display_id = content.get("transient", {}).get("display_id")
        if display_id:
            self._shown.setdefault(display_id, []).append(output)
            self._update(content)

    def _update(self, content: dict[str, Any]) -> None:
        for output in self._shown.get(content.get("transient", {}).get("display_id"), []):
            output["data"], output["metadata"] = content["data"], content["metadata"]


def _private_env(cwd: Path) -> dict[str, str | None]:
    places = {
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "jupyter-config",
        "JUPYTER_DATA_DIR": "jupyter-data",
        "JUPYTER_RUNTIME_DIR": "jupyter-runtime",
        "XDG_STATE_HOME": "state",
    }
    for place in places.values():
        (cwd / f".{place}").mkdir(exist_ok=True)
    return {name: str(cwd / f".{place}") for name, place in places.items()} | {
        "PYDEVD_DISABLE_FILE_VALIDATION": "1"
    }


def marked(mark: str) -> list[psutil.Process]:
    """Returns every live process with a mark, orphans included, oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.create_time())


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


#: So long a console waits for ranks that write the same line.
LINE_HOLD = "allranks.widgets.text._LINE_HOLD_SECONDS"


@contextmanager
def patched(run: Callable[[str], Cell], name: str, value: float | str) -> Iterator[None]:
    """Within, ``name``, an attribute of a module, has another value where ``run`` runs its cells:
    in a notebook, or on its ranks. A text is an expression there.
    """
    module, _, attribute = name.rpartition(".")
    load = f"import {module} as _module\n"
    run(
        f"{load}_module.before_{attribute} = _module.{attribute}\n_module.{attribute} = {value}"
    ).ok()
    try:
        yield
    finally:
        run(f"{load}_module.{attribute} = _module.before_{attribute}").ok()


#: For a notebook: when one file is there, its cell's clock is 1000 s ahead, and it makes another.
_JUMP = """
import os, time, types
from allranks.cluster import cell_run
step, ahead = cell_run.CellRun.step, [0.0]
def step_later(self, seconds):
    ahead[0] = 1000.0 * os.path.exists({asked!r})
    step(self, seconds)
    if ahead[0]: open({done!r}, "w").close()
cell_run.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
cell_run.CellRun.step = step_later
"""


@contextmanager
def time_that_jumps(notebook: Kernel, folder: Path) -> Iterator[Callable[[], None]]:
    """Within, a call of the function that it gives lets 1000 s pass for the cell that runs."""
    asked, done = folder / "asked", folder / "done"

    def jump() -> None:
        asked.touch()
        wait_until(done.exists)

    notebook.run(_JUMP.format(asked=str(asked), done=str(done))).ok()
    try:
        yield jump
    finally:
        notebook.run("cell_run.time, cell_run.CellRun.step = time, step").ok()


def wait_until(
    condition: Callable[[], object],
    what: Callable[[], str] = lambda: "what the test waits for",
    seconds: float = 60,
) -> None:
    """Returns once something is so; after so many seconds raises TimeoutError with what it is."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what()}")
        time.sleep(0.05)
