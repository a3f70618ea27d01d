"""This user's clusters on this machine: to list them, attach to one, or watch one."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from allranks import own_files
from allranks.cluster import log_folder, session_folder
from allranks.cluster.agents import TakenHosts
from allranks.cluster.host_agent import HostAgentProcess
from allranks.cluster.sockets import ListeningSockets
from allranks.errors import UsageError
from allranks.features.attach.caretaker_process import CaretakerStandIn
from allranks.features.attach.records import WATCHERS_DOOR, own_notebook
from allranks.features.attach.sharing import unpack
from allranks.records import limits
from allranks.records.config import NOTEBOOKS_DOOR, HostAgentConfig, version
from allranks.records.ranks import label
from allranks.records.wire import read_object

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MOST_DAYS = 365
_TYPED = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def seconds_of(text: str, command: str) -> float:
    """Returns the seconds of ``90s``, ``30m``, ``2h`` or ``1d``; else raises UsageError."""
    found = _TYPED.fullmatch(text)
    if found is None or not float(found[1]):
        raise UsageError(
            f"expected a time such as 90s, 30m, 2h or 1d, found {text!r}. "
            f"Type for example: %distributed {command} 30m"
        )
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > _MOST_DAYS * _UNITS["d"]:
        raise UsageError(
            f"expected a time of at most {_MOST_DAYS}d, found {text!r:.60}. "
            f"Type for example: %distributed {command} 7d"
        )
    return seconds


def as_time(seconds: float) -> str:
    """Returns ``45 s``, ``30 min`` or ``2 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h"


_GLANCE_SECONDS = 0.2
#: A host agent waits `REQUEST_SECONDS` for a request: this process may stand still for longer.
_TRIES = 5
_LIST = "%distributed clusters"
_STAYS = (
    "Ranks end with their notebook, unless you typed there before: %distributed detach-on-exit 30m"
)


@dataclass(frozen=True)
class SessionInfo:
    """A cluster that runs here, as its host agent describes it.

    ``began`` is in seconds since 1970; ``running`` is the number of the cell that its ranks run,
    else 0. ``holder`` is the notebook's process; with 0, ``left`` is the number of seconds that the
    cluster stays. ``watchers`` are the processes of other notebooks that watch; ``sharing`` those
    of former holders, for which it stays. ``notebooks`` are the paths of all holders, the last one
    last.
    """

    name: str
    folder: str
    pid: int
    size: int
    log_dir: str
    began: float
    running: int
    holder: int
    left: float | None
    stays: float
    version: str
    watchers: Sequence[int] = ()
    sharing: Sequence[int] = ()
    notebooks: Sequence[str] = ()

    @property
    def notebook(self) -> str:
        """The notebook that had the ranks last, or the folder of a program without a notebook."""
        path = self.notebooks[-1] if self.notebooks else "another allranks"
        return os.path.basename(path) if path.endswith(".ipynb") else path


def running(seconds: float = limits.VISIT_SECONDS) -> list[SessionInfo]:
    """Returns this user's clusters on this machine, the oldest first; ``seconds`` limits each
    visit.
    """
    found = []
    for path in session_folder.session_folders():
        if own_files.is_own_folder(str(path)):
            with suppress(UsageError):
                found.append(visit(str(path), seconds=seconds))
    return sorted(filter(None, found), key=lambda session: session.began)


def visit(
    folder: str, want: str = "about", seconds: float = limits.VISIT_SECONDS, holder: int = 0
) -> SessionInfo | None:
    """Returns the cluster of a session's folder; None if it has ended, or starts or ends just now.

    ``want`` is a request beside: ``watch``, ``share`` or ``leave``; or ``released``, with which the
    answer waits until the process ``holder`` has the ranks no longer. Raises UsageError if it runs
    and does not answer within ``seconds``.
    """
    try:
        with _visit(folder, want, seconds, holder) as connection:
            told = json.loads(connection.makefile("rb").readline())
        # Another version may send more fields.
        known = {it.name: told[it.name] for it in fields(SessionInfo) if it.name in told}
        return SessionInfo(name_of(folder), folder, **known)
    except UsageError:  # which is a ValueError
        raise
    except (OSError, ValueError, TypeError):
        return None


