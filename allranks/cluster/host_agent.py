"""The notebook's sockets for ranks, and the host agent of this machine, which starts them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO

import psutil

from allranks import python_path
from allranks.cluster import log_folder, session_folder
from allranks.cluster.agents import DeliverEvent, HostAgents
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ports
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.launchers.mpiexec import LASTING, LASTING_SETTINGS, LASTING_SETTINGS_ALONE
from allranks.cluster.launchers.registry import AnyLauncher
from allranks.cluster.sockets import Inbox, ListeningSockets, RankSockets, closing_if_failed
from allranks.errors import StartFailed
from allranks.records import limits
from allranks.records.agent import (
    AgentExit,
    Command,
    Event,
    Notice,
    Stop,
    Stopped,
    read_event,
    to_line,
)
from allranks.records.config import FIRST_COMMANDS, FIRST_EVENTS, HostAgentConfig, lease_seconds


def open_sockets(
    launcher: AnyLauncher,
    size: int,
    gpus: tuple[str, ...],
    preload: tuple[str, ...],
    kept_dirs: tuple[str, ...],
    inbox: Inbox,
    hooks: NotebookHooks,
    settings: Mapping[str, str],
) -> tuple[RankSockets, HostAgentConfig]:
    """Returns the notebook's sockets for ranks, and the host agent's configuration."""
    command: list[str] = []
    place = ""
    can_replace = size > 1 and bool(hooks.replaces_ranks) and not launcher.why_not_replaced()
    environment = {**launcher.environment(), **settings}
    if python_path.NAME in os.environ:  # ranks have all of it, and their host agent has not
        environment.setdefault(python_path.NAME, os.environ[python_path.NAME])
    if isinstance(launcher, MultiHostLauncher):
        # The folder has the same path on every host, whatever their TMPDIR is.
        place = "/tmp"
        if can_replace:
            environment |= LASTING_SETTINGS
        else:
            kept_dirs = ()  # they end with the ranks
    else:
        command = launcher.command(size)
        if can_replace:
            command[1:1] = LASTING
            environment |= LASTING_SETTINGS_ALONE
    try:
        work_dir = os.getcwd()  # the ranks run in the notebook's own folder
    except OSError as error:
        raise StartFailed(
            f"expected a working folder, found that it has been removed: {error}. Type: %cd ~"
        ) from error
    log_dir = log_folder.make_log_folder()
    session_dir = session_folder.name_session_folder(place)
    seconds = lease_seconds()
    if isinstance(launcher, MultiHostLauncher):
        listening = ListeningSockets.open(launcher.address(), ports())
        wire = RankSockets(inbox, hooks, listening, seconds)
        with closing_if_failed(wire):
            wire.listen()
    else:
        # The agent makes the folder, which it removes however this process ends.
        urls = FIRST_COMMANDS.format(session_dir), FIRST_EVENTS.format(session_dir)
        wire = RankSockets(inbox, hooks, urls, seconds)
    config = HostAgentConfig(
        size=size,
        launch=tuple(command),
        environment=environment,
        session_dir=session_dir,
        log_dir=log_dir,
        work_dir=work_dir,
        devices=gpus,
        commands_url=wire.commands_url,
        events_url=wire.events_url,
        preload=preload,
        can_replace=can_replace,
        kept_dirs=kept_dirs,
        rank_variables=launcher.rank_variables,
    )
    return wire, config


_TRACKER = "multiprocessing.resource_tracker"


class HostAgentProcess(HostAgents):
    """A host agent on this machine: a child process whose standard input is its lifeline.

    A thread calls ``deliver`` with each event.
    """

    pid: int
    #: For commands to the agent, and for its events.
    _input: IO[bytes]
    _lines: IO[bytes]

    def __init__(self, config: HostAgentConfig, deliver: DeliverEvent) -> None:
        self.config = config
        self._start("allranks.agent", "host-agent.log", config.environment)
        self._write(config.to_json().encode())
        self.listen(deliver)

    def _start(
        self,
        module: str,
        log: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        path = os.path.join(self.config.log_dir, log)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                # -P: files in the notebook's folder must not shadow the standard library.
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env=python_path.without_current_folder({**os.environ, **environment}),
                # A session of its own: an interrupt goes to the kernel's whole process group.
                start_new_session=True,
                pass_fds=descriptors,
            )
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._lines = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def listen(self, deliver: DeliverEvent) -> None:
        """Delivers the agent's events from now on, in a thread."""
        self._thread = threading.Thread(
            target=self._listen, args=(deliver,), name="allranks-host-agent", daemon=True
        )
        self._thread.start()

    def say(self, command: Command) -> None:
        self._write(to_line(command))

    def _write(self, line: bytes) -> None:
        with suppress(OSError, ValueError):  # the listening thread reports its end
            self._input.write(line + b"\n")
            self._input.flush()

    def let_go(self) -> None:
        with suppress(BrokenPipeError):
            self._input.close()

    def stop(self) -> None:
        self.say(Stop())
        self._thread.join(limits.STOP_SECONDS)  # it ends after the agent
        if self._thread.is_alive():
            _kill([self.pid])  # its children die with it
            self._thread.join(limits.STOP_SECONDS)
        for end in (self._input, self._lines):
            with suppress(OSError):  # unsent commands are dropped: the process has exited
                end.close()

    def _listen(self, deliver: DeliverEvent) -> None:
        stopped = False
        with suppress(OSError, ValueError):
            for line in self._lines:
                event = event_of(line)
                stopped = stopped or isinstance(event, Stopped)
                deliver(event, "")
        code = self._exit_code(stopped)
        if code is None:
            return
        deliver(AgentExit(code), "")
        if code < 0:  # it was killed, and could end nothing
            end_session(self.pid, self.config.session_dir)
            shutil.rmtree(self.config.shared_dir, ignore_errors=True)

    def _exit_code(self, stopped: bool) -> int | None:
        # None if it is still running; ``stopped`` is whether it has reported its end.
        return self._process.wait()


