"""A JupyterHub with the configuration of docs/jupyterhub.md, and its students' accounts."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.kernel import wait_until
from tests.ports import free_port

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PAGE = REPOSITORY / "docs" / "jupyterhub.md"
#: Where control groups are that share processor time: of version 1 if there are such.
CPU_GROUPS = next(filter(Path.is_dir, map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"))), HERE)
#: The name of a hub's group begins so; the process id of its program follows.
_GROUP = "allranks-hub-"
START_SECONDS = 300.0
Send = Callable[[str], object]
#: The student whose idle kernels end after so many seconds. One that is starting counts as idle.
IDLER, CULLED_SECONDS = "ida", 20
#: What a machine sets by itself; limits are as small as a test can reach.
ADDITIONS = """
MAX_RANKS, MAX_PROCESSES, MAX_NBYTES = 2, 300, 1 << 30
CPU_GROUP = Path({group!r})
c.Spawner.cmd = {command}
c.Spawner.environment |= {{
    "ALLRANKS_MAX_RANKS": str(MAX_RANKS), "PATH": {bin!r} + ":" + os.environ["PATH"]
}}
PORTS = {ports}
def prepare(spawner):
    # One that the system gives to whoever asks for any may be another program's by then.
    spawner.port = PORTS[spawner.user.name]
    if spawner.user.name == "{idler}":
        soon = {{"=3600": "={culled}", "=300": "=1"}}
        for old, new in soon.items():
            spawner.args = [arg.replace(old, new) for arg in spawner.args]