def visit_to_watch(folder: str) -> SessionInfo | None:
    """`visit` for ``watch``: the notebook that holds the ranks answers, too. It may stand still for
    long, unlike a host agent.
    """
    return visit(folder, "watch", limits.ANSWERS_SECONDS)


def listing() -> str:
    lines = []
    for one in running():
        since = time.strftime("%H:%M", time.localtime(one.began))
        does = f"running In[{one.running}]" if one.running else "idle"
        ranks = f"{label(range(one.size))} of {one.notebook}"
        lines.append(f"{one.name}  {ranks}, since {since}, {does}; {whose(one)}")
    return "\n".join(lines) or "No ranks of yours run on this machine."


def whose(one: SessionInfo) -> str:
    if one.holder == os.getpid():
        has = "attached to this notebook"
    elif one.left is None:
        has = f"attached to the notebook of process {one.holder}"
    elif one.sharing:
        return f"detached, and kept for {_notebooks(one.sharing)}"
    else:
        return f"detached, {as_time(one.left)} left: %distributed attach {one.name}"
    return f"{has}, watched by {_notebooks(one.watchers)}" if one.watchers else has


def _notebooks(pids: Sequence[int]) -> str:
    me = ["this notebook"] if os.getpid() in pids else []
    others = [f"{pid}" for pid in pids if pid != os.getpid()]
    if others:
        plural = len(others) > 1
        those = "the notebooks of processes" if plural else "the notebook of process"
        me.append(f"{those} {', '.join(others)}")
    return " and ".join(me)


def waiting() -> str:
    """Returns a line about clusters without a notebook; "" if there are none."""
    free = [one for one in running(_GLANCE_SECONDS) if not one.holder]
    if not free:
        return ""
    whose = " and ".join(f"{label(range(one.size))} of {one.name}" for one in free)
    return f"Earlier ones are detached: {whose}. To list them: {_LIST}"


def chosen(name: str) -> SessionInfo:
    """Returns the cluster of that name, or the only one that this notebook has had.

    A detached one has precedence. Another notebook's has to be named.
    """
    all_of_them = running()
    if not name:
        if not all_of_them:
            raise UsageError(f"expected a cluster to attach to, found none of yours here. {_STAYS}")
        had = [one for one in all_of_them if own_notebook() in one.notebooks]
        free = [one for one in had if not one.holder] or had
        if len(free) == 1:
            return free[0]
        found = free or all_of_them
        whose = (
            f"{len(free)} clusters have been this notebook's"
            if free
            else "no cluster here has been this notebook's"
        )
        lines = [
            f"  %distributed attach {one.name}  {label(range(one.size))} of {one.notebook}"
            for one in found
        ]
        raise UsageError(
            f"expected the name of a cluster, found none, and {whose}. Type one of:\n"
            + "\n".join(lines)
        )
    named = [one for one in all_of_them if one.name.startswith(name)]
    if len(named) != 1:
        raise UsageError(_not_found(name, named))
    return named[0]


def check_version(session: SessionInfo) -> None:
    if session.version != version():
        raise UsageError(
            f"expected ranks of allranks {version()}, found {session.version} in "
            f"{session.name}. Attach from a notebook with that version"
        )


def held(session: SessionInfo) -> str:
    """Returns why a cluster that a notebook holds is not available, and what to type."""
    if session.holder == os.getpid():
        return f"this notebook is already attached to the ranks of {session.name}"
    return (
        f"expected a detached cluster, found {session.name} attached to the notebook of process "
        f"{session.holder}. To watch, try again: %distributed attach"
    )


