"""The state of a student's notebook, and the thread that sends it after ``%distributed join``."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allranks.cluster.failures import plain
from allranks.features.classroom import door

_EXERCISE = re.compile(r"(exercise|check)-(.+)")
_CHECK = "check"
_TEXT_LENGTH = 300
_INTERVAL_SECONDS = 1.0
_SEND_SECONDS = 10


class NotebookState:
    """What the notebook does, from the events of IPython."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.cell, self.exercise, self.error = 0, "", ""
        #: The exercises whose check has succeeded when it ran last, in their order.
        self._solved: dict[str, None] = {}
        self.state, self.since = "idle", time.time()
        shell.events.register("pre_run_cell", self._begun)
        shell.events.register("post_run_cell", self._ended)

    def close(self) -> None:
        self._shell.events.unregister("pre_run_cell", self._begun)
        self._shell.events.unregister("post_run_cell", self._ended)

    def _begun(self, info: Any) -> None:
        self.cell += 1
        if found := _exercise_of(info):
            self.exercise = found[2]
        self.state, self.error, self.since = "running", "", time.time()

    def _ended(self, result: Any) -> None:
        self.cell = result.execution_count or self.cell
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            lines = plain(str(error)).strip().splitlines() or [""]
            name = type(error).__name__
            self.error = lines[0] if name == "CellFailed" else f"{name}: {lines[0]}"
        found = _exercise_of(result.info)
        if found and found[1] == _CHECK:
            self._solved.pop(found[2], None)
            if error is None:
                self._solved[found[2]] = None
        self.state, self.since = "failed" if error is not None else "idle", time.time()

    def described(self) -> dict[str, Any]:
        # Without the path, which a teacher does not need.
        notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
        return {
            "user": os.environ.get("JUPYTERHUB_USER", ""),
            "notebook": notebook[:_TEXT_LENGTH],
            "cell": self.cell,
            "exercise": self.exercise[:_TEXT_LENGTH],
            "solved": ", ".join([*self._solved])[:_TEXT_LENGTH],
            "state": self.state,
            "error": self.error[:_TEXT_LENGTH],
            "seconds": time.time() - self.since,
        }


def _exercise_of(info: Any) -> re.Match[str] | None:
    # Labs give their exercises and checks such ids.
    return _EXERCISE.fullmatch(getattr(info, "cell_id", None) or "")


class Membership:
    """The connection of a student's notebook to the class, until `close` or the teacher's end."""

    def __init__(
        self, teacher: str, shows_panel: bool, described: Callable[[bool], dict[str, Any]]
    ):
        self.teacher, self.shows_panel = teacher, shows_panel
        self._described = described
        self._connection = door.connect(teacher)
        self._over = threading.Event()
        self._wanted = threading.Event()
        for run in (self._send, self._receive):
            threading.Thread(target=run, name=f"allranks-class-{run.__name__}", daemon=True).start()

    @property
    def is_open(self) -> bool:
        return not self._over.is_set()

    def close(self) -> None:
        self._over.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self) -> None:
        # A teacher's notebook may not read. A timeout of the socket would also end `recv`.
        limit = struct.pack("ll", _SEND_SECONDS, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            while not self._over.is_set():
                opened = self._wanted.is_set() and self.shows_panel
                self._wanted.clear()
                state = {**self._described(opened), "shows_panel": self.shows_panel}
                panel = state.pop("panel", None)
                door.send(self._connection, state)
                if panel is not None:
                    door.send(self._connection, panel)
                self._over.wait(_INTERVAL_SECONDS)
        except OSError:
            self.close()

    def _receive(self) -> None:
        # The teacher's only request: the panel. Without the student's consent it changes nothing.
        with suppress(OSError):
            while self._connection.recv(4096):
                self._wanted.set()
        self.close()