c.Spawner.pre_spawn_hook = prepare
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 0}}
c.Spawner.http_timeout = c.Spawner.start_timeout = {seconds}
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.command = {proxy}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.JupyterHub.services[0]["environment"]["ALLRANKS_CLASS_URL"] = {class_url!r}
c.JupyterHub.services[0]["command"][0] = {python!r}
c.Spawner.environment["ALLRANKS_CLASS_URL"] = {class_url!r}
c.JupyterHub.services += [{{"name": "teacher", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{
        "name": "teacher",
        "services": ["teacher"],
        "scopes": ["admin:users", "admin:servers", "access:servers"],
    }}
]
"""


def proxy() -> str:
    """Returns the path of JupyterHub's proxy; empty where there is none."""
    own = Path(sys.prefix) / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy"
    return str(own) if own.exists() else shutil.which("configurable-http-proxy") or ""


def has_npm() -> bool:
    """Whether there is what installs the proxy: on PATH, or beside this Python."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("npm", path=f"{beside}:{os.environ.get('PATH', '')}") is not None


class Hub:
    """A hub on a free port, with an account for each of the names.

    ``folder`` has their homes, and must be open to all accounts. ``additions`` are the last lines
    of the configuration.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], additions: str = "") -> None:
        self._folder, self._names, self._additions = folder, names, additions
        self._token = secrets.token_hex(16)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._group = CPU_GROUPS / f"{_GROUP}{os.getpid()}"
        self._connections: list[WebSocketClientConnection] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        _remove_groups_of_killed_programs()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self._thread.start()
        config = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
        additions = ADDITIONS.format(
            python=sys.executable,
            class_url=f"http://127.0.0.1:{free_port()}",
            bin=str(Path(sys.executable).parent),
            command=[sys.executable, "-m", "jupyterhub.singleuser"],
            seconds=START_SECONDS,
            port=self._port,
            hub_port=free_port(),
            proxy=[proxy()],
            proxy_port=free_port(),
            ports={name: free_port() for name in self._names},
            token=self._token,
            group=str(self._group),
            idler=IDLER,
            culled=CULLED_SECONDS,
        )
        (self._folder / "jupyterhub_config.py").write_text(config + additions + self._additions)
        with suppress(OSError):  # containers often may not
            self._group.mkdir()
        self._folder.chmod(0o755)  # students have their homes there
        homes = self._folder / "homes"
        homes.mkdir()
        accounts = [str(HERE / "students.sh"), str(homes), sys.base_prefix, *self._names, "--"]
        self._log = self._folder / "hub.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*accounts, sys.executable, "-m", "jupyterhub", "-f", "jupyterhub_config.py"],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, self._log.read_text, START_SECONDS)
        for name in self._names:
            self.ask("POST", f"/hub/api/users/{name}")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # the namespaces of the processes end with it
            self._process.wait()
        self._in_loop(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        wait_until(lambda: _removed(self._group))

    async def _close_all(self) -> None:
        for connection in self._connections:
            connection.close()

    def _answers(self) -> bool:
        try:
            self.ask("GET", "/hub/api/")
        except OSError:
            return False
        return True

    def ask(self, method: str, path: str) -> Any:
        """Returns the answer of the hub, or of a student's server, to a request of the teacher."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            headers={"Authorization": f"token {self._token}"},
            data=b"" if method == "POST" else None,
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return json.loads(answer.read() or b"null")

    def start(self, *names: str) -> None:
        """Starts the servers of these students, all at once."""
        for name in names:
            self.ask("POST", f"/hub/api/users/{name}/server")

        def ready(name: str) -> bool:
            servers = self.ask("GET", f"/hub/api/users/{name}")["servers"]
            return bool(servers) and servers[""]["ready"]

        wait_until(lambda: all(map(ready, names)), self._log.read_text, START_SECONDS)

    def student(self, name: str) -> Student:
        """Starts the server and a kernel of a student."""
        self.start(name)
        return Student(self, name)

    def stop(self, name: str) -> None:
        """Stops the server of a student."""
        self.ask("DELETE", f"/hub/api/users/{name}/server")
        wait_until(
            lambda: not self.ask("GET", f"/hub/api/users/{name}")["servers"],
            self._log.read_text,
            START_SECONDS,
        )

    def connect(self, path: str, take: Callable[[str | bytes | None], object]) -> Send:
        """Opens a websocket, and returns what sends a text over it.

        ``take`` is called in a thread with every text that comes, and with None at the end.
        """

        async def opened() -> WebSocketClientConnection:
            # A connection of which nobody reads answers no ping: the server closes it after 90 s.
            return await websocket_connect(request, on_message_callback=take)

        async def send(text: str) -> None:
            await connection.write_message(text)

        request = HTTPRequest(
            f"ws://127.0.0.1:{self._port}{path}",
            headers={"Authorization": f"token {self._token}"},
            request_timeout=START_SECONDS,
        )
        connection = self._in_loop(opened())
        self._connections.append(connection)
        return lambda text: self._in_loop(send(text))

    def _in_loop(self, asked: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(START_SECONDS)


def _removed(group: Path) -> bool:
    try:
        for inner in group.glob("*/"):
            inner.rmdir()
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # its last processes are still ending
        return False
    return True


def _remove_groups_of_killed_programs() -> None:
    for group in CPU_GROUPS.glob(f"{_GROUP}*"):
        if not psutil.pid_exists(int(group.name.removeprefix(_GROUP))):
            _removed(group)


class Student:
    """A kernel of a student, reached through the hub's proxy."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub, self._api = hub, f"/user/{name}/api"
        self._id = hub.ask("POST", f"{self._api}/kernels")["id"]
        #: The messages about each cell that was sent; None once the connection has ended.
        self._cells: dict[str, queue.SimpleQueue[Any]] = {}
        self._send = hub.connect(f"{self._api}/kernels/{self._id}/channels", self._take)

    def _take(self, said: str | bytes | None) -> None:
        if said is None:
            for cell in self._cells.values():
                cell.put(None)
            return
        message = json.loads(said)
        if cell := self._cells.get(message["parent_header"].get("msg_id")):
            cell.put(message)

    def kernels(self) -> list[str]:
        """Returns the ids of the kernels that the student's server has."""
        return [kernel["id"] for kernel in self._hub.ask("GET", f"{self._api}/kernels")]

    def begin(self, source: str) -> str:
        """Sends a cell, and returns the id of its message."""
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "session": "", "version": "5.3"}
        content = {"code": source, "silent": False, "stop_on_error": False, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        message |= {"channel": "shell", "buffers": []}
        self._cells[number] = queue.SimpleQueue()
        self._send(json.dumps(message))
        return number

    def end(self, number: str, seconds: float = 120) -> str:
        """Returns the output of a cell, and its error as the last line."""
        deadline, text = time.monotonic() + seconds, ""
        while True:
            try:
                message = self._cells[number].get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell has not ended in {seconds:g} s:\n{text}") from None
            if message is None:
                raise ConnectionError(f"the connection ended during a cell:\n{text}")
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "") + "\n"
            elif kind == "error":
                text += f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                del self._cells[number]
                return text

    def run(self, source: str) -> str:
        return self.end(self.begin(source))
