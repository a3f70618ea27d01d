"""What the caretaker has and decides: takes events, and returns commands.

It calls no clock, socket, process or file: `allranks.features.attach.caretaker` waits for the
events, and carries the commands out. Its time stands while that process stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, assert_never

from allranks.engine.host.events import NotebookSaid, Terminated, TimeCame
from allranks.features.attach.records import CaretakerConfig, HostRuns, Keep, Running, Stay
from allranks.records import agent, limits
from allranks.records.frozen import frozen
from allranks.records.numbered import BEGIN, Frames, HostMessages

#: Events that the next notebook need not know.
_NO_NEWS = Running, agent.LauncherText, agent.HostBeat
#: A host that sends more events has lost its way.
_MOST_NEWS_NBYTES = 4 << 20
_MOST_CELLS = 1 << 31
_NEVER = float("inf")


@frozen
class OwnerLeft:
    """The notebook has ended or detached; ``stays`` is whether the ranks outlive it.

    ``owner`` is a new name, for the numbers of messages from now on.
    """

    stays: bool
    owner: bytes


@frozen
class NotebookAttached:
    """Another notebook has the ranks from now on."""


@frozen
class NobodyCame:
    """No notebook has attached in time."""


@frozen
class HostGreeted:
    """A relay has announced itself on a new connection."""

    frames: Sequence[bytes]


@frozen
class HostSent:
    """A relay has sent a message."""

    frames: Sequence[bytes]


Event = (
    NotebookSaid
    | OwnerLeft
    | NotebookAttached
    | NobodyCame
    | Terminated
    | HostGreeted
    | HostSent
    | TimeCame
)


@frozen
class SetStay:
    """Sets how long the ranks stay without a notebook, and what the next one gets."""

    stay: Stay


@frozen
class ShowRunning:
    """Shows in the list of clusters which cell the ranks run; 0 for none."""

    cell: int


@frozen
class Listen:
    """Takes the notebook's place: listens for the hosts, and for notebooks that attach."""


@frozen
class ToHost:
    """Sends a relay a message."""

    name: bytes
    frames: Frames


@frozen
class HandOver:
    """Gives the notebook that has attached the sockets, and what it has to know.

    ``news`` are lines of events with their hosts; ``silent`` is for how many seconds each host has
    sent nothing.
    """

    state: dict[str, Any]
    news: Sequence[tuple[str, str]]
    silent: dict[str, float]


@frozen
class CloseDoor:
    """Lets no notebook find these ranks any more, which are ended now."""


Command = SetStay | ShowRunning | Listen | ToHost | HandOver | CloseDoor


class KeptHost:
    """A host while no notebook has its ranks; ``is_up`` until its relay ends, or is silent. Then it
    is stopped once it can be reached again.
    """

    def __init__(self, owner: bytes, now: float) -> None:
        self.messages = HostMessages(owner)
        self.last_sign = now
        self.is_up = True

    def lose(self) -> None:
        self.is_up = False
        self.messages.add([b"stop", b""])


