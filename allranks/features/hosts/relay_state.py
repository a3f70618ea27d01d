"""What one host's relay has and decides: takes events, and returns commands.

It calls no clock, socket, process or file: `allranks.features.hosts.relay` waits for the events,
and carries the commands out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from allranks.engine.host.events import Terminated, TimeCame
from allranks.errors import WireError
from allranks.records import agent
from allranks.records.config import HostAgentConfig
from allranks.records.frozen import frozen
from allranks.records.numbered import Frames
from allranks.records.wire import check_text, join_messages, split_messages, with_senders

#: The time for which messages of ranks wait to be sent together.
TICK_SECONDS = 0.05
#: The first bytes of messages that may wait.
_WAITING = tuple(f'["{name}"'.encode() for name in ("Output", "Points", "Timings", "Pulse"))
_LONGEST = max(map(len, _WAITING))
#: A larger message is sent by itself, because a message arrives as a whole.
_MOST_NBYTES = 64 << 10
#: In place of a message that cannot be read, of a process that the system does not name.
_UNREADABLE = b"what a rank has sent"
#: How the first record of a rank begins.
_HELLO = b'["Hello"'
#: The host agent has ended all ranks, and awaits its next configuration.
_AGAIN = agent.to_line(agent.Again())


@frozen
class NotebookWrote:
    """A command of the notebook: a word and its arguments.

    ``config`` begins with a configuration; ``again`` begins again with another one, when the host
    agent has ended the ranks. ``say`` is a line for the host agent, ``ranks`` a message for ranks.
    ``listen`` and ``connect`` test the network between the hosts. After ``stay``, the ranks stay
    when the notebook ends; ``disconnect`` and ``reconnect`` are its end, and the next one.
    ``stop``.
    """

    frames: Sequence[bytes]


@frozen
class NotebookLost:
    """The connection to the notebook is over."""

    why: str


@frozen
class StarterEnded:
    """What has started the relay has ended."""


@frozen
class AgentWrote:
    """Bytes of the host agent, which may end within a line."""

    data: bytes


@frozen
class AgentEnded:
    """The host agent has closed its output; before it begins again, nothing of it is left."""


@frozen
class Begun:
    """The host agent has its configuration."""


@frozen
class NotBegun:
    """The host cannot begin with its configuration."""

    problem: str


@frozen
class RankSent:
    """A message, and the process that has sent it; 0 if the system does not name it."""

    pid: int
    frames: Frames


@frozen
class RanksRead:
    """The messages that had come are read, or as many as are read at once."""


Event = (
    NotebookWrote
    | NotebookLost
    | StarterEnded
    | Terminated
    | AgentWrote
    | AgentEnded
    | Begun
    | NotBegun
    | RankSent
    | RanksRead
    | TimeCame
)


@frozen
class ToNotebook:
    """Sends the notebook a message."""

    frames: Frames


@frozen
class ToAgent:
    """Writes the host agent a line, which has no end of line here."""

    line: bytes


@frozen
class ToRanks:
    """Sends these ranks a message, if a notebook has them."""

    ranks: Sequence[int]
    frames: Sequence[bytes]


@frozen
class Begin:
    """Makes what a host has of one start, gives the host agent its configuration, then `Begun`."""

    config: HostAgentConfig


@frozen
class ReadRanks:
    """Reads all messages of ranks that have come, then `RanksRead`."""


@frozen
class Disconnect:
    """Disconnects the ranks, which keep what they would send."""


@frozen
class RemoveFolder:
    """Removes a folder of the start before."""

    path: str


@frozen
class ConnectRanks:
    """Connects the ranks to another notebook."""


@frozen
class OutliveNotebook:
    """The end of the notebook, or of the launcher, no longer ends the relay."""


@frozen
class TryNetwork:
    """Listens for other hosts, or connects to them, and reports the result to the notebook."""

    word: str
    argument: str


Command = (
    ToNotebook
    | ToAgent
    | ToRanks
    | Begin
    | ReadRanks
    | Disconnect
    | RemoveFolder
    | ConnectRanks
    | OutliveNotebook
    | TryNetwork
)


def news(event: agent.Event) -> ToNotebook:
    return ToNotebook([b"agent", agent.to_line(event)])


class Batching:
    """The messages of ranks that wait to be sent as one.

    Each rank sends its output and telemetry twenty times a second, and the notebook would wake for
    each message. So such messages wait for each other for up to `TICK_SECONDS`. All others are
    sent at once, after those that wait, so the order of each rank's messages stays.
    """

    def __init__(self) -> None:
        self._messages: list[Sequence[Any]] = []
        #: The process of each message; 0 if the system does not name it.
        self._senders: list[int] = []
        self._nbytes = 0
        self._sent_at = 0.0
        self._urgent = False

    @property
    def due_at(self) -> float:
        return self._sent_at + TICK_SECONDS if self._messages else float("inf")

    def is_due(self, now: float) -> bool:
        return self._urgent or now >= self.due_at

    def has_room(self, nbytes: int) -> bool:
        return self._nbytes + nbytes <= _MOST_NBYTES

    def add(self, pid: int, messages: Sequence[Sequence[Any]], nbytes: int) -> None:
        for message in messages:
            self._messages.append(message)
            self._senders.append(pid)
            head = memoryview(message[0])[:_LONGEST].tobytes()
            self._urgent = self._urgent or not head.startswith(_WAITING)
        self._nbytes += nbytes

    def take(self, now: float) -> list[ToNotebook]:
        """Returns what is to be sent: nothing, or one message."""
        messages, senders = self._messages, self._senders
        if not messages:
            return []
        self.forget(now)
        frames = join_messages(messages)
        return [ToNotebook(with_senders(frames, senders) if any(senders) else frames)]

    def forget(self, now: float) -> None:
        self._messages, self._senders = [], []
        self._nbytes, self._sent_at, self._urgent = 0, now, False


@dataclass
class NextStart:
    """How the host agent begins again, once its ranks have ended; ``lines`` are for it then."""

    config: HostAgentConfig
    lines: list[bytes] = field(default_factory=list)
    is_ready: bool = False


class RelayState:
    """The state of a relay, from its first message to the reason for its end, ``why``."""

    def __init__(self) -> None:
        self.why = ""
        #: While the host agent ends its ranks to begin again, and until it has begun.
        self.next: NextStart | None = None
        #: The line to each host agent if the ranks are to stay.
        self._stay = b""
        self._has_agent = False
        self._line = b""
        self._batching = Batching()
        self._now = 0.0
        self._commands: list[Command] = []

    @property
    def wake_at(self) -> float:
        """When messages have waited for long enough; infinity if none waits."""
        return self._batching.due_at

    def apply(self, event: Event, now: float) -> list[Command]:
        self._now, self._commands = now, []
        match event:
            case RankSent(pid, frames):
                self._add(pid, frames)
            case RanksRead():
                if self.next is not None and self.next.is_ready and not self.why:
                    self._begin_again(self.next.config)
                elif self.why or self._batching.is_due(now):
                    self._flush()
            case TimeCame():
                if self._batching.is_due(now):
                    self._flush()
            case NotebookWrote(frames):
                self._obey(*frames)
            case NotebookLost(why):
                self._end(f"lost the connection to the notebook: {why}")
            case StarterEnded():
                if not self._stay:
                    self._end("was lost: its launcher has ended")
            case Terminated():
                self._end("was ended by SIGTERM")
            case AgentWrote(data):
                self._read(data)
            case AgentEnded():
                self._has_agent = False
                if self.next is None:
                    self._end("was lost: its host agent has ended")
                elif not self.why:
                    self._get_ready(self.next)
            case Begun():
                lines = [*filter(None, [self._stay]), *(self.next.lines if self.next else ())]
                self._commands += map(ToAgent, lines)
                self._has_agent, self.next = True, None
            case NotBegun(problem):
                self._commands.append(news(agent.HostRefused(problem)))
                self._end("could not begin again" if self.next else "could not begin")
            case _:
                assert_never(event)
        return self._commands

    def _end(self, why: str) -> None:
        self.why = self.why or why

    def _flush(self) -> None:
        self._commands += self._batching.take(self._now)

    def _add(self, pid: int, frames: Frames) -> None:
        nbytes = sum(map(len, frames))
        if not self._batching.has_room(nbytes):
            self._flush()
        try:
            messages = split_messages(list(frames))
            for message in messages:
                check_text(bytes(message[0]))
            if self.next is not None:  # the notebook would take it for a rank of the next start
                messages = [one for one in messages if not bytes(one[0]).startswith(_HELLO)]
        except WireError as error:
            # Nothing of it: it would take other messages along.
            if pid:
                self._refuse(pid, str(error))
                return
            messages = [[_UNREADABLE]]  # for the notebook, which reports it
        if messages:
            self._batching.add(pid, messages, nbytes)

    def _refuse(self, pid: int, why: str) -> None:
        if self._has_agent and self.next is None:
            self._commands.append(ToAgent(agent.to_line(agent.End(why, pid))))

    def _read(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        if lines:
            self._flush()  # messages of a rank come before the news of its death
        for line in lines:
            self._commands.append(ToNotebook([b"agent", line]))
            if self.next is not None and not self.why and line == _AGAIN:
                self._get_ready(self.next)

    def _get_ready(self, start: NextStart) -> None:
        start.is_ready = True
        self._commands.append(ReadRanks())

    def _begin_again(self, config: HostAgentConfig) -> None:
        self._line = b""
        self._flush()
        self._commands += [
            Disconnect(),
            RemoveFolder(config.session_dir),
            news(agent.HostAgain(config.relocation)),
            Begin(config),
        ]

    def _obey(self, word: bytes = b"", first: bytes = b"", *rest: bytes) -> None:
        match word:
            case b"config":
                self._commands.append(Begin(HostAgentConfig.from_json(first.decode())))
            case b"again":
                begins = self.next is None
                self.next = NextStart(HostAgentConfig.from_json(first.decode()))
                if begins:
                    self._commands.append(ToAgent(agent.to_line(agent.BeginAgain())))
            case b"say" if self.next is not None:
                self.next.lines.append(first)
            case b"say":
                if self._has_agent:
                    self._commands.append(ToAgent(first))
            case b"ranks":
                self._commands.append(ToRanks(json.loads(first), rest))
            case b"listen" | b"connect":
                self._commands.append(TryNetwork(word.decode(), first.decode()))
            case b"stay":
                self._stay = first
                self._commands.append(OutliveNotebook())
                if self._has_agent and self.next is None:
                    self._commands.append(ToAgent(self._stay))
            case b"disconnect" | b"reconnect":
                self._batching.forget(self._now)
                self._commands.append(Disconnect())
                if word == b"reconnect":
                    # What the ranks send from now on is for this notebook.
                    self._commands += [ConnectRanks(), ToNotebook([b"reconnected"])]
            case b"stop":
                self._end("was told to stop")
            case _:  # the ranks here live on
                text = f"expected a command for the ranks of a host, found {word!r:.100}"
                self._commands.append(news(agent.Notice(text)))
