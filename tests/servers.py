"""A Jupyter server on a free port of 127.0.0.1, with folders of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

from tests.kernel import MARK, marked, wait_until
from tests.ports import free_port

PLACES = (
    "IPYTHONDIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "XDG_STATE_HOME",
)


class Server:
    """A server that answers when it is made.

    Args:
        module: ``jupyter_server`` or ``jupyterlab``.
        home: a folder for its settings and its log; notebooks are in ``home / "notebooks"``.
        options: more of its command line.
    """

    def __init__(self, module: str, home: Path, *options: str) -> None:
        self.home, self.root = home, home / "notebooks"
        self.root.mkdir(parents=True, exist_ok=True)
        self.token = secrets.token_hex(16)
        self.env = {name: str(home / name) for name in PLACES} | {MARK: self.token}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = home / "server.log"
        command = [
            *(sys.executable, "-m", module, "--no-browser", "--allow-root", *options),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            *(f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"),
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.root,
                env=os.environ | self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, self.log, 120)
        except BaseException:
            self.stop()  # a server that is not made cannot be stopped by who wanted it
            raise

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def ask(self, path: str, data: bytes | None = None) -> bytes:
        # Straight to it: a proxy of the user's must not be asked for 127.0.0.1.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self.url}/api/{path}", data)
        request.add_header("Authorization", f"token {self.token}")
        with opener.open(request, timeout=60) as answer:
            return bytes(answer.read())

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in marked(self.token):
            with suppress(psutil.Error):
                process.kill()

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server has ended:\n{self.log()}")
        with suppress(OSError):  # also where it accepts, and does not answer in time
            self.ask("status")
            return True
        return False
