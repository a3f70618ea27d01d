"""The program that a launcher runs once on every host: connects the host agent to the notebook.

Where ranks are on several hosts, all data between a host and the notebook passes the relay, and is
encrypted (CURVE) with the notebook's public key, which serves as the shared secret. Ranks reach
the relay by sockets in a folder that only this user may enter.

Both sides hold a lease of each other. The relay sends the notebook a beat every second. The
notebook's connection answers pings even while its Python is busy: if it does not for the lease, or
the notebook has ended, the relay closes the host agent's standard input, and all processes of the
cluster on this host end. A shorter interruption of the network costs no message
(`allranks.features.hosts.notebook_connection`). If the ranks stay when the notebook ends, another
process takes its place, and the relay disconnects the ranks until another notebook comes.

`allranks.relay` is its entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import zmq

from allranks import own_files, python_path
from allranks.engine import processes
from allranks.engine.host.events import Terminated, TimeCame
from allranks.features.hosts import port_test
from allranks.features.hosts.notebook_connection import NotebookConnection
from allranks.features.hosts.relay_state import (
    AgentEnded,
    AgentWrote,
    Begin,
    Begun,
    Command,
    ConnectRanks,
    Disconnect,
    Event,
    NotBegun,
    NotebookLost,
    NotebookWrote,
    OutliveNotebook,
    RankSent,
    RanksRead,
    ReadRanks,
    RelayState,
    RemoveFolder,
    StarterEnded,
    ToAgent,
    ToNotebook,
    ToRanks,
    TryNetwork,
    news,
)
from allranks.records import agent, limits
from allranks.records.agent import HostConnected, HostDown, HostEnds, HostListens, HostUp, Notice
from allranks.records.config import (
    COMMANDS_AT_HOME,
    EVENTS_AT_HOME,
    HostAgentConfig,
    Invitation,
    source_address,
    version,
)
from allranks.records.wire import process_of

_AGENT = "allranks.agent"
_LINGER_MS = 1000
_POLL_MS = int(limits.BEAT_SECONDS * 500)
#: After this many messages the relay serves its other sources: ranks may send without end.
_AT_ONCE = 256


def received(ranks: zmq.Socket[bytes]) -> Iterator[RankSent]:
    """Yields messages of ranks that have come, at most as many as are read at once."""
    for _ in range(_AT_ONCE):
        if not ranks.poll(0):
            return
        frames: list[zmq.Frame] = ranks.recv_multipart(copy=False)
        yield RankSent(process_of(frames[0]), frames)


class Relay:
    """Passes messages between one host and the notebook until one of them is gone.

    The end of file of the descriptor ``lifeline``, if any, ends the relay.
    """

    def __init__(self, invitation: Invitation, host: str, lifeline: int = -1) -> None:
        self.host = host
        self._lifeline = lifeline
        self._agent: subprocess.Popen[bytes] | None = None
        self._folders: tuple[str, ...] = ()
        #: Those of the sockets for the ranks of the first notebook.
        self._urls = "", ""
        processes.adopt_orphans()
        self._state = RelayState()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        #: For the ranks, once there is a folder for these sockets, and while a notebook has them.
        self._commands: zmq.Socket[bytes] | None = None
        self._told: zmq.Socket[bytes] | None = None
        self._notebook = NotebookConnection(self._context, invitation, host)
        self._url = invitation.commands_url
        self._tested: socket.socket | None = None

    def run(self) -> int:
        self._wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        # Nothing is decided in the handler: it may interrupt a decision.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._poller = zmq.Poller()
        for source in (*self._notebook.sources(), self._wake):
            self._poller.register(source, zmq.POLLIN)
        if self._lifeline >= 0:
            self._poller.register(self._lifeline, zmq.POLLIN)
        if not self._meet():
            return 1
        self._tell(HostUp(_own_address(self._url), version()))
        while not self._state.why:
            self._notebook.tick()
            if over := self._notebook.state.over:
                self._feed(NotebookLost(over))
            left = max(0.0, min(1.0, self._state.wake_at - time.monotonic()))
            for source, _ in self._poller.poll(min(_POLL_MS, math.ceil(left * 1000))):
                self._serve(source)
            if time.monotonic() >= self._state.wake_at:
                self._feed(TimeCame())
        self._stop()
        return 0

    def _meet(self) -> bool:
        deadline = time.monotonic() + limits.FIRST_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            for source, _ in self._poller.poll(math.ceil(left * 1000)):
                self._serve(source)
            if self._state.why:
                return False
            if self._notebook.state.is_up:
                return True
        print(
            f"expected the notebook at {self._url}, found no answer with its key within "
            f"{limits.FIRST_SECONDS:g} s. Check that no firewall blocks that port for this host",
            file=sys.stderr,
        )
        return False

    def _serve(self, source: Any) -> None:
        if source in self._notebook.sources():
            for frames in self._notebook.serve(source):
                self._feed(NotebookWrote(frames))
        elif isinstance(source, zmq.Socket):
            if source is self._told:  # else it has just been closed
                self._read_ranks(source)
        elif source == self._wake:
            if signal.SIGTERM in os.read(self._wake, 4096):
                self._feed(Terminated())
        elif source == self._lifeline:
            if not os.read(self._lifeline, 4096):
                self._poller.unregister(self._lifeline)
                self._feed(StarterEnded())
        elif not self._read_agent(source):
            self._poller.unregister(source)
            if self._state.next is not None:
                assert self._agent is not None
                if self._agent.wait() < 0:
                    self._tidy_up()
                self._agent = None
            self._feed(AgentEnded())

    def _read_ranks(self, told: zmq.Socket[bytes]) -> None:
        for message in received(told):
            self._feed(message)
        self._feed(RanksRead())

    def _read_agent(self, descriptor: int) -> bool:
        said = os.read(descriptor, 65536)
        self._feed(AgentWrote(said))
        return bool(said)

    def _feed(self, event: Event) -> None:
        for command in self._state.apply(event, time.monotonic()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToNotebook(frames):
                self._notebook.send(frames)
            case ToAgent(line):
                self._say(line)
            case ToRanks(ranks, frames):
                if self._commands is not None:
                    for rank in ranks:
                        self._commands.send_multipart([f"rank-{rank}".encode(), *frames])
            case Begin(config):
                try:
                    self._begin(config)
                except (OSError, zmq.ZMQError) as error:
                    self._feed(NotBegun(str(error)))
                else:
                    self._feed(Begun())
            case ReadRanks():
                self._read_all_of_ranks()
            case Disconnect():
                self._disconnect()
            case RemoveFolder(path):
                shutil.rmtree(path, ignore_errors=True)
            case ConnectRanks():
                folder = self._folders[0]
                # Ranks that were there look for a notebook here; spare processes do not know that.
                self._listen(COMMANDS_AT_HOME.format(folder), EVENTS_AT_HOME.format(folder))
                self._bind(*self._urls)
            case OutliveNotebook():
                self._notebook.state.stays = True
            case TryNetwork("listen", name):
                self._tested = port_test.listen(_own_address(self._url))
                self._tell(HostListens(name, self._tested.getsockname()[1]))
            case TryNetwork("connect", argument):
                name, targets = json.loads(argument)
                problems = port_test.unreachable(port_test.Target(*target) for target in targets)
                self._tell(HostConnected(name, dict(problems)))
            case _:
                raise ValueError(f"expected a command of the relay's state, found {command!r:.200}")

    def _read_all_of_ranks(self) -> None:
        while self._told is not None and self._told.poll(0):
            for message in received(self._told):
                self._feed(message)
        self._feed(RanksRead())

    def _listen(self, commands_url: str, events_url: str) -> None:
        """Opens the sockets for the ranks of a notebook."""
        self._commands = self._context.socket(zmq.ROUTER)
        # A new rank has the name of the dead one, whose connection may not be closed yet.
        self._commands.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._told = self._context.socket(zmq.PULL)
        for one in (self._commands, self._told):
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
            one.setsockopt(zmq.LINGER, _LINGER_MS)
        # Nothing is read from it: what ranks sent there would only take memory.
        self._commands.setsockopt(zmq.RCVHWM, 1)
        self._bind(commands_url, events_url)
        self._poller.register(self._told, zmq.POLLIN)

    def _bind(self, commands_url: str, events_url: str) -> None:
        assert self._commands is not None
        assert self._told is not None
        self._commands.bind(commands_url)
        self._told.bind(events_url)

    def _disconnect(self) -> None:
        if self._commands is not None and self._told is not None:
            self._poller.unregister(self._told)
            self._commands.close(0)
            self._told.close(0)
        self._commands = self._told = None

    def _say(self, line: bytes) -> None:
        assert self._agent is not None
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(line + b"\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its standard output shows

    def _begin(self, config: HostAgentConfig) -> None:
        if not os.path.isdir(config.work_dir):
            raise FileNotFoundError(f"the notebook's folder {config.work_dir} is not there")
        name = os.path.join(config.session_dir, "host")
        try:
            # Fails if it exists: another user's could be open to others.
            os.mkdir(config.session_dir, mode=0o700)
        except FileExistsError:
            raise FileExistsError(
                f"{config.session_dir} exists, made by {_first_line(name)}: two names of the same "
                "host, or two hosts with one /tmp. Give all ranks of a host to one name: HOST:4"
            ) from None
        # The host agent removes them too, if it is not killed.
        self._folders = config.session_dir, config.shared_dir, *config.kept_dirs
        with open(name, "w") as text:
            text.write(self.host)
        config = self._with_own_logs(config)
        self._urls = config.commands_url, config.events_url
        self._listen(*self._urls)
        if self._agent is None:
            self._start_agent(config)
        self._say(config.to_json().encode())

    def _with_own_logs(self, config: HostAgentConfig) -> HostAgentConfig:
        """Makes the folder of the logs; another one if other users can write to that one here."""
        exposed = own_files.exposed_part(config.log_dir)
        if not exposed:
            own_files.make_folders(config.log_dir)
            exposed = own_files.exposed_part(config.log_dir)
        if not exposed:
            own_files.remove_old_logs(os.path.dirname(config.log_dir))
            return config
        place = own_files.temporary_folder("logs")
        log_dir = os.path.join(place, os.path.basename(config.log_dir))
        own_files.remove_old_logs(place)
        own_files.make_folder(log_dir)
        text = (
            f"The logs of host {self.host} are not in {config.log_dir}, because other users "
            f"can write to {exposed} there. They are in {log_dir}"
        )
        self._tell(Notice(text))
        return dataclasses.replace(config, log_dir=log_dir)

    def _start_agent(self, config: HostAgentConfig) -> None:
        log = os.path.join(config.log_dir, f"host-agent-{self.host}.log")
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as kept:
            self._agent = subprocess.Popen(
                # -P: no module of the current folder takes the place of an installed one.
                [sys.executable, "-P", "-m", _AGENT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=kept,
                env=python_path.without_current_folder({**os.environ, **config.environment}),
            )
        assert self._agent.stdout is not None
        self._poller.register(self._agent.stdout.fileno(), zmq.POLLIN)

    def _tell(self, event: agent.Event) -> None:
        self._carry_out(news(event))

    def _stop(self) -> None:
        """Ends the host agent, and reports to the notebook that nothing is left here."""
        # First, because events of the ranks' ends follow.
        self._tell(HostEnds(self._state.why))
        code = 0
        if self._agent is not None:
            agent = self._agent
            assert agent.stdin is not None
            assert agent.stdout is not None
            try:
                agent.stdin.close()
            except BrokenPipeError:
                pass  # it has ended
            try:
                code = agent.wait(limits.RELAY_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                agent.kill()  # its children die with it
                code = agent.wait()
            if code < 0:
                self._tidy_up()
            os.set_blocking(agent.stdout.fileno(), False)
            try:
                while self._read_agent(agent.stdout.fileno()):
                    pass
            except BlockingIOError:
                pass  # a process that a cell has started may hold it
        self._read_all_of_ranks()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._tell(HostDown(self._state.why))
        # Without a connection, nothing that is left can be sent.
        self._context.destroy(linger=0 if self._notebook.state.over else _LINGER_MS)

    def _tidy_up(self) -> None:
        # Descendants of a host agent that was killed: this process has adopted them. The launcher's
        # helper ends by itself, and removes MPI's files in shared memory.
        processes.end_descendants(limits.LAUNCHER_SECONDS, 0.0)


def _first_line(path: str) -> str:
    try:
        with open(own_files.open_any_file(path)) as text:
            own_files.check_owner(text.fileno(), path)
            return f"host {text.readline().strip()}"
    except OSError:
        return "another process"


def _own_address(url: str) -> str:
    """Returns the address of this host on the route to the notebook."""
    found = urlsplit(url)
    return source_address(found.hostname or "", found.port or 0)


def main(words: list[str]) -> int:
    if words:
        _, path, name = words
        # It names the command that this host runs, so only this user's counts.
        with open(own_files.open_file(path)) as kept:
            return Relay(Invitation.from_json(kept.read()), os.environ[name]).run()
    found = processes.first_line(0)
    if found is None:
        return 1
    invitation = Invitation.from_json(found[0].decode())
    return Relay(invitation, invitation.host, lifeline=0).run()
