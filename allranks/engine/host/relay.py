"""The program that a launcher runs once on every host: connects the host agent to the notebook.

Where ranks are on several hosts, all data between a host and the notebook passes the relay, and is
encrypted (CURVE) with the notebook's public key, which serves as the shared secret. Ranks reach
the relay by sockets in a folder that only this user may enter.

Both sides hold a lease of each other. The relay sends the notebook a beat every second. The
notebook's connection answers pings even while its Python is busy: if it does not for the lease, or
the notebook has ended, the relay closes the host agent's standard input, and all processes of the
cluster on this host end. A shorter interruption of the network costs no message
(`allranks.engine.host.notebook_connection`). If the ranks stay when the notebook ends, its
caretaker takes its place, and the relay disconnects the ranks until another notebook attaches.

    python -m allranks.engine.host.relay                    an invitation on standard input
    python -m allranks.engine.host.relay --join FILE NAME   one in a file; NAME holds the host's
                                                            name
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
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import zmq

from allranks import own_files, python_path
from allranks.engine import processes
from allranks.engine.host import port_test
from allranks.engine.host.notebook_connection import NotebookConnection
from allranks.errors import WireError
from allranks.records.config import (
    BEAT_SECONDS,
    COMMANDS_AT_HOME,
    EVENTS_AT_HOME,
    FIRST_SECONDS,
    HostAgentConfig,
    Invitation,
    family_of,
    version,
)
from allranks.records.numbered import Frames
from allranks.records.wire import (
    check_text,
    join_messages,
    process_of,
    split_messages,
    with_senders,
)

_AGENT = "allranks.agent"
#: The host agent has ended all ranks, and awaits its next configuration.
_AGAIN = {"event": "again"}
_STOP_SECONDS = 8.0
_LAUNCHER_SECONDS = 4.0
_TRACKER_SECONDS = 1.0
_POLL_SECONDS = 0.1
_LINGER_MS = 1000
_POLL_MS = int(BEAT_SECONDS * 500)
#: The time for which messages of ranks wait to be sent together.
TICK_SECONDS = 0.05
#: The first bytes of messages that may wait.
_WAITING = tuple(f'["{name}"'.encode() for name in ("Output", "Points", "Timings", "Pulse"))
_LONGEST = max(map(len, _WAITING))
#: A larger message is sent by itself, because a message arrives as a whole.
_MOST_NBYTES = 64 << 10
#: In place of a message that cannot be read, of a process that the system does not name.
_UNREADABLE = b"what a rank has sent"
#: After this many messages the relay serves its other sources: ranks may send without end.
_AT_ONCE = 256


class Batching:
    """Sends messages of the ranks of a host to the notebook, several as one.

    Each rank sends its output and telemetry twenty times a second, and the notebook would wake for
    each message. Here such messages wait for each other for up to `TICK_SECONDS`. All others are
    sent at once, after those that wait, so the order of each rank's messages stays.
    """

    def __init__(
        self,
        send: Callable[[Frames], None],
        refuse: Callable[[int, str], None] = lambda pid, why: None,
    ) -> None:
        self._send = send
        #: Called with the process that has sent what cannot be read, and why.
        self._refuse = refuse
        self._waiting: list[Sequence[zmq.Frame]] = []
        #: The process of each message that waits; 0 if the system does not name it.
        self._senders: list[int] = []
        self._nbytes = 0
        self._since = 0.0

    @property
    def left_seconds(self) -> float:
        # How long the oldest message may still wait.
        if not self._waiting:
            return float("inf")
        return max(0.0, self._since + TICK_SECONDS - time.monotonic())

    def drain(self, told: zmq.Socket[bytes]) -> None:
        # Sends the messages if one of them must not wait.
        urgent = False
        for _ in range(_AT_ONCE):
            if not told.poll(0):
                break
            frames: list[zmq.Frame] = told.recv_multipart(copy=False)
            nbytes = sum(len(frame) for frame in frames)
            if nbytes + self._nbytes > _MOST_NBYTES:
                self.send()
                urgent = False
            pid = process_of(frames[0])
            try:
                messages = split_messages(frames)
                for message in messages:
                    check_text(message[0].bytes)
            except WireError as error:
                # Nothing of it: it would take other messages along.
                if pid:
                    self._refuse(pid, str(error))
                    continue
                messages = [[zmq.Frame(_UNREADABLE)]]  # for the notebook, which says so
            for message in messages:
                self._waiting.append(message)
                self._senders.append(pid)
                urgent = urgent or not bytes(message[0].buffer[:_LONGEST]).startswith(_WAITING)
            self._nbytes += nbytes
        if urgent or not self.left_seconds:
            self.send()

    def send(self) -> None:
        if self._waiting:
            frames = join_messages(self._waiting)
            self._send(with_senders(frames, self._senders) if any(self._senders) else frames)
            self.forget()

    def forget(self) -> None:
        self._waiting, self._senders = [], []
        self._nbytes, self._since = 0, time.monotonic()


class Relay:
    """Passes messages between one host and the notebook until one of them is gone.

    The end of file of the descriptor ``lifeline``, if any, ends the relay.
    """

    def __init__(self, invitation: Invitation, host: str, lifeline: int = -1) -> None:
        self.host = host
        self._lifeline = lifeline
        self._agent: subprocess.Popen[bytes] | None = None
        self._heard = b""
        #: The host agent's next configuration, while the agent ends for it, and commands for then.
        self._next: HostAgentConfig | None = None
        self._for_next: list[bytes] = []
        #: The message to each host agent if the ranks are to stay.
        self._stay = b""
        self._folders: tuple[str, ...] = ()
        #: Those of the sockets for the ranks of the first notebook.
        self._urls = "", ""
        processes.adopt_orphans()
        self._why = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        #: For the ranks, once there is a folder for these sockets, and while a notebook has them.
        self._commands: zmq.Socket[bytes] | None = None
        self._told: zmq.Socket[bytes] | None = None
        self._notebook = NotebookConnection(self._context, invitation, host)
        self._batching = Batching(self._notebook.send, self._end_rank)
        self._url = invitation.commands_url
        self._tested: socket.socket | None = None

    def run(self) -> int:
        self._wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._end("was ended by SIGTERM"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._poller = zmq.Poller()
        for source in (*self._notebook.sources(), self._wake):
            self._poller.register(source, zmq.POLLIN)
        if self._lifeline >= 0:
            self._poller.register(self._lifeline, zmq.POLLIN)
        if not self._meet():
            return 1
        self._tell(event="host_up", address=_own_address(self._url), version=version())
        while not self._why:
            self._notebook.tick()
            if self._notebook.over:
                self._end(f"lost the connection to the notebook: {self._notebook.over}")
            wait_ms = math.ceil(min(1.0, self._batching.left_seconds) * 1000)
            for source, _ in self._poller.poll(min(_POLL_MS, wait_ms)):
                self._serve(source)
            if not self._batching.left_seconds:
                self._batching.send()
        self._stop()
        return 0

    def _meet(self) -> bool:
        deadline = time.monotonic() + FIRST_SECONDS
        while time.monotonic() < deadline:
            for source, _ in self._poller.poll(_POLL_MS):
                self._serve(source)
            if self._why:
                return False
            if self._notebook.is_up:
                return True
        print(
            f"expected the notebook at {self._url}, found no answer with its key within "
            f"{FIRST_SECONDS:g} s. Check that no firewall blocks that port for this host",
            file=sys.stderr,
        )
        return False

    def _end(self, why: str) -> None:
        self._why = self._why or why

    def _serve(self, source: Any) -> None:
        if source in self._notebook.sources():
            for frames in self._notebook.serve(source):
                self._obey(frames)
        elif isinstance(source, zmq.Socket):
            if source is self._told:  # else it has just been closed
                self._batching.drain(source)
        elif source == self._wake:
            os.read(self._wake, 4096)  # a signal: its handler has run
        elif source == self._lifeline:
            if not os.read(self._lifeline, 4096):
                self._poller.unregister(self._lifeline)
                if not self._notebook.stays:
                    self._end("was lost: its launcher has ended")
        elif not self._pass_on(source):
            self._poller.unregister(source)
            if self._next is not None:
                assert self._agent is not None
                if self._agent.wait() < 0:
                    self._tidy_up()
                self._agent = None
                self._begin_again(self._next)
            else:
                self._end("was lost: its host agent has ended")

    def _obey(self, frames: list[bytes]) -> None:
        """Runs a command: ``config``, ``say`` to the host agent, ``ranks`` or ``stop``.

        ``again`` starts the ranks of this host again, with another configuration. ``listen`` and
        ``connect`` test the network between the hosts. After ``stay``, the ranks stay when the
        notebook ends; ``detach`` and ``attach`` are its end, and the next one.
        """
        word, first, *rest = frames
        if word == b"ranks" and self._commands is not None:
            for rank in json.loads(first):
                self._commands.send_multipart([f"rank-{rank}".encode(), *rest])
        elif word == b"stop":
            self._end("was told to stop")
        elif word == b"say" and self._next is not None:
            self._for_next.append(first)
        elif word == b"say" and self._agent is not None:
            self._say(first)
        elif word == b"again":
            self._for_next.clear()
            begins = self._next is None
            self._next = HostAgentConfig.from_json(first.decode())
            if begins:
                self._say(b"again")
        elif word == b"stay":
            self._notebook.stays, self._stay = True, b"stay " + first
            if self._next is None:
                self._say(self._stay)
        elif word in (b"detach", b"attach"):
            self._detach()
            if word == b"attach":
                folder = self._folders[0]
                # Ranks that were there look for a notebook here; spare processes do not know that.
                self._listen(COMMANDS_AT_HOME.format(folder), EVENTS_AT_HOME.format(folder))
                self._bind(*self._urls)
                # What the ranks send from now on is for this notebook.
                self._notebook.send([b"attached"])
        elif word == b"listen":
            self._tested = port_test.listen(_own_address(self._url))
            port = self._tested.getsockname()[1]
            self._tell(event="host_listens", test=first.decode(), port=port)
        elif word == b"connect":
            name, targets = json.loads(first)
            problems = port_test.unreachable(port_test.Target(*target) for target in targets)
            self._tell(event="host_connected", test=name, problems=problems)
        elif word == b"config":
            try:
                self._begin(HostAgentConfig.from_json(first.decode()))
            except (OSError, zmq.ZMQError) as error:
                self._tell(event="host_refused", problem=str(error))
                self._end("could not begin")

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

    def _detach(self) -> None:
        """Disconnects the ranks, which keep what they would send."""
        if self._commands is not None and self._told is not None:
            self._poller.unregister(self._told)
            self._commands.close(0)
            self._told.close(0)
        self._commands = self._told = None
        self._batching.forget()

    def _say(self, line: bytes) -> None:
        assert self._agent is not None
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(line + b"\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its standard output shows

    def _end_rank(self, pid: int, why: str) -> None:
        if self._agent is not None and self._next is None:
            self._say(f"end {json.dumps({'pid': pid, 'why': why})}".encode())

    def _begin_again(self, config: HostAgentConfig) -> None:
        self._next, self._heard = None, b""
        while self._told is not None and self._told.poll(0):
            self._batching.drain(self._told)
        self._batching.send()
        self._detach()
        shutil.rmtree(config.session_dir, ignore_errors=True)
        self._tell(event="host_again", relocation=config.relocation)
        try:
            self._begin(config)
        except (OSError, zmq.ZMQError) as error:
            self._tell(event="host_refused", problem=str(error))
            self._end("could not begin again")
            return
        for line in (*([self._stay] if self._stay else []), *self._for_next):
            self._say(line)
        self._for_next.clear()

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
        self._tell(
            event="notice",
            text=f"The logs of host {self.host} are not in {config.log_dir}, because other users "
            f"can write to {exposed} there. They are in {log_dir}",
        )
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

    def _pass_on(self, descriptor: int) -> bool:
        said = os.read(descriptor, 65536)
        *lines, self._heard = (self._heard + said).split(b"\n")
        if lines:
            self._batching.send()  # messages of a rank come before the news of its death
        for line in lines:
            self._notebook.send([b"agent", line])
            if self._next is not None and not self._why and json.loads(line) == _AGAIN:
                self._begin_again(self._next)
        return bool(said)

    def _tell(self, **fields: Any) -> None:
        self._notebook.send([b"agent", json.dumps(fields).encode()])

    def _stop(self) -> None:
        """Ends the host agent, and reports to the notebook that nothing is left here."""
        # First, because events of the ranks' ends follow.
        self._tell(event="host_ends", why=self._why)
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
                code = agent.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                agent.kill()  # its children die with it
                code = agent.wait()
            if code < 0:
                self._tidy_up()
            os.set_blocking(agent.stdout.fileno(), False)
            try:
                while self._pass_on(agent.stdout.fileno()):
                    pass
            except BlockingIOError:
                pass  # a process that a cell has started may hold it
        while self._told is not None and self._told.poll(0):
            self._batching.drain(self._told)
        self._batching.send()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._tell(event="host_down", why=self._why)
        # Without a connection, nothing that is left can be sent.
        self._context.destroy(linger=0 if self._notebook.over else _LINGER_MS)

    def _tidy_up(self) -> None:
        # Descendants of a host agent that was killed: this process has adopted them.
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        # The launcher's helper ends by itself, and removes MPI's files in shared memory.
        while processes.reap_all() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + _TRACKER_SECONDS
        while processes.reap_all():
            processes.kill_children(spare_trackers=time.monotonic() < deadline)
            time.sleep(_POLL_SECONDS)


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
    with socket.socket(family_of(found.hostname or ""), socket.SOCK_DGRAM) as way:
        # For UDP, this only chooses the route: no packet is sent.
        way.connect((found.hostname, found.port))
        return str(way.getsockname()[0])


def main(words: list[str]) -> int:
    if words:
        _, path, name = words
        # It says what this host runs, so only this user's counts.
        with open(own_files.open_file(path)) as kept:
            return Relay(Invitation.from_json(kept.read()), os.environ[name]).run()
    found = processes.first_line(0)
    if found is None:
        return 1
    invitation = Invitation.from_json(found[0].decode())
    return Relay(invitation, invitation.host, lifeline=0).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
