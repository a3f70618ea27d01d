"""Which notebook has the ranks of a host agent, and how long they wait for another one.

The notebook that starts a host agent has its ranks, and is connected to its standard input and
output. If the ranks are to stay when that notebook ends, another notebook can connect to a socket
in the session's folder, which only this user may enter. The connection then becomes the agent's
standard input and output. If no notebook connects in time, the cluster ends.

Several notebooks can share ranks: one has them, and lends them to another one that is to run a
cell. The ranks stay as long as a notebook is alive that has had them.

A visitor sends one line of JSON, ``{"want": WORD}``. The words are ``about``; ``attach``;
``watch``, and ``share`` from a notebook that lends the ranks to another one; ``leave``. The answer
is one line about the cluster. After ``attach``, the agent's events follow.

Two answers wait for an event. That to ``watch`` comes when the notebook that has the ranks has sent
``listens``, so it can be connected to. That to ``released`` comes when the process that the request
names as ``holder`` has the ranks no longer. Both come when no notebook has them; with 0 as
``holder``, the answer to ``released`` comes when one has them again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from allranks import doors, own_files
from allranks.features.attach.records import own_notebook
from allranks.records import limits
from allranks.records.config import NOTEBOOKS_DOOR, HostAgentConfig, version
from allranks.records.wire import read_object

#: The path of a notebook is the longest part of a request.
_REQUEST_NBYTES, _PATH_LENGTH = 1 << 16, 4096
#: Those whose notebooks have given up are not noticed.
_MOST_WAITING = 32


class VisitorRequest(NamedTuple):
    """What a visitor wants, the path of its notebook, and the process that it means."""

    wants: str
    notebook: str
    holder: int


class Visitor(NamedTuple):
    """A notebook that has asked, and whether it is to be answered."""

    connection: socket.socket
    is_due: Callable[[], bool]


class Attachment:
    """The notebook that has the ranks, the socket for other ones, and the time without any.

    If ranks are on several hosts, their notebook's caretaker has the socket
    (`allranks.features.attach.caretaker`), and the agents do not `listen`.
    """

    def __init__(
        self, config: HostAgentConfig, running: Iterable[int], kept: list[int] | None = None
    ) -> None:
        self._config = config
        self.began = time.time()
        #: For each rank, or for all, the number of the cell that it runs.
        self._running = running
        #: Spare processes read it, which are forked earlier than the user types that ranks stay.
        self._stays = memoryview(mmap.mmap(-1, 4)).cast("i")
        self._seconds = 0.0
        self._memo: dict[str, Any] = {}
        self._until: float | None = None
        self._starter = self._holder = os.getppid()
        self._sign = sign_of(self._holder)
        #: The notebooks that watch or have had the ranks, and those of them that have had them.
        self._signs: dict[int, str] = {}
        self._had: set[int] = set()
        self._notebooks: list[str] = []
        #: Those of an agent that begins again: a lock that is held stays.
        self._kept = [] if kept is None else kept
        #: Whether other notebooks can connect to the one that has the ranks.
        self._listens = False
        self._waiting: list[Visitor] = []

    def listen(self) -> socket.socket:
        """Returns the socket at which notebooks ask."""
        # This process has the environment of the notebook that started it.
        self._notebooks = [own_notebook()]
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(os.path.join(self._config.session_dir, NOTEBOOKS_DOOR))
        self.door.listen(8)
        return self.door

    @property
    def stays(self) -> bool:
        return bool(self._stays[0]) or bool(self._sharing())

    @property
    def open(self) -> bool:
        """Whether no notebook has the ranks."""
        return self._until is not None

    @property
    def over(self) -> bool:
        """Whether no notebook has come in time."""
        if self._until is not None and self._sharing():
            self._until = time.monotonic() + self._seconds
            return False
        return self._until is not None and time.monotonic() > self._until

    @property
    def left(self) -> bool:
        """Whether the notebook's process is gone; its children may still have its pipes open."""
        if self._starter:
            return os.getppid() != self._starter
        return bool(self._sign) and sign_of(self._holder) != self._sign

    def _others(self) -> list[int]:
        for pid, sign in list(self._signs.items()):
            if not sign or sign_of(pid) != sign:
                self._forget(pid)
        return sorted(self._signs)

    def _sharing(self) -> list[int]:
        # The ranks stay for notebooks that have had them and still run.
        return [pid for pid in self._others() if pid in self._had]

    def _forget(self, pid: int) -> None:
        self._signs.pop(pid, None)
        self._had.discard(pid)

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        self._seconds, self._memo, self._stays[0] = seconds, memo, seconds > 0
        # Already now: a kernel that is killed leaves no time to lock them.
        self._hold_kept(self.stays)

    def begin(self) -> None:
        self._until = time.monotonic() + self._seconds
        self._starter, self._holder, self._sign = 0, 0, ""
        self._listens = False
        # The numbers 0 and 1 stay taken: no later file must get them.
        nobody = os.open(os.devnull, os.O_RDWR)
        os.dup2(nobody, 0)
        os.dup2(nobody, 1)
        os.close(nobody)
        self._hold_kept(True)
        self._answer()

    def _hold_kept(self, hold: bool) -> None:
        """Locks the folders of kept variables, or releases them.

        Without a lock, a notebook that starts would take them for those of a cluster that was
        killed, and remove them.
        """
        while self._kept and not hold:
            os.close(self._kept.pop())
        # A lock that is held stays: released and taken again, it would leave a gap.
        for folder in self._config.kept_dirs if hold and not self._kept else ():
            with suppress(OSError):
                self._kept.append(own_files.open_folder(folder))
                fcntl.flock(self._kept[-1], fcntl.LOCK_SH)

    def visited(self, watched: Callable[[], object]) -> dict[str, Any] | None:
        """Serves a notebook at the socket; returns the answer if it has the ranks from now on."""
        try:
            visitor = doors.accept(self.door)
        except OSError:
            return None  # it has gone, or this process has no descriptor left
        visitor.settimeout(limits.REQUEST_SECONDS)
        try:
            # One packet: a visitor that sends without end must not keep the ranks unwatched.
            request = read_request(visitor.recv(_REQUEST_NBYTES))
            who, _ = own_files.peer(visitor)
        except (OSError, ValueError):
            visitor.close()
            return None  # a liveness probe, or a notebook that ended
        if request.wants == "attach":
            if self.open:
                return self._attach(visitor, who, request.notebook)
            self._send(visitor, event="refused")
            return None
        self._waiting.append(Visitor(visitor, self._serve(request, who, watched)))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.pop(0).connection.close()
        self._answer()
        return None

    def _serve(
        self, request: VisitorRequest, who: int, watched: Callable[[], object]
    ) -> Callable[[], bool]:
        """Notes what a visitor wants; returns a function: whether the answer can be sent."""
        match request.wants:
            case "listens" if who in (0, self._holder):  # 0 if the system does not name it
                self._listens = True
            case "leave":
                self._forget(who)
            case "share":
                self._signs[who] = sign_of(who)
                self._had.add(who)
            case "watch":
                self._signs[who] = sign_of(who)
                watched()  # each time: its last try may have failed
                return lambda: self.open or self._listens
            case "released":
                return lambda: self._holder != request.holder
        return lambda: True

    def _attach(self, visitor: socket.socket, who: int, notebook: str) -> dict[str, Any]:
        about = self._about()
        with visitor:
            visitor.settimeout(None)
            os.dup2(visitor.fileno(), 0)
            os.dup2(visitor.fileno(), 1)
        self._until = None
        self._holder, self._sign = who, sign_of(who)
        self._notebooks = [*(one for one in self._notebooks if one != notebook), notebook]
        self._hold_kept(self.stays)
        self._answer()
        return about | {"memo": self._memo}

    def _answer(self) -> None:
        """Answers the visitors that wait for nothing more."""
        due = [visitor for visitor in self._waiting if visitor.is_due()]
        self._waiting = [visitor for visitor in self._waiting if visitor not in due]
        for visitor in due:
            self._send(visitor.connection)

    def _send(self, visitor: socket.socket, **more: str) -> None:
        with visitor, suppress(OSError):
            visitor.sendall(json.dumps(self._about() | more).encode() + b"\n")

    def _about(self) -> dict[str, Any]:
        left = None if self._until is None else max(0.0, self._until - time.monotonic())
        return {
            "version": version(),
            "pid": os.getpid(),
            "size": self._config.size,
            "log_dir": self._config.log_dir,
            "began": self.began,
            "running": max(self._running),
            "holder": self._holder,
            "left": left,
            "stays": self._seconds,
            "watchers": [pid for pid in self._others() if pid != self._holder],
            "sharing": self._sharing(),
            "notebooks": self._notebooks,
        }


def read_request(line: bytes) -> VisitorRequest:
    """Raises ValueError."""
    said = read_object(line)
    wants, notebook, holder = said.get("want"), said.get("notebook", ""), said.get("holder", 0)
    if not (isinstance(wants, str) and isinstance(notebook, str) and isinstance(holder, int)):
        raise ValueError("expected a request")
    return VisitorRequest(wants, notebook[:_PATH_LENGTH], holder)


def sign_of(pid: int) -> str:
    """Returns a mark that a later process of the same number does not have; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The start time, in ticks that do not depend on the setting of the clock.
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