def end_session(leader: int, session_dir: str) -> None:
    """Ends the processes that a killed host agent has left; its ranks have died with it.

    The launcher ends by itself, and removes MPI's shared memory. Processes that cells have started
    may not, for instance multiprocessing's managers. ``leader`` is the id of the agent and of its
    POSIX session. The launcher sets ``session_dir`` in every rank's environment; it identifies
    processes that cells have started in a POSIX session of their own.
    """
    left = _wait_for_end(leader, limits.LAUNCHER_SECONDS)
    # A tracker ends with the last process that it serves, and frees the shared memory of that.
    trackers = [pid for pid in left if _has(pid, psutil.Process.cmdline, _TRACKER)]
    _kill(pid for pid in left if pid not in trackers)
    _kill(_wait_for_end(leader, limits.TRACKER_SECONDS) if trackers else ())
    _kill(pid for pid in psutil.pids() if _has(pid, lambda it: it.environ().values(), session_dir))


def _wait_for_end(leader: int, seconds: float) -> list[int]:
    """Waits for the processes of a POSIX session; returns those that are left."""
    there = []
    for pid in _processes_of(leader):
        with suppress(psutil.NoSuchProcess):
            there.append(psutil.Process(pid))
    psutil.wait_procs(there, seconds)
    return _processes_of(leader)


def _processes_of(leader: int) -> list[int]:
    return [pid for pid in psutil.pids() if _session_of(pid) == leader]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has(pid: int, words: Callable[[psutil.Process], Iterable[str]], text: str) -> bool:
    try:
        return any(text in word for word in words(psutil.Process(pid)))
    except (psutil.Error, OSError):
        return False  # the process has ended, or is another user's


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1  # the process has ended


def event_of(line: bytes) -> Event:
    """Returns the event of a line; one that is unknown becomes a notice to the user."""
    try:
        return read_event(line)
    except ValueError as error:
        return Notice(str(error))
