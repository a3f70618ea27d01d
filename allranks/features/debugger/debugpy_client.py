"""debugpy in this process, driven by ipykernel's debugger through a pair of sockets.

No port is opened: debugpy's has no password, so other users of the host could run code in the rank.
Imported in a rank when a debugger attaches, because debugpy takes seconds to load.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

# debugpy warns on stderr, which is the cell's, about modules that Python has frozen.
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
# A step goes on to the next statement of the cell, although IPython runs each one by itself.
os.environ.setdefault("PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING", "1")
# By sys.monitoring, from Python 3.12 on, debugpy 1.8.22 now and then loses a step, and runs on.
os.environ.setdefault("PYDEVD_USE_SYS_MONITORING", "0")

import debugpy.server.api
import ipykernel.debugger
import pydevd  # type: ignore[import-not-found]
import pydevd_file_utils  # type: ignore[import-not-found]
import pydevd_tracing  # type: ignore[import-not-found]
from _pydevd_bundle.pydevd_comm import resume_threads  # type: ignore[import-not-found]

from allranks.engine.exceptions import PACKAGE
from allranks.features.debugger.records import CELL_FOLDER, Dap

# The engine imports this module without debugpy, to start sooner.
importlib.reload(ipykernel.debugger)

#: Packages that run the cell, or in which a pause would stop the rank itself.
_NOT_STEPPED_INTO = (
    *("IPython", "ipykernel", "ipyparallel", "debugpy", "tornado", "zmq", "traitlets"),
    *("mpi4py", "cloudpickle", "comm", "jupyter_client"),
)
_ENDING_SECONDS, _ENDING_TRIES = 0.05, 100
_DEBUGPY = os.path.dirname(debugpy.__file__)


class DebugpyClient:
    """Sends requests to debugpy, several at a time; ``on_event`` gets its events.

    It has the methods that ipykernel's debugger calls.
    """

    def __init__(self, on_event: Callable[[Dap], None]) -> None:
        self._on_event = on_event
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Dap]] = {}

    async def open(self) -> None:
        self._initialized = asyncio.Event()
        # debugpy would use a debugger that is still ending again, and never read the new socket.
        for _ in range(_ENDING_TRIES):
            earlier = pydevd.get_global_debugger()
            if earlier is None:
                break
            earlier.dispose_and_kill_all_pydevd_threads(timeout=_ENDING_SECONDS)
            await asyncio.sleep(_ENDING_SECONDS)
        ours, theirs = socket.socketpair()
        _start(theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._task = asyncio.ensure_future(self._read())

    def close(self) -> None:
        # debugpy's threads end when their socket is closed.
        self._writer.close()

    def get_host_port(self) -> tuple[str, int]:
        return "", 0  # for the arguments of ``attach``, which debugpy ignores

    async def send_dap_request(self, message: Dap) -> Dap:
        """Returns the response; that of ``attach`` once debugpy is configured."""
        response = self.send(message)
        if message["command"] == "attach":
            await self._initialized.wait()
            await self.send({"command": "configurationDone"})
        return {**await response, "request_seq": message.get("seq", 0)}

    def send(self, message: Dap) -> asyncio.Future[Dap]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        content = json.dumps({"arguments": {}, **message, "type": "request", "seq": number})
        self._writer.write(f"Content-Length: {len(content)}\r\n\r\n{content}".encode())
        return self._waiting[number]

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                message = json.loads(await self._reader.readexactly(int(head.split(b":")[1])))
                if message["type"] == "response":
                    response = self._waiting.pop(message["request_seq"], None)
                    if response is not None and not response.done():
                        response.set_result(message)
                elif message["type"] == "event":
                    if message["event"] == "initialized":
                        self._initialized.set()
                    self._on_event(message)
        for response in self._waiting.values():
            response.cancel()


def _start(theirs: socket.socket) -> None:
    """Starts debugpy's threads; no thread is traced yet."""
    pydevd_tracing.TracingFunctionHolder._warn = False
    # The threads of allranks must go on while the cell is paused.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    connect = pydevd.start_client
    pydevd.start_client = lambda _host, _port: theirs
    try:
        pydevd.settrace(
            host="rank",
            port=0,
            suspend=False,
            trace_only_current_thread=True,
            wait_for_ready_to_run=False,
            notify_stdin=False,
            dont_trace_start_patterns=(_DEBUGPY,),
        )
    finally:
        pydevd.start_client = connect
        untrace()
    pydevd.get_global_debugger().patch_threads()


