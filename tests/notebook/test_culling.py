"""A Jupyter server that ends idle kernels; its client uses a subshell as JupyterLab does."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.kernel import wait_until
from tests.servers import Server

_SECONDS = 120


def kernels(server: Server) -> dict[str, str]:
    found = json.loads(server.ask("kernels"))
    return {kernel["id"]: kernel["execution_state"] for kernel in found}


class Tab:
    """One connection to a fresh kernel."""

    def __init__(self, server: Server) -> None:
        self.kernel = json.loads(server.ask("kernels", b"{}"))["id"]
        address = f"{server.url}/api/kernels/{self.kernel}/channels?token={server.token}"
        self.socket = websocket.create_connection(
            address.replace("http", "ws", 1), timeout=_SECONDS, http_no_proxy=["127.0.0.1"]
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
        while True:
            message = json.loads(self.socket.recv())
            found: dict[str, Any] = message["content"]
            if (message["parent_header"].get("msg_id"), message["msg_type"]) == (number, kind) and (
                content.items() <= found.items()
            ):
                return found

    def message_of_a_widget(self) -> None:
        made = self.send("create_subshell_request", {}, "control")
        subshell = self.wait(made, "create_subshell_reply")["subshell_id"]
        content = {"comm_id": "none", "data": {}}
        number = self.send("comm_msg", content, "shell", subshell_id=subshell)
        self.wait(number, "status", execution_state="idle")


@pytest.fixture
def server(tmp_path):
    options = ["cull_idle_timeout=8", "cull_interval=1"]
    server = Server("jupyter_server", tmp_path, *(f"--MappingKernelManager.{o}" for o in options))
    yield server
    server.stop()


def test_a_kernel_is_ended_as_idle_only_after_its_cell(server, tmp_path):
    go = tmp_path / "go"
    busy = [begin_and_leave(server, magic, go) for magic in ("", "%%distributed\n")]
    # Their tabs are closed: a kernel that became idle later is ended first.
    other = Tab(server)
    other.wait(other.execute("pass"), "status", execution_state="idle")
    other.socket.close()
    wait_until(lambda: other.kernel not in kernels(server), server.log, _SECONDS)
    assert kernels(server) == dict.fromkeys(busy, "busy")
    go.touch()
    wait_until(lambda: not kernels(server), server.log, _SECONDS)


def begin_and_leave(server: Server, magic: str, go: Path) -> str:
    """Starts a cell that waits for a file, and closes its tab; returns its kernel."""
    tab = Tab(server)
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
