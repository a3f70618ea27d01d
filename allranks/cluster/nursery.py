"""The notebook's hold on the nursery: a child process whose standard input is the lifeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allranks.records.config import NurseryConfig

_STOP_SECONDS = 10.0
_NURSERY = "allranks.engine.nursery"


class Nursery:
    """A running nursery.

    Args:
        config: what it is to bring up.
        deliver: called, in a thread, with each event it tells (see ``allranks.engine.nursery``):
            its name, and what it is about.
    """

    def __init__(
        self, config: NurseryConfig, deliver: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._deliver = deliver
        log = os.path.join(config.log_dir, "nursery.log")
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                # -P: files in the notebook's folder must not shadow the standard library.
                [sys.executable, "-P", "-m", _NURSERY],
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

    def all_up(self) -> None:
        """Says that every rank is up: time to note what they share."""
        self._say("up")

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
            self._deliver(*_event(line))
        self._deliver("nursery_exit", {"code": self._process.wait()})


def _event(line: bytes) -> tuple[str, dict[str, Any]]:
    """Returns the event that a line tells; any other line is a module's that was preloaded."""
    try:
        fields = json.loads(line)
        return fields.pop("event"), fields
    except Exception:  # what is printed may be any JSON, and as deep as it likes
        return "launcher", {"text": line.decode("utf-8", "replace")}
