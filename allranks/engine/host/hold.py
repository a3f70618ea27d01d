"""Who holds the ranks of a nursery: a notebook, or for a while nobody.

The notebook that starts a nursery holds it by its standard input. Where the ranks are to stay when
that one goes, another notebook can come to a door in the session's folder, which only this user may
enter: what it says there becomes the nursery's standard input, and what the nursery tells goes to
it. When nobody has come in time, nothing stays.

Several notebooks can share ranks: one holds them, and lends them to another one that is to run a
cell. As long as one is there that has had them they stay.

A visitor says one line of JSON, ``{"want": "about"}`` or another word: ``attach``; ``watch``, and
``share`` of who lends them to another notebook; ``leave``. It is told one, about the cluster; who
attaches is told the nursery's events from then on.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allranks.engine.host.others import Others, process_of, sign_of
from allranks.records.config import NOTEBOOKS_DOOR, NurseryConfig
from allranks.records.version import version

_VISIT_SECONDS = 1.0


class Hold:
    """The door for notebooks, and how long nobody may hold the ranks.

    Args:
        config: of the nursery, which this process runs.
    """

    def __init__(self, config: NurseryConfig) -> None:
        self._config = config
        self.began = time.time()
        #: Of each rank, the number of the cell that it runs; the ranks write it.
        self.running = memoryview(mmap.mmap(-1, 4 * config.size)).cast("i")
        self._seconds = 0.0
        self._memo: dict[str, Any] = {}
        self._until: float | None = None
        self._starter = self._holder = os.getppid()
        self._sign = sign_of(self._holder)
        self._others = Others()
        self._kept: list[int] = []
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(os.path.join(config.session_dir, NOTEBOOKS_DOOR))
        self.door.listen(8)

    @property
    def stays(self) -> bool:
        """Whether the ranks stay when the notebook goes."""
        return self._seconds > 0 or bool(self._others.sharing)

    @property
    def open(self) -> bool:
        """Whether nobody holds the ranks."""
        return self._until is not None

    @property
    def over(self) -> bool:
        """Whether nobody has come in time."""
        if self._until is not None and self._others.sharing:
            self._until = time.monotonic() + self._seconds
            return False
        return self._until is not None and time.monotonic() > self._until

    @property
    def left(self) -> bool:
        """Whether who holds the ranks is gone; something that it has started may have its pipes."""
        if self._starter:
            return os.getppid() != self._starter
        return bool(self._sign) and sign_of(self._holder) != self._sign

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        """From now on the ranks stay so long when the notebook goes.

        Args:
            seconds: 0 for not at all.
            memo: what the next notebook is to know.
        """
        self._seconds, self._memo = seconds, memo

    def begin(self) -> None:
        """The notebook is gone: from now on another one may come."""
        self._until = time.monotonic() + self._seconds
        self._starter, self._holder, self._sign = 0, 0, ""
        nobody = os.open(os.devnull, os.O_RDWR)
        os.dup2(nobody, 0)
        os.dup2(nobody, 1)
        os.close(nobody)
        for folder in self._config.kept_dirs:
            # Else a notebook that starts would take what is kept for somebody's who was killed.
            with suppress(OSError):
                self._kept.append(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(self._kept[-1], fcntl.LOCK_SH)

    def visited(self, watched: Callable[[], object]) -> dict[str, Any] | None:
        """Serves who comes to the door; returns what it is to be told if it has the ranks now.

        Args:
            watched: called where it wants to watch what the holder does.
        """
        visitor, _ = self.door.accept()
        with visitor:
            visitor.settimeout(_VISIT_SECONDS)
            try:
                wants = json.loads(visitor.makefile("rb").readline())["want"]
                who = process_of(visitor)
                if wants == "leave":
                    self._others.leave(who)
                elif wants in ("watch", "share"):
                    self._others.come(who, wants == "share")
                if wants == "watch":
                    watched()
                about = self._about()
                if wants != "attach" or not self.open:
                    refused = {"event": "refused"} if wants == "attach" else {}
                    visitor.sendall(json.dumps(about | refused).encode() + b"\n")
                    return None
            except (OSError, ValueError, LookupError, TypeError):
                return None  # it only looked whether anybody is here
            visitor.settimeout(None)
            os.dup2(visitor.fileno(), 0)
            os.dup2(visitor.fileno(), 1)
            self._until = None
            self._holder = who
            self._sign = sign_of(self._holder)
        while self._kept:
            os.close(self._kept.pop())
        return about | {"memo": self._memo}

    def _about(self) -> dict[str, Any]:
        left = None if self._until is None else max(0.0, self._until - time.monotonic())
        return {
            "version": version(),
            "pid": os.getpid(),
            "size": self._config.size,
            "log_dir": self._config.log_dir,
            "began": self.began,
            "running": max(self.running),
            "holder": self._holder,
            "left": left,
            "stays": self._seconds,
            "watchers": self._others.watching(but=self._holder),
            "sharing": self._others.sharing,
        }
