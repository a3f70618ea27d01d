"""The one thread that changes the state of the ranks by what they and their host agents send.

It is the thread that receives from the ranks (`RankSockets`). It applies each event in the order of
arrival, whether or not another thread waits, and puts it into a queue. Threads that wait take it
from there, show it, and call features: nothing of users, features and views runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from allranks.cluster.failures import ProcessExit
from allranks.cluster.last_words import LastWords
from allranks.cluster.sockets import (
    DeathsKnown,
    Event,
    EventQueue,
    FromHostAgent,
    FromRank,
    RankSockets,
)
from allranks.cluster.state import Came, ClusterEvent, ClusterState, Deaths, HostLost
from allranks.errors import StartFailed
from allranks.records.agent import (
    Admitted,
    AgentExit,
    Exit,
    FolderMade,
    HostLeft,
    LauncherExit,
    LauncherText,
    Notice,
    Preloading,
    Replaces,
)
from allranks.records.agent import Event as AgentEvent
from allranks.records.telemetry import Pulse, Telemetry
from allranks.records.wire import (
    Answer,
    Died,
    Ends,
    EpochBegun,
    EpochEnded,
    Hello,
    Output,
    Record,
    Reply,
    Result,
)

#: The answers to a request that have come, by rank, and their payloads.
AnswersSoFar = dict[int, tuple[Answer, list[bytes]]]
_OF_CELLS = Output, Reply, Result, Telemetry
_TEXT_LENGTH = 20_000


class AwaitedRequest:
    """A request that a thread waits for, and its answers so far."""

    def __init__(self) -> None:
        self.answers = AnswersSoFar()
        self._came: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Ends the wait: there may be an answer, or an event of which the caller has to know."""
        self._came.put(None)

    def wait(self, seconds: float) -> None:
        """Returns at the next event, or after some seconds."""
        with suppress(Empty):
            self._came.get(timeout=seconds)
            while True:
                self._came.get_nowait()


class Driver:
    """Applies events to the state of one set of ranks; `inbox` then has them for other threads.

    What a notebook itself does to the state, it does with the lock of the ``wire``: while a thread
    has that, no event is applied.
    """

    def __init__(self, roster: ClusterState) -> None:
        self._roster = roster
        self.inbox = EventQueue()
        #: Set by who makes them, before they listen.
        self.wire: RankSockets
        self.words = LastWords(roster)
        self.launcher_text = ""
        #: Lines of hosts for the user.
        self.notices: list[str] = []
        #: The module that is preloaded now, and the ranks whose processes run.
        self.preloading, self.started = "", set[int]()
        #: Why ranks are about to end.
        self._reasons: dict[int, str] = {}
        #: Gets the ends of ranks first, if set; returns whether it keeps one.
        self.early: Callable[[ClusterEvent], bool] | None = None
        #: Those that come before the state is that of these ranks.
        self._waiting: list[Event] | None = []
        self._requests: dict[int, AwaitedRequest] = {}

    def begin(self) -> None:
        """Applies events from now on."""
        with self.wire.lock:
            waiting, self._waiting = self._waiting or [], None
            for event in waiting:
                self.put(event)

    @contextmanager
    def requesting(self, number: int) -> Iterator[AwaitedRequest]:
        """Within, the answers to a request of this number are noted as they come."""
        self._requests[number] = made = AwaitedRequest()
        try:
            yield made
        finally:
            del self._requests[number]

    def put(self, event: Event) -> None:
        """Applies an event, and passes it on; called in the thread of the sockets."""
        try:
            self._read_logs(event)
        finally:  # a death counts, also if its log cannot be read
            with self.wire.lock:
                self._put(event)

    def _put(self, event: Event) -> None:
        if self._waiting is not None:
            self._waiting.append(event)
            return
        if isinstance(event, FromRank):
            self._take(event.record, event.payloads)
        elif isinstance(event, FromHostAgent):
            self._take_of_agent(event.event, event.host)
        self.inbox.put(event)
        if not (isinstance(event, FromRank) and isinstance(event.record, _OF_CELLS)):
            for request in [*self._requests.values()]:
                request.wake()

    def _read_logs(self, event: Event) -> None:
        """Reads what `LastWords` needs for an event, without the lock: a disk may be slow."""
        match event:
            case FromRank(Hello() as hello):
                self.words.measure_log(hello)
            case FromHostAgent(Exit(rank)):
                self.words.read_log(rank)
            case FromHostAgent(HostLeft(), host):
                for rank in self._ranks_on(host):
                    self.words.read_log(rank)

    def _ranks_on(self, host: str) -> list[int]:
        return sorted(rank for rank, name in [*self.wire.host_of.items()] if name == host)

    def _take(self, record: Record, payloads: list[bytes]) -> None:
        match record:
            case Pulse(cell=cell, rank=rank, line=line):
                self.words.note_line(cell, rank, line)
            case Output(rank=rank, log_nbytes=nbytes):
                if nbytes:
                    self.words.sent_nbytes[rank] = nbytes
            case Reply(rank=rank):
                self.words.nbytes_before[rank] = self.words.sent_nbytes.get(rank, 0)
                if self._roster.cell is not None:
                    self._roster.cell.apply(record)
            case Hello() | EpochBegun() | EpochEnded():
                self.apply(record)
            case Ends(rank=rank, why=why):
                self._reasons[rank] = why
            case Answer(request=number, rank=rank):
                if (request := self._requests.get(number)) is not None:
                    request.answers[rank] = record, payloads

    def _take_of_agent(self, event: AgentEvent, host: str) -> None:
        match event:
            case FolderMade():
                self._listen()
            case Preloading(module):
                self.preloading = module
            case Admitted(rank):
                self.started.add(rank)
            case LauncherText(text):
                self.launcher_text = (self.launcher_text + text)[-_TEXT_LENGTH:]
            case Notice(text):
                self.notices.append(text)
            case Replaces():
                self.apply(event)
            case HostLeft():
                self.apply(HostLost(ProcessExit.of(event, host), tuple(self._ranks_on(host))))
            case Exit() | LauncherExit() | AgentExit():
                end = ProcessExit.of(event, host)
                why = self._reasons.pop(end.rank, "")
                self.apply(replace(end, reason=why) if why and end.code >= 0 else end)

    def _listen(self) -> None:
        try:
            self.wire.listen()
        except StartFailed as error:
            self.inbox.put(error)

    def apply(self, event: ClusterEvent) -> None:
        """Applies an event to the state of the ranks; also one that this notebook makes."""
        with self.wire.lock:
            if self.early is not None and self.early(event):
                return
            for found in self._roster.apply(event):
                match found:
                    case Came(hello):
                        self.words.begin(hello)
                    case Deaths():
                        self._announce(found)

    def _announce(self, deaths: Deaths) -> None:
        """Tells the ranks that are left, before a recovery that follows tells them anything."""
        alive = self._roster.alive
        try:
            for end in deaths.ends if alive else ():
                self.wire.send(alive, Died(end.rank, self.words.death_text(end)))
        finally:
            # Each death is shown once: a replacement that died as well has no cell.
            self.inbox.put(DeathsKnown(deaths.ends, bool(alive) and not deaths.again))