def untrace() -> None:
    """Ends debugpy's tracing of the calling thread."""
    if pydevd.get_global_debugger() is not None:
        debugpy.trace_this_thread(False)


class CellDebugger(ipykernel.debugger.Debugger):
    """ipykernel's debugger, whose debugpy runs in the same process.

    ``on_event`` gets all events of debugpy. Files of cells are in ``folder``.
    """

    def __init__(self, folder: str, on_event: Callable[[Dap], None]) -> None:
        log = logging.getLogger(__name__)
        super().__init__(log, None, self._drop, None, None, [], filter_internal_frames=False)  # type: ignore[no-untyped-call]
        self._folder = folder
        self._tell = on_event
        self.debugpy = DebugpyClient(self._take_event)
        setattr(self, "debugpy_client", self.debugpy)  # noqa: B010  of another class, to mypy

    @staticmethod
    def _drop(event: Dap) -> None:
        pass  # `_take_event` has passed it on

    def _take_event(self, event: Dap) -> None:
        body = event.get("body", {})
        if event["event"] == "stopped":
            self.stopped_threads.add(body["threadId"])
        elif event["event"] == "continued":
            self.stopped_threads.discard(body["threadId"])
            if body.get("allThreadsContinued"):
                self.stopped_threads.clear()
        self._tell(event)

    async def process_request(self, message: Dap) -> Dap:
        if message["command"] == "initialize" and not self.is_started:
            await self.debugpy.open()
        reply: Dap = await super().process_request(message)  # type: ignore[no-untyped-call]
        return reply

    def trace(self) -> None:
        """Has debugpy trace the calling thread, while a front end is connected."""
        if self.is_started:
            debugpy.trace_this_thread(True)

    def untrace(self) -> None:
        """Ends that, and a step that has gone beyond the end of the cell."""
        if self.is_started:
            resume_threads("*")
        untrace()

    @staticmethod
    def name_file(code_name: str, file: str) -> None:
        """Has debugpy take code of this file name for the content of another file.

        debugpy ignores code whose file does not exist.
        """
        names = file, file, os.path.basename(file)
        pydevd_file_utils.NORM_PATHS_AND_BASE_CONTAINER[code_name] = names

    def start(self) -> bool:
        return True

    def stop(self) -> None:
        sys.breakpointhook = sys.__breakpointhook__
        self.debugpy.close()

    async def attach(self, message: Dap) -> Dap:
        arguments = message["arguments"]
        self.just_my_code = arguments.get("justMyCode", True)
        mapping = {"localRoot": arguments.pop(CELL_FOLDER), "remoteRoot": self._folder}
        arguments["pathMappings"] = [*arguments.get("pathMappings", []), mapping]
        # Threads that exchange data must go on while the cell is paused.
        arguments |= {"subProcess": False, "stopAllThreadsOnSuspend": False, "rules": _rules()}
        sys.breakpointhook = debugpy.breakpoint
        reply: Dap = await super().attach(message)  # type: ignore[no-untyped-call]
        return reply


def _rules() -> list[Dap]:
    """Returns which files debugpy ignores: the first rule that fits a file counts."""
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    hidden = [PACKAGE, *(os.path.join(packages, name, "") for name in _NOT_STEPPED_INTO)]
    rules = [{"path": f"{folder}**", "include": False} for folder in hidden]
    # Packages of the user may lie below the standard library.
    rules.append({"path": os.path.join(packages, "**"), "include": True})
    return [*rules, {"path": os.path.join(stdlib, "**"), "include": False}]