def _not_found(name: str, named: Sequence[SessionInfo]) -> str:
    if named:
        names = ", ".join(one.name for one in named)
        return (
            f"expected the name of one cluster, found that {name} matches {names}. Type one of them"
        )
    for path in session_folder.session_folders():
        with suppress(OSError):
            uid = path.lstat().st_uid
            if name_of(path).startswith(name) and uid != os.getuid():
                try:
                    user = pwd.getpwuid(uid).pw_name
                except KeyError:
                    user = f"user {uid}"
                return (
                    f"expected a cluster of yours, found that {name} belongs to {user}. "
                    f"To list yours: {_LIST}"
                )
    return (
        f"expected a cluster named {name}, found none: it has ended, or its time ran out. Its "
        f"logs are in {log_folder.state_folder()}. To list those that run: {_LIST}"
    )


def name_of(folder: str | Path) -> str:
    return Path(folder).name.rpartition("-")[2]


def say_listens(folder: str) -> None:
    """Says that other notebooks can connect to this one, which has the ranks."""
    with suppress(OSError):  # they have just ended
        request = {"want": "listens"}
        _asked(os.path.join(folder, NOTEBOOKS_DOOR), request, limits.VISIT_SECONDS).close()


def _visit(
    folder: str, want: str, seconds: float = limits.VISIT_SECONDS, holder: int = 0
) -> socket.socket:
    """Returns a connection to a cluster's host agent that has begun to answer.

    Raises OSError if it has ended, and UsageError if it does not answer.
    """
    path = os.path.join(folder, NOTEBOOKS_DOOR)
    request = {"want": want, "notebook": own_notebook(), "holder": holder}
    for _ in range(_TRIES):
        connection = _asked(path, request, seconds)
        try:
            answers = connection.recv(1, socket.MSG_PEEK)
        except BaseException as error:
            # An answer that comes later must not make this process the holder of the ranks.
            connection.close()
            if not isinstance(error, TimeoutError):
                raise
            raise UsageError(
                f"expected an answer of the process that has the ranks of {name_of(folder)}, found "
                f"none within {seconds:g} s: it or the whole machine stands still. Try again"
            ) from error
        if answers:
            return connection
        # It has ended; or this process stood still, and the request came too late for it.
        connection.close()
    raise ConnectionResetError(f"{path} was closed without an answer")


