"""Starts the ranks of one host, watches them, and ends them.

The notebook's kernel starts one host agent per cluster, in a session of its own, and holds the
other end of its standard input. The agent starts the launcher, imports once what every rank needs,
forks one process for each rank that the launcher asks for, then the controller of clients, if a
feature has one. It is the parent of these processes, so it can report exactly how each of them
ended. When its standard input closes (the kernel stopped, was restarted, or was killed with -9), it
ends the whole cluster, unless a feature keeps the ranks for another notebook.

Standard output carries one event a line, standard input one command a line
(`allranks.records.agent`).

If ranks are on several hosts, each host has an agent. The first host's agent runs the launcher;
the others run the command that the launcher would run there through ssh (see
``allranks.engine.host.stubs``).
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import json
import mmap
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import launched, own_files, port_filter
from allranks.engine import libraries, processes
from allranks.engine.host import stubs
from allranks.engine.host.agent_state import (
    WHO,
    AgentState,
    AwaitNotebook,
    ControllerComplete,
    ControllerEnded,
    ControllerPlanned,
    EndStub,
    Fork,
    ForkController,
    Forked,
    KeepStub,
    Kill,
    LauncherEnded,
    LeaveStub,
    NotebookCame,
    NotebookLeft,
    NoteDeath,
    NoteFiles,
    OpenDoor,
    OpenGate,
    ProcessEnded,
    StartLauncher,
    StubCame,
    StubLeft,
    Tell,
    TellController,
    Wake,
)
from allranks.engine.host.agent_state import Command as AnyCommand
from allranks.engine.host.agent_state import Event as AnyEvent
from allranks.engine.host.events import NotebookSaid, Terminated
from allranks.engine.host.features import ClientController, HostFeature
from allranks.engine.host.remote_shells import RemoteShells
from allranks.hooks import Hooks
from allranks.records import limits
from allranks.records.agent import (
    Again,
    Event,
    FolderMade,
    LauncherText,
    Reach,
    Stopped,
    read_command,
    to_line,
)
from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME, EVERY_GPU, HostAgentConfig

if TYPE_CHECKING:
    from allranks.engine.features import RankFeature

_TICK_SECONDS = 0.5
_MPI_NBYTES = 16 << 20
#: From a rank's reply until it notes that it is idle.
_REPLY_SECONDS = 0.1
_NO_MORE: Mapping[str, str] = MappingProxyType({})

Load = Callable[[str], list[Any]]


class Stub(NamedTuple):
    """A process of the launcher that gives its place away: its connection, the descriptors that it
    has sent and the numbers that these have there, and its environment.
    """

    place: socket.socket
    received: Sequence[int]
    wanted: Sequence[int]
    environment: dict[str, str]


class HostAgent:
    """Brings up, watches and ends the processes of one cluster on this host.

    ``load`` returns the classes of the features for one side, ``host`` or ``rank``. ``heard`` is
    input that came after the configuration. ``features`` are those of this process, if it begins
    again. It is their `HostContext`.
    """

    def __init__(
        self,
        config: HostAgentConfig,
        load: Load,
        heard: bytes = b"",
        features: Hooks[HostFeature] | None = None,
    ) -> None:
        self.config = config
        self._load = load
        # The agent has no cell to fail: failures go to its log.
        self._report = partial(print, file=sys.stderr, flush=True)
        self.features = features or Hooks[HostFeature]((), self._report)
        #: The process that has started this one, until it has ended.
        self._starter = os.getppid()
        #: For each rank, the number of the cell that it runs. The ranks write it.
        self.running = memoryview(mmap.mmap(-1, 4 * config.size)).cast("i")
        self._rank_features: list[type[RankFeature]] = []
        self.selector = selectors.DefaultSelector()
        self.state = AgentState(config)
        self._terminated = False
        #: The connections to the launcher's processes, by the processes in their places.
        self.places: dict[int, socket.socket] = {}
        #: The one that has just come.
        self._stub: Stub | None = None
        #: Those that are kept to the end.
        self._kept: list[socket.socket] = []
        #: The pipes that wake spare processes, also those that have become ranks.
        self._wakers: dict[int, int] = {}
        self.exits = processes.ExitReports()
        self.segments: set[str] = set()
        self.began = time.time()
        #: Of pipes: this process may begin again many times.
        self._descriptors = set[int]()
        self.gate, self._open_gate = self._pipe()
        #: The end of this file asks idle ranks to end.
        self.last, self._ask_to_end = self._pipe()
        #: Its process, and what a feature has planned for it.
        self.controller = 0
        self._planned: ClientController | None = None
        #: The controller reads there which engines have ended.
        self._deaths = -1
        self.launcher: subprocess.Popen[bytes] | None = None
        self.shells: RemoteShells | None = None
        self._heard = heard
        #: Readable when a child has ended.
        self._wake = -1
        #: Keeps the folder of MPI's files from others who remove what is left.
        self._shared = -1
        processes.adopt_orphans()

    def _pipe(self) -> tuple[int, int]:
        made = os.pipe()
        self._descriptors.update(made)
        return made

    def _close(self, descriptor: int) -> None:
        self._descriptors.remove(descriptor)
        os.close(descriptor)

    def run(self) -> None:
        """Starts the ranks and watches them, until the kernel is gone or sends stop."""
        # Before the first file is made, which a process that SIGTERM ends would leave.
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_terminated", True))
        # First: its name follows from those of the others, which all accounts see.
        self._make_shared_dir()
        if not self.config.several_hosts:  # else this host's relay has made it
            os.mkdir(self.config.session_dir, 0o700)  # fails if it exists: it would not be ours
            self.tell(FolderMade())
        for folder in self.config.kept_dirs:
            # An earlier agent may have made it. If it cannot be made, or is another user's, the
            # ranks do not use it.
            with suppress(OSError):
                own_files.make_folder(folder)
        address = os.path.join(self.config.session_dir, "host-agent")
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(address)
        self.door.listen(self.config.ranks_here + self.config.spares + 8)
        try:
            if self.config.head:
                self._launch(address)
            # Before the first import that loads numpy, which reads the number of threads once.
            libraries.share_cores(self.config.ranks_here)
            libraries.ignore_warnings()
            # The launcher runs by now: it starts meanwhile, as loading takes long.
            if not self.features.features:
                self.features = Hooks(self._load("host"), self._report)
            self.features.call(HostFeature.started, self)
            if self.config.devices == (EVERY_GPU,):
                # Here, because the driver may take longer than a relay may be silent.
                self.config = dataclasses.replace(self.config, devices=libraries.visible_gpus())
            from allranks.engine import rank  # noqa: F401

            libraries.preload(self.config, self.tell)
            self._rank_features = self._load("rank")
            gc.freeze()  # memory of imported modules stays shared between all children
            if self.config.head:
                self._plan_controller()
            self._watch()
        finally:
            self._end()

    def _make_shared_dir(self) -> None:
        place = self.config.shared_dir
        try:
            own_files.make_folder(place)
            self._shared = own_files.open_folder(place)
            # A notebook that starts removes what no process holds.
            fcntl.flock(self._shared, fcntl.LOCK_SH)
        except OSError:  # there is no shared memory, or no room in it
            # On several hosts the first one names the folder of MPI's files for all: in another one
            # they would not be where others wait.
            if self.config.several_hosts and os.path.lexists(place):
                raise

    def _launch(self, address: str) -> None:
        # The launcher starts a stub for each rank, which connects to the agent.
        command = [*self.config.launch, *stubs.command("rank", address)]
        if self.config.several_hosts:
            self.shells = RemoteShells(self.config.session_dir)
        self._start_launcher(command, self.shells.environment if self.shells else _NO_MORE)

    def _start_launcher(self, command: Sequence[str], more: Mapping[str, str] = _NO_MORE) -> None:
        environment = {**os.environ, **self.config.environment, **more}
        environment["TMPDIR"] = self.config.session_dir
        # Open MPI makes a file for each rank. A signal ends the rank if it does not fit.
        has_room = processes.shared_memory_left() >= self.config.ranks_here * _MPI_NBYTES
        place = (
            self.config.shared_dir if has_room and self._shared >= 0 else self.config.session_dir
        )
        names = launched.SHARED_FILES, launched.SHARED_FILES_OF_4, *launched.WINDOW_FILES
        for name in names:
            # In /dev/shm itself, Open MPI would open a file that another user has made.
            environment.setdefault(name, place)
        self.launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.launcher.stdout is not None
        os.set_blocking(self.launcher.stdout.fileno(), False)

    def _asked(self) -> None:
        # The notebook can reach the other host.
        assert self.shells is not None
        asked = self.shells.asked()
        if asked is not None:
            self.tell(Reach(**asked))

    def _plan_controller(self) -> None:
        found = self.features.call(HostFeature.controller, self.config)
        planned = self._planned = next(filter(None, found), None)
        client, engine = (planned.client, planned.engine) if planned is not None else ({}, {})
        # The ranks connect to the ports by themselves, whenever the controller starts.
        self._feed(ControllerPlanned(client, {"key": os.urandom(32).hex()} | engine))

    def _fork_controller(self) -> None:
        planned = self._planned
        if planned is None:
            return
        complete, told = self._pipe()
        deaths, self._deaths = self._pipe()

        def live() -> None:
            planned.run(lambda: os.write(told, b"all"), deaths)

        log = os.path.join(self.config.log_dir, "controller.log")
        keep = [told, deaths]
        self.controller = processes.fork(live, dict(os.environ), log, self.config.work_dir, keep)
        self._close(told)
        self._close(deaths)
        os.set_blocking(self._deaths, False)

        def tell() -> None:
            if os.read(complete, 8):
                self._feed(ControllerComplete())
            planned.free_ports()
            self.selector.unregister(complete)
            self._close(complete)

        self.selector.register(complete, selectors.EVENT_READ, tell)

    def _watch(self) -> None:
        wake, wake_writer = self._wake, _ = self._pipe()
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self.selector.register(0, selectors.EVENT_READ, self._hear)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if self.config.head:
            self._open_door()
        if self.shells is not None:
            self.selector.register(self.shells.listening, selectors.EVENT_READ, self._asked)
        # Commands may have come with the configuration.
        self._take(b"")
        while not self.state.stopping:
            for key, _ in self.selector.select(_TICK_SECONDS):
                key.data()
            self._reap()
            self.exits.look()
            if self._terminated:
                self._feed(Terminated())
            # The children of the notebook's process may still have its pipes open.
            if self._starter and os.getppid() != self._starter:
                self.notebook_left()
            self.features.call(HostFeature.poll)

    def _feed(self, event: AnyEvent) -> None:
        for command in self.state.apply(event):
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case Tell(event):
                self.tell(event)
            case AwaitNotebook():
                self._await_notebook()
            case StartLauncher(line):
                self._start_launcher(["/bin/sh", "-c", line])
            case OpenDoor():
                self._open_door()
            case ForkController():
                self._fork_controller()
            case TellController(rank, pid):
                with suppress(OSError):  # it has ended, or not begun
                    os.write(self._deaths, f"{rank} {pid}\n".encode())
            case Fork():
                self._fork(command)
            case OpenGate():
                # The end of file opens the gate for all ranks at once.
                self._close(self._open_gate)
            case Wake(pid, rank, dead, variables):
                asked = json.dumps({"rank": rank, "dead": dead, "variables": variables})
                with suppress(BrokenPipeError):  # it has died, which is reported in a moment
                    os.write(self._wakers[pid], asked.encode() + b"\n")
            case NoteFiles(sweeps):
                self._note_files(sweeps)
            case Kill(pid):
                processes.kill(pid)
            case NoteDeath(rank, code):
                self.running[rank] = 0
                self.features.call(HostFeature.rank_died, rank, code)
            case LeaveStub(pid):
                self._take_place(pid).close()
            case EndStub(pid, code):
                with self._take_place(pid) as place, suppress(OSError):
                    place.sendall(code.to_bytes(8, "little", signed=True))
            case KeepStub(pid):
                self._kept.append(self._take_place(pid))
            case _:
                raise ValueError(f"expected a command of the state, found {command!r:.200}")

    def _ranks_stay(self) -> bool:
        return any(self.features.call(HostFeature.ranks_stay))

    def notebook_left(self) -> None:
        self._feed(NotebookLeft(self._ranks_stay()))

    def end(self) -> None:
        self._feed(NotebookLeft(stays=False))

    def _await_notebook(self) -> None:
        self.selector.unregister(0)
        self._starter, self._heard = 0, b""
        folder = self.config.session_dir
        self.config = dataclasses.replace(
            self.config,
            commands_url=COMMANDS_AT_HOME.format(folder),
            events_url=EVENTS_AT_HOME.format(folder),
        )
        self.features.call(HostFeature.notebook_left)

    def notebook_came(self, greeting: Mapping[str, Any]) -> None:
        self.selector.register(0, selectors.EVENT_READ, self._hear)
        self._write(json.dumps(greeting).encode())
        self._feed(NotebookCame())

    def call_when_readable(self, source: socket.socket, call: Callable[[], object]) -> None:
        self.selector.register(source, selectors.EVENT_READ, call)

    def _open_door(self) -> None:
        self.selector.register(self.door, selectors.EVENT_READ, self._admit)
        if self.launcher is not None and self.launcher.stdout is not None:
            self.selector.register(self.launcher.stdout, selectors.EVENT_READ, self._relay)

    def _hear(self) -> None:
        try:
            said = os.read(0, 65536)
        except ConnectionError:
            said = b""
        self._take(said)
        if not said:
            self.notebook_left()

    def _take(self, said: bytes) -> None:
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            command = read_command(line)
            if not any(self.features.call(HostFeature.command_received, command)):
                self._feed(NotebookSaid(command))

    def _note_files(self, sweeps: bool) -> None:
        """Notes the files of all processes in shared memory.

        Then it removes those of dead ranks that no rank maps any longer.
        """
        # The list of a rank's mappings ends with the rank: read it while all are alive.
        for pid in (*self.state.ranks, *self.state.spares):
            # Not older ones: a cell may map a file of the user's.
            self.segments |= processes.shared_segments(pid, self.began)
        if sweeps:
            used = set[str]().union(*map(processes.shared_segments, self.state.ranks))
            for path in self.segments - used:
                processes.unlink(path)
            self.segments &= used

    def _relay(self) -> None:
        assert self.launcher is not None
        assert self.launcher.stdout is not None
        text = os.read(self.launcher.stdout.fileno(), 65536)
        if text:
            self.tell(LauncherText(text.decode("utf-8", "replace")))
        else:
            self.selector.unregister(self.launcher.stdout)

    def _admit(self) -> None:
        place, _ = self.door.accept()
        head, received, _, _ = socket.recv_fds(place, 8, 8)
        text = _rest(place, head)
        if text is None:
            # A liveness probe, or a stub that died before sending its request.
            place.close()
            for descriptor in received:
                os.close(descriptor)
            return
        if not self.state.admitted and self.launcher and not self.config.several_hosts:
            # The launcher needs the network no longer: its ranks are on this host.
            port_filter.restrict_ports_of(self.launcher.pid)
        told = json.loads(text)
        environment: dict[str, str] = told["environment"]
        # The launcher has the session's folder there; ranks have the setting of the user.
        environment["TMPDIR"] = os.environ.get("TMPDIR", "")
        if not environment["TMPDIR"]:
            del environment["TMPDIR"]
        self._stub = Stub(place, received, told["descriptors"], environment)
        number = launched.rank(environment, self.config.rank_variables)
        who = {name: value for name, value in environment.items() if name.startswith(WHO)}
        self._feed(StubCame(number, told["replaced"], who))

    def _fork(self, fork: Fork) -> None:
        from allranks.engine.rank import Rank, log_path

        assert self._stub is not None
        place, received, wanted, environment = self._stub
        is_spare = fork.rank < 0
        wake, waker = self._pipe() if is_spare else (-1, -1)
        if is_spare:
            log = os.path.join(self.config.log_dir, f"spare-{fork.number}.log")
        else:
            log = log_path(self.config, fork.rank)
        environment |= fork.variables

        def live() -> None:
            # The agent's sockets and files are closed here, and their numbers may be used again.
            gc.freeze()
            libraries.seed_anew()
            # While MPI starts, ranks poll for the others. More of them than cores would leave no
            # time to fork the rest, so all wait here until the last one is forked.
            os.read(self.gate, 1)
            os.close(self.gate)
            for have, number in zip(received, wanted, strict=False):
                os.dup2(have, number)
                os.set_inheritable(number, True)
            rank, replaced, spare = fork.rank, list(fork.replaced), None
            if is_spare:
                found = (kind.spare(self.config, wake) for kind in self._rank_features)
                spare = next(one for one in found if one is not None)
                rank, replaced, variables = spare.wait()
                os.environ.update(variables)
                processes.write_to(log_path(self.config, rank))
            Rank(
                self.config,
                self.state.engine,
                rank,
                self._rank_features,
                replaced,
                self.running,
                self._ranks_stay(),
                self.last,
                spare,
            ).run()

        keep = [self.gate, self.last, *received, *wanted, *([wake] if is_spare else [])]
        pid = processes.fork(live, environment, log, self.config.work_dir, keep)
        if is_spare:
            self._close(wake)
            self._wakers[pid] = waker
        for descriptor in received:
            os.close(descriptor)
        self.places[pid] = place
        self.selector.register(place, selectors.EVENT_READ, lambda: self._feed(StubLeft(pid)))
        self._feed(Forked(pid, fork))

    def _take_place(self, pid: int) -> socket.socket:
        place = self.places.pop(pid)
        self.selector.unregister(place)
        return place

    def _reap(self) -> None:
        while (ended := self.exits.next()) is not None:
            pid, code = ended.pid, ended.code
            if (waker := self._wakers.pop(pid, None)) is not None:
                self._close(waker)
            if self.launcher is not None and pid == self.launcher.pid:
                self.launcher.returncode = code
                with suppress(BlockingIOError, KeyError, ValueError):  # nothing is left to read
                    self._relay()
                self._feed(LauncherEnded(code))
            elif pid == self.controller:
                self._feed(ControllerEnded(code))
            else:
                self._feed(ProcessEnded(pid, code, ended.memory))

    def tell(self, event: Event) -> None:
        self._write(to_line(event))

    def _write(self, line: bytes) -> None:
        """Sends a line to the kernel, which may be gone."""
        try:
            processes.write_all(1, line + b"\n")
        except OSError:
            self.notebook_left()

    def _end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begins_again, ranks = self.state.begins_again, self.state.ranks
        self._note_new_files()
        self._close(self._ask_to_end)
        if not begins_again:  # then they have saved their variables, and their hosts wait
            self._wait_for_idle_ranks()
        started = [*ranks, *self.state.spares]
        for pid in started:  # they may make files at any moment, as MPI does in its start
            processes.kill(pid, signal.SIGSTOP)
        self._note_new_files()
        for pid in [*started, self.controller]:
            processes.kill(pid)
        for place in (*self.places.values(), *self._kept):
            place.close()
        if self.shells is not None:
            self.shells.close()
        if self.launcher is not None and self.launcher.returncode is None:
            processes.kill(self.launcher.pid, signal.SIGTERM)
        processes.end_descendants(limits.TERM_SECONDS, limits.NESTED_SECONDS)
        self.features.call(HostFeature.stopping)
        for path in self.segments:
            processes.unlink(path)
        for folder in self.config.kept_dirs:
            # On several hosts the relay removes it, and may start ranks again before that.
            if self.state.abandoned:
                shutil.rmtree(folder, ignore_errors=True)
            elif not begins_again:  # else another user could take its name meanwhile
                with suppress(OSError):  # not if it has variables for the next ranks
                    os.rmdir(folder)
        shutil.rmtree(self.config.session_dir, ignore_errors=True)
        if not begins_again:  # as above
            shutil.rmtree(self.config.shared_dir, ignore_errors=True)
        if self._shared >= 0:
            os.close(self._shared)
        if self.launcher is not None and self.launcher.stdout is not None:
            self.launcher.stdout.close()
        self.door.close()
        self.selector.close()
        signal.set_wakeup_fd(-1)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.tell(Again() if begins_again else Stopped())

    def _note_new_files(self) -> None:
        """Notes files in shared memory of processes here that were made after the ranks came up."""
        if new := processes.segments_since(self.began) - self.segments:
            # Finding the owners takes long, so only if there are any.
            for pid in processes.descendants():
                self.segments |= new & processes.shared_segments(pid)

    def _wait_for_idle_ranks(self) -> None:
        """Ends when the ranks that run no cell have ended by themselves, with exit functions."""
        running, began = self.running, time.monotonic()
        while alive := [
            rank for pid, rank in self.state.ranks.items() if not processes.has_ended(pid)
        ]:
            # The others run a cell, or have just sent its reply.
            in_cells = all(running[rank] for rank in alive)
            limit = _REPLY_SECONDS if in_cells else limits.RANKS_EXIT_SECONDS
            left = began + limit - time.monotonic()
            if left <= 0 or not select.select([self._wake], [], [], left)[0]:
                return
            os.read(self._wake, 4096)


def _rest(place: socket.socket, head: bytes) -> bytes | None:
    """Returns the text after a head of eight bytes with its length; None if it is cut short."""
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    with place.makefile("rb") as request:
        text = request.read(length)
    return text if len(text) == length else None


def main(load: Load) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    features, begins = None, True
    while begins and (found := processes.first_line(0)) is not None:
        line, rest = found
        agent = HostAgent(HostAgentConfig.from_json(line.decode()), load, rest, features)
        agent.run()
        features = agent.features
        # In the same process, because imports take longer than all else.
        begins = agent.state.begins_again
