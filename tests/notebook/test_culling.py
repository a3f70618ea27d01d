"""A Jupyter server that ends idle kernels; its client uses a subshell as JupyterLab does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.ports import free_port

_SECONDS = 120


class Server:
    """A server on a free port of 127.0.0.1 that ends a kernel after 5 idle seconds."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        options = [
            "--no-browser",
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            "--IdentityProvider.token=",
            f"--ServerApp.root_dir={home}",
            "--MappingKernelManager.cull_idle_timeout=5",
            "--MappingKernelManager.cull_interval=1",
            "--ServerApp.disable_check_xsrf=True",
        ]
        names = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "XDG_STATE_HOME")
        places = {name: str(home / name) for name in names}
        self._log = home / "server.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *options],
                env=os.environ | places,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, self.log)

    def _answers(self) -> bool:
        with suppress(urllib.error.URLError, ConnectionError):
            self.kernels()
            return True
        return False

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def ask(self, path: str, data: bytes | None = None) -> Any:
        # Straight to it: a proxy of the user's must not be asked for 127.0.0.1.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}/api/{path}", data, timeout=30) as answer:
            return json.load(answer)

    def kernels(self) -> dict[str, str]:
        """Returns the state of each kernel that was not ended."""
        return {kernel["id"]: kernel["execution_state"] for kernel in self.ask("kernels")}

    def start(self) -> Tab:
        return Tab(self, self.ask("kernels", b"{}")["id"])


class Tab:
    """One connection to one kernel."""

    def __init__(self, server: Server, kernel: str) -> None:
        self.kernel = kernel
        address = f"ws://127.0.0.1:{server.port}/api/kernels/{kernel}/channels"
        self.socket = websocket.create_connection(
            address, timeout=_SECONDS, http_no_proxy=["127.0.0.1"]
        )

    def send(self, kind: str, content: dict[str, Any], channel: str, **header: str) -> str:
        number = uuid.uuid4().hex
        head = {"msg_id": number, "msg_type": kind, "username": "", "session": "tab"}
        head |= {"version": "5.4", "date": ""} | header
        message = {"header": head, "parent_header": {}, "metadata": {}, "content": content}
        self.socket.send(json.dumps(message | {"channel": channel, "buffers": []}))
        return number

    def execute(self, source: str) -> str:
        return self.send("execute_request", {"code": source, "silent": False}, "shell")

    def wait(self, number: str, kind: str, **content: str) -> dict[str, Any]:
        """Returns the content of the next message of this kind about a request."""
        while True:
            message = json.loads(self.socket.recv())
            found: dict[str, Any] = message["content"]
            if (message["parent_header"].get("msg_id"), message["msg_type"]) == (number, kind) and (
                content.items() <= found.items()
            ):
                return found

    def message_of_a_widget(self) -> None:
        """Sends one over a subshell, and returns when the kernel has answered it."""
        made = self.send("create_subshell_request", {}, "control")
        subshell = self.wait(made, "create_subshell_reply")["subshell_id"]
        content = {"comm_id": "none", "data": {}}
        number = self.send("comm_msg", content, "shell", subshell_id=subshell)
        self.wait(number, "status", execution_state="idle")


def wait_until(true: Callable[[], bool], explain: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not true():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.terminate()
    server.process.wait(30)


def test_a_kernel_is_ended_as_idle_only_after_its_cell(server: Server, tmp_path: Path) -> None:
    go = tmp_path / "go"
    busy = [begin_and_leave(server, magic, go) for magic in ("", "%%distributed\n")]
    # Their tabs are closed: a kernel that became idle later is ended first.
    other = server.start()
    other.wait(other.execute("pass"), "status", execution_state="idle")
    other.socket.close()
    wait_until(lambda: other.kernel not in server.kernels(), server.log)
    assert server.kernels() == dict.fromkeys(busy, "busy")
    go.touch()
    wait_until(lambda: not server.kernels(), server.log)


def begin_and_leave(server: Server, magic: str, go: Path) -> str:
    """Starts a cell that waits for a file, and closes its tab; returns its kernel."""
    tab = server.start()
    begin = "%load_ext allranks\n" + ("%distributed start -n 1" if magic else "")
    begun = tab.wait(tab.execute(begin), "execute_reply")
    assert begun["status"] == "ok", begun
    loop = f"while not os.path.exists({str(go)!r}): time.sleep(0.1)"
    cell = tab.execute(f"{magic}import os, time\n{loop}")
    tab.wait(cell, "status", execution_state="busy")
    tab.message_of_a_widget()
    # The tab is open: its next status is that of the cell.
    tab.wait(cell, "status", execution_state="busy")
    tab.socket.close()
    return tab.kernel