def _asked(path: str, request: dict[str, Any], seconds: float) -> socket.socket:
    """Returns a connection to a socket that has been sent a request, as a line of JSON."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
        # The reply names the place of ranks, whose answers are unpickled.
        own_files.check_peer(connection, path)
        connection.sendall(json.dumps(request).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


class AttachedHostAgent(HostAgentProcess):
    """The host agent of ranks that another notebook has started, or their caretaker if they are on
    several hosts: then there are also ``taken_hosts``, and sockets to listen for them.

    Raises UsageError if it has ended, another notebook was faster, or its allranks differs.
    """

    def __init__(self, session: SessionInfo) -> None:
        # The process runs already, so the constructor of the base class is not called.
        check_version(session)
        self.pid = session.pid
        #: False after the ranks have been left to another notebook.
        self._holds = True
        gone = f"the ranks of {session.name} have just ended. Type: {_LIST}"
        try:
            self._socket = _visit(session.folder, "attach")
        except OSError as error:
            raise UsageError(gone) from error
        with ExitStack() as undone:
            # Else this process would have the ranks, and could not leave them.
            undone.callback(self.let_go)
            self._input = undone.enter_context(self._socket.makefile("wb"))
            self._lines = undone.enter_context(self._socket.makefile("rb"))
            self._take(session, gone, undone)
            undone.pop_all()

    def _take(self, session: SessionInfo, gone: str, undone: ExitStack) -> None:
        """Reads the answer of the process that has had the ranks."""
        try:
            # A caretaker's sockets come with the first byte.
            first, descriptors, *_ = socket.recv_fds(self._socket, 1, 2)
            for one in descriptors:
                undone.callback(os.close, one)
            told = read_object(first + self._lines.readline())
        except OSError as error:
            raise UsageError(gone) from error
        if told.get("event") != "attached":
            holder = told.get("holder", 0)
            raise UsageError(held(replace(session, holder=holder)) if holder else gone)
        self._socket.settimeout(None)  # from now on it waits for events
        self.config = HostAgentConfig.from_fields(told["config"])
        self.folder = session.folder
        self.taken_hosts: TakenHosts | None = None
        self.listening: ListeningSockets | None = None
        self.lease_seconds = limits.LEASE_SECONDS
        if care := told.get("caretaker"):
            keys = care["key"], care["secret_key"]
            self.listening = ListeningSockets.taken(descriptors, keys)
            self.lease_seconds = care["lease_seconds"]
            self.taken_hosts = TakenHosts(
                CaretakerStandIn(self), told["state"], told["news"], told["silent"]
            )
        self.memo: dict[str, Any] = told["memo"]
        self.stays = float(told["stays"])
        #: Whether other notebooks watch the ranks, or have had them.
        self.shared = bool(told["watchers"])

    def let_go(self) -> None:
        self._holds = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def stop(self) -> None:
        super().stop()
        self._socket.close()

    def _exit_code(self, stopped: bool) -> int | None:
        if not self._holds or self.taken_hosts is not None:
            return None
        # Another process's child: its exit code is unknown, but it sends an event before it stops.
        return 0 if stopped else -signal.SIGKILL


def watch(folder: str, seen: int) -> socket.socket:
    """Returns a connection to the notebook that holds ranks, which sends their messages.

    It listens once `visit_to_watch` has returned. ``seen`` is the last cell that the watcher
    has seen; 0 for none. Raises OSError if the holder has released the ranks, or ended.
    """
    return _ask_holder(folder, {"want": "watch", "seen": seen})


async def next_holder(folder: str, holder: int) -> None:
    """Returns once the process ``holder`` has the ranks no longer, with 0 once a notebook has them;
    also if they have ended.
    """
    path = os.path.join(folder, NOTEBOOKS_DOOR)
    request = {"want": "released", "notebook": own_notebook(), "holder": holder}
    with (
        suppress(OSError),
        await asyncio.to_thread(_asked, path, request, limits.VISIT_SECONDS) as connection,
    ):
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_recv(connection, 1)


async def messages(connection: socket.socket) -> AsyncIterator[tuple[dict[str, Any], list[bytes]]]:
    """Yields the messages of the notebook that holds the ranks, until it closes.

    Each is a head and the frames of a record (see `allranks.features.attach.sharing.pack`). Raises
    OSError if the connection breaks.
    """
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        with suppress(asyncio.IncompleteReadError):
            while True:
                yield await unpack(reader.readexactly)
    finally:
        writer.close()


def borrow(folder: str) -> SessionInfo:
    """Makes the notebook that holds the ranks release them; returns the cluster, which is free
    then.
    """
    found = visit_to_watch(folder)
    if found is not None and found.holder not in (0, os.getpid()):
        _ask(found)
        try:
            found = visit(folder, "released", limits.RELEASES_SECONDS, found.holder)
        except UsageError:  # it has closed the connection, and still has the ranks
            found = visit(folder)
    if found is None:
        raise UsageError(
            f"expected the ranks of {name_of(folder)}, found that they have ended. Run the cell "
            "again, and it starts ranks of its own"
        )
    return found


def _ask(found: SessionInfo) -> None:
    whose = f"the notebook of process {found.holder}"
    try:
        with _ask_holder(found.folder, {"want": "lend"}) as connection:
            line = connection.makefile("rb").readline()
    except TimeoutError:
        why = f"{whose} has not answered: it runs a cell of its own. Wait for its end there"
    except OSError:
        return  # it has ended or released the ranks: ask the host agent
    else:
        why = f"{whose} has them, and {json.loads(line)['refused']}" if b"refused" in line else ""
    if why:
        raise UsageError(
            f"expected idle ranks, found that {why}, and run this cell again; nothing was run"
        )


def _ask_holder(folder: str, request: dict[str, Any]) -> socket.socket:
    """Returns a connection to the holder of the ranks."""
    return _asked(os.path.join(folder, WATCHERS_DOOR), request, limits.ANSWERS_SECONDS)