class CaretakerState:
    """The state of a caretaker until all ranks have ended, or the notebook has stopped it."""

    def __init__(self, config: CaretakerConfig) -> None:
        self.has_ended = False
        self._size: int = config.ranks["size"]
        self._lease_seconds = config.lease_seconds + limits.BEAT_SECONDS
        patience = self._lease_seconds + limits.BEAT_SECONDS
        self._patience = patience if config.ranks["can_replace"] else 0.0
        #: What the notebook knew, and the events since then, as lines with their hosts.
        self._state: dict[str, Any] = {}
        self._news: list[tuple[str, str]] = []
        self._news_nbytes = 0
        #: The ranks without a process, and the processes that have replaced earlier ones.
        self._dead: set[int] = set()
        self._replaced: dict[int, int] = {}
        self._running: dict[str, int] = {}
        #: Empty while a notebook has the ranks.
        self._hosts: dict[str, KeptHost] = {}
        #: Then all end because MPI's job has ended, if no host is found to be lost.
        self._job_over_at = _NEVER
        #: Then hosts that have not reported that they are down are left to themselves.
        self._stops_at = _NEVER
        self._now = 0.0
        self._commands: list[Command] = []

    @property
    def wake_at(self) -> float:
        """When it is time to act; infinity if only events are awaited."""
        if not self._hosts or self._stops_at < _NEVER:
            return self._stops_at
        up = (host.last_sign for host in self._hosts.values() if host.is_up)
        return min(self._job_over_at, *(sign + self._lease_seconds for sign in up), _NEVER)

    def apply(self, event: Event, now: float) -> list[Command]:
        self._now, self._commands = now, []
        match event:
            case NotebookSaid(command):
                self._obey(command)
            case OwnerLeft(stays, owner):
                self._take_over(stays, owner)
            case NotebookAttached():
                silent = {name: now - host.last_sign for name, host in self._hosts.items()}
                self._hosts = {}
                self._commands.append(HandOver(self._state, self._news, silent))
            case NobodyCame() | Terminated():
                self._end()
            case HostGreeted(frames):
                self._take_from_host(self._greet, frames)
            case HostSent(frames):
                self._take_from_host(self._take, frames)
            case TimeCame():
                self._look_at_time()
            case _:
                assert_never(event)
        return self._commands

    def _obey(self, command: agent.Command) -> None:
        match command:
            case agent.Stop():
                self._end()
            case Stay():
                self._commands.append(SetStay(command))
            case Keep(state):
                self._state, self._news, self._news_nbytes = state, [], 0
                self._replaced = dict(state["replaced"])
                # The notebook keeps the end of a process whose replacement has just begun.
                ends = ((end["rank"], end["pid"]) for end in state["dead"])
                self._dead = {rank for rank, pid in ends if self._replaced.get(rank, pid) == pid}
                if state["starts_again"]:
                    self._job_over_at = _NEVER
                    for host in self._running:
                        self._note_running(host, 0)
            case HostRuns(host, cell):
                self._note_running(host, cell)
            case _:
                raise ValueError(f"expected a command for a caretaker, found {command!r:.200}")

    def _note_running(self, host: str, cell: int) -> None:
        self._running[host] = cell
        self._commands.append(ShowRunning(max(self._running.values())))

    def _take_over(self, stays: bool, owner: bytes) -> None:
        if self._hosts or self.has_ended:
            return
        if not self._state:  # the notebook has ended before it named its hosts
            self._end()
            return
        used, ended = self._used(), self._state["ended"]
        self._hosts = {name: KeptHost(owner, self._now) for name in (*used, *ended)}
        for name in ended:
            self._hosts[name].lose()
        self._commands.append(Listen())
        self._send_to_all(b"disconnect")
        # A notebook that takes its ranks with it leaves that to its caretaker as well.
        if not stays:
            self._end()

    def _end(self) -> None:
        """Ends the ranks on all hosts that can be reached; the others end by themselves."""
        self.has_ended = not any(host.is_up for host in self._hosts.values())
        if not self.has_ended and self._stops_at == _NEVER:
            self._stops_at = self._now + limits.STOP_SECONDS
            self._commands.append(CloseDoor())
            self._send_to_all(b"stop")

    def _used(self) -> list[str]:
        return [name for name, *_ in self._state["hosts"]]

    def _send_to_all(self, word: bytes) -> None:
        for name, host in self._hosts.items():
            if host.is_up:
                frames = host.messages.add([word, b""])
                self._commands.append(ToHost(name.encode(), frames))

    def _take_from_host(
        self, take: Callable[[Sequence[bytes]], None], frames: Sequence[bytes]
    ) -> None:
        # Every host has the key: what one sends must not end the ranks of the others.
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            take(frames)

    def _greet(self, frames: Sequence[bytes]) -> None:
        name, last, owner = frames
        if host := self._hosts.get(name.decode()):
            for sent in host.messages.on_connection(int(last), owner):
                self._commands.append(ToHost(name, sent))

    def _take(self, frames: Sequence[bytes]) -> None:
        kind, name, number, *rest = frames
        host = self._hosts.get(name.decode())
        if host is None:
            return
        host.last_sign = self._now
        if kind == BEGIN:
            host.messages.begin(number, int(rest[0]))
        elif kind == b"beat":
            host.messages.confirm(int(number), rest[0])
            if confirmation := host.messages.confirmation:
                self._commands.append(ToHost(name, confirmation))
        elif kind == b"host" and host.messages.accept(int(number)) and rest[0] == b"agent":
            # Records of ranks were for the last notebook: the ranks keep them.
            self._take_event(name.decode(), rest[1])

    def _take_event(self, name: str, line: bytes) -> None:
        event = agent.read_event(line)
        if not self._hosts[name].is_up:
            return
        if self._state["starts_again"] and not isinstance(event, agent.HostEvent):
            return  # of ranks that the next notebook starts once more
        if isinstance(event, agent.Exit | agent.Admitted | agent.Replaces):
            _check(event.rank, self._size)
        if not isinstance(event, _NO_NEWS) and not self._keep(name, line):
            return
        match event:
            case Running(cell):
                _check(cell, _MOST_CELLS)
                self._note_running(name, cell)
            case agent.Exit(rank, pid):
                # That of a process that was replaced may come again.
                if self._replaced.get(rank, pid) == pid:
                    self._dead.add(rank)
                if len(self._dead) == self._size:
                    self._end()
            case agent.Admitted(rank):
                self._dead.discard(rank)
            case agent.Replaces(rank, pid):
                self._replaced[rank] = pid
                self._dead.discard(rank)
            case agent.LauncherExit() if name == self._used()[0]:
                # It ends without one of its hosts; then ranks can be started on the others.
                self._job_over_at = self._now + self._patience
            case agent.HostDown():
                self._lose(name)

    def _keep(self, name: str, line: bytes) -> bool:
        """Keeps an event for the next notebook; returns whether there is room."""
        self._news.append((name, line.decode()))
        self._news_nbytes += len(line)
        if self._news_nbytes <= _MOST_NEWS_NBYTES:
            return True
        self._lose_silent(name)
        return False

    def _lose_silent(self, name: str) -> None:
        self._news.append((name, agent.to_line(agent.HostSilent()).decode()))
        self._lose(name)

    def _lose(self, name: str) -> None:
        self._hosts[name].lose()
        self._note_running(name, 0)
        if not any(host.is_up for host in self._hosts.values()):
            self._end()

    def _look_at_time(self) -> None:
        if self._now >= self._stops_at:
            self.has_ended = True
        if not self._hosts or self._stops_at < _NEVER:
            return
        for name, host in self._hosts.items():
            if host.is_up and self._now >= host.last_sign + self._lease_seconds:
                self._lose_silent(name)
        if self._now >= self._job_over_at:
            self._job_over_at = _NEVER
            if all(self._hosts[name].is_up for name in self._used()):
                self._end()


def _check(found: int, limit: int) -> None:
    if not 0 <= found < limit:
        raise ValueError(f"expected a number below {limit}, found {found}")
