"""The notebook's hold on the nursery: a child process whose standard input is the lifeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil

from allranks.records.config import NurseryConfig

_STOP_SECONDS = 10.0
_LAUNCHER_SECONDS = 4.0
_TRACKER_SECONDS = 1.0
_POLL_SECONDS = 0.1
_AGENT = "allranks.agent"


class Nursery:
    """A running nursery.

    Args:
        config: what it is to bring up.
        deliver: called, in a thread, with each event it tells (see
            ``allranks.engine.host.host_agent``): its name, and what it is about.
    """

    def __init__(
        self, config: NurseryConfig, deliver: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._deliver = deliver
        self._session_dir = config.session_dir
        log = os.path.join(config.log_dir, "nursery.log")
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                # -P: files in the notebook's folder must not shadow the standard library.
                [sys.executable, "-P", "-m", _AGENT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env={**os.environ, **config.environment},
                # An interrupt of the kernel goes to its whole process group: not to this one.
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        self._say(config.to_json())
        self._thread = threading.Thread(target=self._listen, name="allranks-nursery", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._process.pid

    def why_ended(self) -> str:
        """Returns nothing: nobody but this process could have ended it without its telling."""
        return ""

    def all_up(self) -> None:
        """Says that every rank is up: time to note what they share."""
        self._say("up")

    def clients(self) -> None:
        """Has ipyparallel's controller come up, where it has not yet: somebody may look for it."""
        self._say("clients")

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        """Says how long the ranks stay when this process is gone, and what the next is to know."""
        self._say(f"stay {json.dumps({'seconds': seconds, 'memo': memo})}")

    def let_go(self) -> None:
        """Leaves the ranks to another notebook."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def stop(self) -> None:
        """Ends every process of the cluster; returns when they are gone."""
        self._say("stop")
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        self._thread.join(_STOP_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what could not be said to it is not said now either
                pipe.close()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has ended: the listening thread tells

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._deliver(*event_of(line))
        code = self._process.wait()
        self._deliver("nursery_exit", {"code": code})
        if code < 0:
            end_session(self.pid, self._session_dir)


def end_session(leader: int, session_dir: str) -> None:
    """Ends the processes that a killed nursery has left; its ranks have died with it.

    The launcher ends by itself, and removes MPI's shared memory. Processes that cells have started
    may not, as multiprocessing's managers.

    Args:
        leader: the nursery's process id, which is also the id of its POSIX session.
        session_dir: the session's folder. The launcher puts it into every rank's environment, so
            it also finds processes that cells have started in a POSIX session of their own.
    """
    left = _wait_for_end(leader, _LAUNCHER_SECONDS)
    # These end with the last process that they serve, and remove what it had in shared memory.
    trackers = [pid for pid in left if _is_tracker(pid)]
    _kill(pid for pid in left if pid not in trackers)
    _kill(_wait_for_end(leader, _TRACKER_SECONDS) if trackers else ())
    _kill(pid for pid in psutil.pids() if _is_of(pid, session_dir))


def _wait_for_end(leader: int, seconds: float) -> list[int]:
    """Returns the processes of a session that are still there after so long."""
    deadline = time.monotonic() + seconds
    while (left := _in_session(leader)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _in_session(leader: int) -> list[int]:
    return [pid for pid in psutil.pids() if _session_of(pid) == leader]


def _is_of(pid: int, session_dir: str) -> bool:
    try:
        return any(session_dir in value for value in psutil.Process(pid).environ().values())
    except (psutil.Error, OSError):
        return False  # it is gone, or another user's


def _is_tracker(pid: int) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in it for it in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False  # it is gone


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1  # it is gone


def event_of(line: bytes) -> tuple[str, dict[str, Any]]:
    """Returns the event that a line tells; any other line is a module's that was preloaded."""
    try:
        fields = json.loads(line)
        return fields.pop("event"), fields
    except Exception:  # what is printed may be any JSON, and as deep as it likes
        return "launcher", {"text": line.decode("utf-8", "replace")}
