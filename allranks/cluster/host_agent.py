"""The notebook's connection to the host agents: the processes that start the ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

import psutil

from allranks import python_path
from allranks.cluster import log_folder, session_folder
from allranks.cluster.agents import (
    DeliverEvent,
    HostAgents,
    HostsContext,
    NotebookStandIn,
    StartStandIn,
    TakenHosts,
)
from allranks.cluster.failures import Ended, ending
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ports
from allranks.cluster.launchers.job import Host
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.launchers.mpiexec import LASTING, LASTING_SETTINGS, LASTING_SETTINGS_ALONE
from allranks.cluster.launchers.registry import AnyLauncher
from allranks.cluster.sockets import Inbox, ListeningSockets, RankSockets, closing_if_failed
from allranks.errors import StartFailed, UsageError
from allranks.records import limits
from allranks.records.agent import (
    Admitted,
    AgentExit,
    Clients,
    Command,
    Controller,
    Event,
    Exit,
    HostAgain,
    HostBeat,
    HostConnected,
    HostDown,
    HostEnds,
    HostEvent,
    HostLate,
    HostLeft,
    HostListens,
    HostRefused,
    HostSilent,
    HostUp,
    Join,
    LauncherExit,
    Notice,
    RanksUp,
    Reach,
    Registered,
    Replaces,
    ReportDeath,
    SeatSpares,
    Serve,
    SpareExit,
    Stop,
    Stopped,
    read_event,
    to_line,
)
from allranks.records.config import (
    FIRST_COMMANDS,
    FIRST_EVENTS,
    SPARES,
    HostAgentConfig,
    Invitation,
    lease_seconds,
    spares_on_each,
    tcp_url,
    version,
)
from allranks.records.ranks import copy_holders, label


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


#: A shell's exit code for a command that a signal has ended: this number, and the signal's.
_SIGNALLED = 128
#: Beats of a host until its earlier news has surely come: the first may have been on the way.
_BEATS = 2


class HeldEnds:
    """The first ends of ranks on several hosts, until their cause is known.

    If a host is cut off, or a rank there is killed, MPI ends ranks of other hosts with an exit
    code, and this may be the first news. So ends wait for a rank that a signal has ended, for the
    loss of a host, or until each other host has sent heartbeats, with its own news before them.

    It is called with the lock of its `MultiHostAgents`.
    """

    def __init__(self, deliver: DeliverEvent, can_replace: bool) -> None:
        self._deliver = deliver
        #: Then MPI ends no rank because another one has died.
        self._can_replace = can_replace
        self._ends: list[tuple[Ended, str]] = []
        #: How many beats of each host are still to come.
        self._beats: dict[str, int] = {}
        self._known = False

    def take(self, end: Exit | LauncherExit, host: str, others: Iterable[str]) -> None:
        """Takes an end, which comes from none of the ``others``."""
        by_itself = isinstance(end, Exit) and not end.by_launcher
        if self._known or (self._can_replace and by_itself):
            self._deliver(end, host)
        elif by_itself and end.code < 0:
            self.release((end, host))
        else:
            if not self._ends:
                self._beats = dict.fromkeys(others, _BEATS)
            self._ends.append((end, host))
            if not self._beats:
                self.release()

    def beat(self, host: str) -> None:
        if host in self._beats:
            self._beats[host] -= 1
            if max(self._beats.values()) <= 0:
                self.release()

    def wait_for(self, host: str) -> bool:
        return self._beats.get(host, 0) > 0

    def release(self, *causes: tuple[Ended, str]) -> None:
        """Delivers the causes first, then the ends."""
        ends, self._ends, self._beats, self._known = self._ends, [], {}, not self._can_replace
        for end, host in (*causes, *ends):
            self._deliver(end, host)


_SHOWN_PAIRS = 4


class NetworkTest:
    """Whether each host can connect to each other one, as the processes of MPI do.

    Each host listens on a port, and then all try to connect. If some cannot, all try once more: a
    host may have stood still. ``over`` is whether there is a result.
    Answers carry the name of their round: late ones to an earlier one, maybe of the notebook
    before, do not count.
    """

    def __init__(self, addresses: Mapping[str, str], command: Callable[[str, str, str], None]):
        self.over = False
        self._addresses = dict(addresses)
        self._command = command
        self._name = ""
        self._ports: dict[str, int] = {}
        self._found: dict[str, dict[str, str]] = {}
        #: What each host could not connect to in the first round; None before its end.
        self._failed: dict[str, dict[str, str]] | None = None

    def begin(self) -> None:
        self._name, self._ports, self._found = secrets.token_hex(8), {}, {}
        for host in self._addresses:
            self._command(host, "listen", self._name)

    def take(self, event: HostListens | HostConnected, host: str) -> None:
        """Takes an event of a host: that it listens, and then to which others it has connected."""
        if event.test != self._name:
            return
        if isinstance(event, HostConnected):
            self._found[host] = event.problems
            if len(self._found) == len(self._addresses):
                self._end_round()
            return
        self._ports[host] = event.port
        if len(self._ports) == len(self._addresses):
            for source in self._addresses:
                targets = [
                    (host, self._addresses[host], port)
                    for host, port in self._ports.items()
                    if host != source
                ]
                self._command(source, "connect", json.dumps([self._name, targets]))

    def _end_round(self) -> None:
        if self._failed is None and any(self._found.values()):
            self._failed = self._found
            self.begin()
        else:
            self.over = True

    def problems(self) -> list[str]:
        """Returns a sentence for each pair of hosts without a connection, once it is over."""
        return [
            f"{source} cannot connect to {host} ({self._addresses[host]}, port "
            f"{self._ports[host]}): {why}"
            for source, found in (self._failed or {}).items()
            for host, why in (self._found[source].items() if self.over else ())
            if host in found
        ]


#: Events that change what the next notebook has to know.
_STATE = (
    Admitted,
    Controller,
    Exit,
    HostDown,
    HostRefused,
    HostSilent,
    Registered,
    Replaces,
    SpareExit,
)


class MultiHostAgents(HostAgents):
    """The host agents of several hosts, started by one job of the launcher.

    The first host's agent runs mpiexec; through the agent it asks the notebook to run commands on
    the other hosts. So no host has to be able to log in to another.
    """

    def __init__(self, context: HostsContext) -> None:
        self._launcher, self._config = context.launcher, context.config
        self.wire, self.deliver = context.wire, context.deliver
        self._hosts: Sequence[Host] = ()
        self._expected: Sequence[Host] = ()
        self._host_of: dict[int, str] = {}
        #: The hosts that have connected, and their addresses.
        self.addresses: dict[str, str] = {}
        self._ended_hosts: set[str] = set()
        #: Why hosts are lost.
        self._reported: dict[str, str] = {}
        #: For what is known of the hosts and their ranks: events come in the wire's thread, ends of
        #: the job's commands in others, and the main thread chooses spare processes. The state for
        #: the next notebook is saved with it, so that no earlier one is saved last.
        # No condition, whose methods are Python: an interrupt in them would leave it locked.
        self._hosts_lock = threading.RLock()
        self._all_ended: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._held = HeldEnds(self.deliver, self._config.can_replace)
        self._spares = 0
        self._seats: list[int] = []
        #: The spare processes of each host, by their numbers among the launcher's processes.
        self._spares_on: dict[str, list[int]] = {}
        #: The spare processes that have become ranks, and their hosts.
        self._seated: dict[int, tuple[str, int]] = {}
        #: How often spare processes were chosen, and the last command about it for each host.
        #: Another notebook may have ended before it had sent it to all.
        self._choices = 0
        self._seat_lines: dict[str, str] = {}
        self._may_miss_seats = False
        #: Hosts that start their ranks again, and have not ended the old ones.
        self._moving: set[str] = set()
        #: The name of the last relocation. A host's answer to an earlier one may come after it.
        self._relocation = ""
        self.record = {}
        self._began = 0.0
        self._test: NetworkTest | None = None
        #: For the next notebook: the ranks that have died, and where its clients connect.
        self._dead: dict[int, dict[str, Any]] = {}
        #: The processes that take the places of dead ranks. Until these have joined, the ends of
        #: the former ones stay in `_dead`.
        self._replaced: dict[int, int] = {}
        self._told: dict[str, Event] = {}
        self.stand_in: NotebookStandIn | None = None
        wire = self.wire
        wire.deliver_host = self._handle
        if context.taken is not None:
            self._take_over(context.taken)
            return
        # The job is started last: its hosts may connect at once.
        invitation = Invitation(
            wire.commands_url, wire.events_url, wire.key, lease_seconds=wire.lease_seconds
        )
        self.job = self._launcher.run(invitation, self._config.log_dir, self._host_ended)

    def begin(self) -> str:
        if self._hosts:
            return ""
        hosts = self._expected = self.job.hosts()
        with self._hosts_lock:
            missing = [host.name for host in hosts if host.name not in self.addresses]
        if not hosts or missing:
            return self.job.waits()
        self._hosts = hosts
        self._began = time.monotonic()
        self.job.all_came()
        ranks = iter(range(self._config.size))
        self._place({host.name: [next(ranks) for _ in range(host.ranks)] for host in hosts})
        # The first one last: commands for the others follow from its events, and a relay without a
        # host agent drops them.
        for host in reversed(self._hosts):
            self.wire.command(host.name, "config", self._config_of(host).to_json())
        return ""

    def _place(self, places: Mapping[str, Sequence[int]]) -> None:
        """Decides which ranks each host has; those without any are left out."""
        self._hosts = [
            dataclasses.replace(host, ranks=len(places[host.name]))
            for host in self._hosts
            if places.get(host.name)
        ]
        # After the loss of a host as many as before: more would make the new start slower.
        if self._config.can_replace and not self._spares:
            self._spares = spares_on_each([host.ranks for host in self._hosts])
        self._host_of = {rank: host for host, there in places.items() for rank in there}
        self.wire.host_of = self._host_of
        self._seats, self._spares_on, self._seated = [], {}, {}
        # Hosts are filled one after the other, as mpiexec does with --map-by slot.
        for host in self._hosts:
            there = places[host.name]
            first = len(self._seats) + len(there)
            self._spares_on[host.name] = list(range(first, first + self._spares))
            self._seats += [*there, *[-1] * self._spares]

    def ranks_of(self, host: str) -> list[int]:
        """Returns the ranks of a host."""
        return sorted(rank for rank, name in self._host_of.items() if name == host)

    def hosts(self) -> dict[str, list[int]]:
        return {host.name: self.ranks_of(host.name) for host in self._hosts}

    def why_ended(self) -> str:
        return self.job.why_ended()

    def relocate(
        self, decided: Callable[[dict[str, list[int]]], object] = lambda hosts: None
    ) -> bool:
        old = [self._host_of[rank] for rank in range(self._config.size)]
        holders = copy_holders(tuple(old))
        places: dict[str, list[int]] = {
            host.name: [] for host in self._hosts if host.name not in self._reported
        }
        if not places:
            return False
        for rank, host in enumerate(old):
            if host not in places:
                host = old[holders[rank]]
            if host not in places:  # lost too
                host = min(places, key=lambda name: len(places[name]))
            places[host].append(rank)
        with self._hosts_lock:
            # Their relays may still run: nothing of them is to be taken for news of the new ranks.
            for host in self._reported.keys() - self._ended_hosts:
                self.wire.forget(host)
                self._ended_hosts.add(host)
        self._place(places)
        # First: a host's answer to the last relocation may come in this moment.
        self._relocation = secrets.token_hex(8)
        self._moving, self.starts_again = set(places), True
        self._dead, self._replaced, self._told = {}, {}, {}
        self._save()
        self._held = HeldEnds(self.deliver, self._config.can_replace)
        self._test, self._began = None, time.monotonic()
        decided(self.hosts())
        for each in reversed(self._hosts):  # as in `begin`
            self.wire.command(each.name, "again", self._config_of(each).to_json())
        return True

    def outlive_notebook(self, start: StartStandIn, command: Command) -> bool:
        if self.stand_in is not None:
            return False
        if not self.job.outlives():
            raise UsageError(
                "expected ranks on this machine, or on hosts that ssh or another command reaches, "
                f"found --on {self._launcher.typed}: these ranks end with the notebook. "
                "Keep it open, or keep their values: %distributed pull NAME"
            )
        self.stand_in = start(self.wire, self.deliver)
        self._save()
        for host in self._hosts:
            self.wire.command(host.name, "stay", to_line(command).decode())
        return True

    def lose_stand_in(self) -> None:
        with self._hosts_lock:
            self.stand_in = None

    def say_stay(self, command: Command) -> None:
        if self.stand_in is not None:
            self.stand_in.say(command)

    def note(self, record: dict[str, Any]) -> None:
        self.record = record
        self._save()

    def let_go(self) -> None:
        self._stopping = True
        assert self.stand_in is not None
        self.stand_in.release()

    def _save(self) -> None:
        with self._hosts_lock:
            if self.stand_in is None:
                return
            state = {
                "hosts": [dataclasses.astuple(host) for host in self._hosts],
                "host_of": list(self._host_of.items()),
                "addresses": self.addresses,
                "ended": list(self._ended_hosts),
                "lost": self._reported,
                "starts_again": self.starts_again,
                "record": self.record,
                "spares": self._spares,
                "seats": self._seats,
                "spares_on": self._spares_on,
                "seated": list(self._seated.items()),
                "choices": self._choices,
                "seat_lines": self._seat_lines,
                "dead": list(self._dead.values()),
                "replaced": list(self._replaced.items()),
                "told": [to_line(event).decode() for event in self._told.values()],
                "job": self.job.outlives(),
            }
            self.stand_in.save(state)

    def _take_over(self, taken: TakenHosts) -> None:
        """Continues with what the last notebook knew, and the events since then."""
        state = taken.state
        self._hosts = self._expected = [Host(*each) for each in state["hosts"]]
        self._host_of = dict(state["host_of"])
        self.addresses, self._ended_hosts = state["addresses"], set(state["ended"])
        self._spares, self._seats = state["spares"], state["seats"]
        self._spares_on = state["spares_on"]
        self._seated = {rank: (host, place) for rank, (host, place) in state["seated"]}
        self._choices, self._seat_lines = state["choices"], state["seat_lines"]
        self._may_miss_seats = True
        self.job = self._launcher.take_over(self._hosts, state["job"])
        self.wire.host_of = self._host_of
        self.starts_again, self.record = state["starts_again"], state["record"]
        self._moving = set(self.addresses) if self.starts_again else set()
        self._reported = state["lost"]
        for host, why in self._reported.items():
            if self.ranks_of(host):  # they have not been started on other hosts yet
                self.deliver(HostLeft(why), host)
        self._told = {event.name: event for event in map(event_of, map(str.encode, state["told"]))}
        for event in self._told.values():
            self.deliver(event, "")
        for end in state["dead"]:
            self._dead[end["rank"]] = end
            fields = dict(end)
            host = fields.pop("host")
            self.deliver(Exit(**fields), host)
        self._replaced = dict(state["replaced"])
        for rank, pid in self._replaced.items():
            self.deliver(Replaces(rank, pid), "")
        for host, line in taken.news:
            self._handle(host, line.encode())
        self.stand_in = taken.stand_in
        self.wire.take_over({host: taken.silent.get(host, 0.0) for host in self.addresses})
        for host in self._ended_hosts:
            self.wire.forget(host)
        self._save()

    def test_network(self) -> NetworkTest:
        """Tests the connections between all hosts, which must have come; the result comes later."""
        if self._test is None:
            self._test = NetworkTest(self.addresses, self.wire.command)
            self._test.begin()  # its events may come at once
        return self._test

    def blocked(self) -> str:
        if not self._hosts or time.monotonic() < self._began + limits.PORT_TEST_AFTER_SECONDS:
            return ""
        problems = self.test_network().problems()
        if not problems:
            return ""
        shown, more = problems[:_SHOWN_PAIRS], len(problems) - _SHOWN_PAIRS
        found = "\n".join([*shown, *([f"and {more} more pairs"] if more > 0 else [])])
        return (
            f"expected connections between all hosts, which MPI needs, found:\n{found}\nAllow them "
            "in the firewall: MPI's processes listen on any port. To check again: "
            f"allranks doctor --on {self._launcher.typed}"
        )

    def _config_of(self, host: Host) -> HostAgentConfig:
        first = self._hosts[0]
        folder = self._config.session_dir
        program, *options = self._launcher.command(self._hosts, self._spares)
        return dataclasses.replace(
            self._config,
            launch=(program, *(LASTING if self._config.can_replace else ()), *options),
            spares=self._spares,
            seats=tuple(self._seats),
            relocation=self._relocation,
            local_size=host.ranks,
            head=host is first,
            interface=tcp_url(self.addresses[first.name]),
            commands_url=f"ipc://{folder}/relay-commands",
            events_url=f"ipc://{folder}/relay-events",
        )

    def where(self, missing: Iterable[int]) -> str:
        if self._host_of:
            on = list(dict.fromkeys(self._host_of[rank] for rank in sorted(missing)))
        else:
            on = [host.name for host in self._expected]
        # If a host has ended, others may just not have connected yet.
        silent = [name for name in on if name not in self.addresses and not self._reported]
        said = f" on {', '.join(on)}" if on else ""
        if silent:
            said += (
                f"; no connection from {', '.join(silent)}. Check that no firewall keeps that host "
                f"from reaching {self.wire.commands_url}"
            )
        return said

    def say(self, command: Command) -> None:
        for host in self._hosts[:1] if isinstance(command, Clients) else self._hosts:
            self._say(host.name, command)
        if isinstance(command, RanksUp):
            self.starts_again = False
            with self._hosts_lock:  # the wire's thread notes deaths
                for rank, pid in self._replaced.items():
                    if rank in self._dead and self._dead[rank]["pid"] != pid:
                        del self._dead[rank]
            self._save()

    def seat_spares(self, dead: Sequence[int]) -> str:
        # If possible on the same host; all other spare processes take part in it.
        with self._hosts_lock:  # the wire's thread notes deaths
            problem = self._choose_spares(dead)
        if not problem:
            self._send_seats()
        return problem

    def repeat_seats(self) -> None:
        if self._may_miss_seats:
            self._send_seats()

    def _send_seats(self) -> None:
        self._may_miss_seats = False
        for host, line in self._seat_lines.items():
            self.wire.command(host, "say", line)

    @property
    def spares(self) -> int:
        # Each by a process that waits.
        with self._hosts_lock:
            return sum(map(len, self._spares_on.values()))

    def _choose_spares(self, dead: Sequence[int]) -> str:
        """Chooses those that take the places; returns why there are too few, or ""."""
        fresh = [rank for rank in dead if rank not in self._seated]
        spare = sum(map(len, self._spares_on.values()))
        if spare < len(fresh):
            each = "each of " if len(fresh) > 1 else ""
            return (
                f"expected a spare process for {each}{label(fresh)}, found {spare}: each "
                f"host had {self._spares} at first. To have more, set {SPARES} before the start, "
                f"for example: %env {SPARES}={2 * self._spares}"
            )
        for rank in fresh:
            most = max(self._spares_on, key=lambda name: len(self._spares_on[name]))
            host = self._host_of[rank] if self._spares_on.get(self._host_of[rank]) else most
            self._seated[rank] = host, self._spares_on[host].pop(0)
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in self._spares_on}
        for rank in dead:  # also those that wait since the last try, which has failed
            host, number = self._seated[rank]
            taken[host].append((number, rank))
        self._choices += 1
        self._seat_lines = {
            host: to_line(SeatSpares(self._choices, list(dead), seats)).decode()
            for host, seats in taken.items()
        }
        # First: if this process ends now, the next notebook asks the same ones.
        self._save()
        return ""

    def _say(self, host: str, command: Command) -> None:
        self.wire.command(host, "say", to_line(command).decode())

    def stop(self) -> None:
        # Not those of a host that is cut off, which ends its own.
        with self._hosts_lock:
            self._stopping = True
            there = set(self.addresses) - self._ended_hosts
        for host in there:
            self.wire.command(host, "stop", "")
        if there:
            with suppress(Empty):
                self._all_ended.get(timeout=limits.STOP_SECONDS)
        self.job.close()
        if self.stand_in is not None:
            self.stand_in.stop()

    def _handle(self, host: str, line: bytes) -> None:
        """Handles a host's event, in the wire's thread."""
        event = event_of(line)
        with self._hosts_lock:
            if host in self._moving and not isinstance(event, HostEvent):
                return  # of the ranks that end there
            if self.stand_in is not None:
                self.stand_in.event_came(event, host)
            self._handle_event(host, event)
            if isinstance(event, _STATE):
                self._save()

    def _handle_event(self, host: str, event: Event) -> None:
        match event:
            case HostAgain(relocation):
                if relocation == self._relocation:
                    self._moving.discard(host)
            case HostUp(address, its_version):
                self.addresses[host] = address
                if self._stopping:  # stop() has not seen this host
                    self.wire.command(host, "stop", "")
                if its_version != version():
                    why = f"has allranks {its_version}, and the notebook {version()}"
                    self._report(host, why)
                self.deliver(event, host)  # for who waits for all hosts
            case HostSilent():
                self._lose(host, self.wire.lease_seconds)
            case HostLate():
                if self._held.wait_for(host):  # so the cause of these ends is found
                    self._lose(host, limits.LATE_SECONDS)
            case HostBeat():
                self._held.beat(host)
            case HostRefused(problem):
                self._host_ended(host, f"could not start: {problem}")
            case HostListens() | HostConnected():
                if self._test is not None:
                    self._test.take(event, host)
                self.deliver(event, host)
            case HostEnds(why):
                self._report(host, why)
            case LauncherExit(code) if host != self._hosts[0].name:
                if code < 0 or code > _SIGNALLED:
                    died = ending(min(code, _SIGNALLED - code), explain=False)
                    self._report(host, f"has lost Open MPI's daemon prted, which {died}")
            case HostDown(why):
                self._host_ended(host, why)
            case Reach(other) if other == host:
                why = "has another host name, so mpiexec would look for it elsewhere"
                self._report(host, f"{why}: use the name that its command hostname prints")
            case Reach(other, command):
                self._say(other, Serve(command))
            case Admitted(rank):
                self._host_of[rank] = host
                self.deliver(event, host)
            case Replaces(rank, pid):
                self._host_of[rank] = host
                self._replaced[rank] = pid
                self.deliver(event, host)
            case SpareExit(place):
                if place in self._spares_on[host]:
                    self._spares_on[host].remove(place)
                # If it was about to become a rank, another one takes its place.
                seats = self._seated.items()
                self._seated = {rank: seat for rank, seat in seats if seat != (host, place)}
            case Exit(rank, pid):
                end = {"host": host, **vars(event)}
                # It may come again, also after a spare process was chosen, or has the place.
                if self._replaced.get(rank, pid) == pid and self._dead.get(rank) != end:
                    self._seated.pop(rank, None)
                    self._dead[rank] = end
                self._tell_controller(host, rank, pid)
                self._hold(event, host)
            case LauncherExit():
                self._hold(event, host)
            case Controller() | Registered():
                self._told[event.name] = event
                if isinstance(event, Controller):
                    for each in self._hosts[1:]:
                        self._say(each.name, Join(event.engine))
                self.deliver(event, host)
            case _:
                self.deliver(event, host)

    def _hold(self, end: Exit | LauncherExit, host: str) -> None:
        # A host that is reported as lost may have no more news, although its relay has not ended.
        others = {each.name for each in self._hosts} - self._reported.keys() - self._ended_hosts
        self._held.take(end, host, others - {host})

    def _tell_controller(self, host: str, rank: int, pid: int) -> None:
        # It runs on the first host, where the agent reports the deaths of its own ranks.
        first = self._hosts[0].name
        if host != first:
            self._say(first, ReportDeath(rank, pid))

    def _lose(self, host: str, seconds: float) -> None:
        self._host_ended(host, f"is cut off or has crashed: no heartbeat for {seconds:g} s")
        self.job.give_up(host)

    def _host_ended(self, host: str, why: str) -> None:
        """Handles the end of a host, in the thread that has found it."""
        with self._hosts_lock:
            self._ended_hosts.add(host)
            if self._stopping and self._ended_hosts >= set(self.addresses):
                self._all_ended.put(None)
            self.wire.forget(host)
            self._report(host, why)

    def _report(self, host: str, why: str) -> None:
        """Reports why a host is lost; only the first reason counts."""
        if not self._stopping and host not in self._reported:
            self._reported[host] = why
            self._save()
            self._held.release((HostLeft(why), host))
