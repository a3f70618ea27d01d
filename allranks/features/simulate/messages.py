"""Messages between simulated ranks: which receive gets which message, and when."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from allranks.collectives.calls.deadlocks import OtherTag
from allranks.collectives.calls.sites import Site
from allranks.collectives.world.world import Group
from allranks.features.simulate.events import ANY, PostedReceive, RankEvent, SimulatedMessage
from allranks.features.simulate.scheduler import Scheduler

#: Objects up to this size can be named in pictures.
_SHORT_NBYTES = 200


class Mail:
    """The messages and receives of all ranks that are not matched yet.

    A receive gets the first message of its source that it takes, and a message goes to the first
    receive that takes it. A receive from any source is matched only when no rank can run: then all
    messages that it can get are known, and the schedule chooses.
    """

    def __init__(self, scheduler: Scheduler, before: Mail | None = None) -> None:
        self._scheduler = scheduler
        ranks = range(len(scheduler.tasks))
        self._messages: list[list[SimulatedMessage]] = [[] for _ in ranks]
        self._receives: list[list[PostedReceive]] = [[] for _ in ranks]
        self._open: set[int] = set()
        """Ranks with receives from any source."""
        self._count = 0
        if before is not None:
            self._continue(before)

    def _continue(self, before: Mail) -> None:
        """Takes what an earlier cell has left: as on real ranks, it is matched in a later one."""
        self._messages, self._receives = before._messages, before._receives
        self._open, self._count = before._open, before._count
        messages, receives = self.unmatched()
        for message in messages:
            message.began = message.arrives = 0.0
        for receive in receives:
            receive.began = 0.0

    def send(
        self,
        group: Group,
        dest: int,
        tag: int,
        data: Any,
        nbytes: int,
        site: Site,
        title: str,
        *,
        buffered: bool | None,
    ) -> SimulatedMessage:
        """Sends a message of the running rank; with ``buffered`` None the schedule decides."""
        scheduler, task = self._scheduler, self._scheduler.task
        self._count += 1
        message = SimulatedMessage(
            self._count, group, task.rank, dest, tag, data, nbytes, task.clock, True, site, title
        )
        message.buffered = scheduler.schedule.is_buffered(message) if buffered is None else buffered
        if message.buffered:
            message.arrives = self._arrival(message, task.clock)
            task.clock += scheduler.network.inside.latency / 2
        for receive in self._receives[dest]:
            if receive.takes(message):
                if receive.source != ANY:
                    self._receives[dest].remove(receive)
                    self._match(receive, message)
                    return message
                break
        self._messages[dest].append(message)
        return message

    def receive(self, group: Group, source: int, tag: int, site: Site, title: str) -> PostedReceive:
        """Posts a receive of the running rank."""
        task = self._scheduler.task
        receive = PostedReceive(task.rank, group, source, tag, task.clock, site, title)
        if source == ANY or not self._find(receive):
            self._receives[task.rank].append(receive)
            if source == ANY:
                self._open.add(task.rank)
        return receive

    def _find(self, receive: PostedReceive) -> bool:
        """Matches a receive from one source with a message that no earlier receive may get."""
        for message in self._messages[receive.rank]:
            if receive.takes(message):
                for earlier in self._receives[receive.rank]:
                    if earlier is receive:
                        break
                    if earlier.takes(message):
                        return False
                self._messages[receive.rank].remove(message)
                self._match(receive, message)
                return True
        return False

    def candidates(self, receive: PostedReceive) -> list[SimulatedMessage]:
        """The first message of each source that a receive takes, by source."""
        found: dict[int, SimulatedMessage] = {}
        for message in self._messages[receive.rank]:
            if message.source not in found and receive.takes(message):
                found[message.source] = message
        return [message for _, message in sorted(found.items())]

    def match_any_source(self, polling: Sequence[int]) -> bool:
        """Matches one receive from any source, or lets one of the ranks that poll go on.

        Returns False if nothing can be matched.
        """
        matches = self._possible_matches()
        first = next(matches, None)
        if first is None:
            return False
        chosen = self._scheduler.schedule.choose_match(chain((first,), matches), polling)
        if isinstance(chosen, int):
            self._scheduler.end_poll(chosen)
            return True
        receive, message = chosen
        earlier = self._receives[receive.rank]
        earlier = earlier[: earlier.index(receive)]
        free = (not any(one.takes(each) for one in earlier) for each in self.candidates(receive))
        receive.races = sum(free) > 1
        self._messages[receive.rank].remove(message)
        self._receives[receive.rank].remove(receive)
        self._match(receive, message)
        self._match_later(receive.rank)
        return True

    def _possible_matches(self) -> Iterator[tuple[PostedReceive, list[SimulatedMessage]]]:
        """The receives from any source, each with the messages that no earlier one takes."""
        for rank in sorted(self._open):
            receives = self._receives[rank]
            for at, receive in enumerate(receives):
                if receive.source != ANY:
                    continue
                found = [
                    message
                    for message in self.candidates(receive)
                    if not any(earlier.takes(message) for earlier in receives[:at])
                ]
                if found:
                    yield receive, found

    def unmatched(self) -> tuple[list[SimulatedMessage], list[PostedReceive]]:
        """The messages without a receive, and the receives without a message."""
        return list(chain(*self._messages)), list(chain(*self._receives))

    def other_tags(self, waits: Container[tuple[int, Site]]) -> list[OtherTag]:
        """For each receive that a rank waits for the first message that it would take with another
        tag. ``waits`` are the ranks that wait, each with the line of the receive.
        """
        messages, receives = self.unmatched()
        found = []
        for receive in receives:
            if (receive.rank, receive.site) not in waits:
                continue
            alike = replace(receive, tag=ANY)
            here = (one for one in messages if one.dest == receive.rank and alike.takes(one))
            if message := next(here, None):
                found.append(OtherTag(receive.rank, message.source, message.tag, receive.tag))
        return found

    @property
    def count(self) -> int:
        """How many messages were sent."""
        return self._count

    @property
    def used(self) -> bool:
        """Whether a message was sent, or a receive waits for one."""
        return self._count > 0 or any(self._receives)

    def _match_later(self, rank: int) -> None:
        # Receives that had to wait for this choice.
        receives = self._receives[rank]
        for receive in list(receives):
            if receive.source != ANY and self._find(receive):
                receives.remove(receive)
        if not any(receive.source == ANY for receive in receives):
            self._open.discard(rank)

    def cancel(self, receive: PostedReceive) -> None:
        if receive in self._receives[receive.rank]:
            self._receives[receive.rank].remove(receive)
            self._match_later(receive.rank)

    def take(self, message: SimulatedMessage) -> None:
        """Takes a message that a probe has found away from later receives."""
        self._messages[message.dest].remove(message)

    def put_back(self, message: SimulatedMessage) -> None:
        """Puts a message first again, which a probe has waited for."""
        message.receive = None
        self._messages[message.dest].insert(0, message)

    def match(self, receive: PostedReceive, message: SimulatedMessage) -> None:
        """Gives a receive a message that `take` has taken."""
        self._match(receive, message)

    def _match(self, receive: PostedReceive, message: SimulatedMessage) -> None:
        scheduler = self._scheduler
        receive.message, message.receive = message, receive
        if not message.buffered:
            message.arrives = self._arrival(message, max(message.began, receive.began))
        scheduler.wake(receive.rank)
        scheduler.wake(message.source)

    def _arrival(self, message: SimulatedMessage, began: float) -> float:
        return self._scheduler.network.arrival(
            message.source, message.dest, message.nbytes, began, pickled=message.pickled
        )

    def sent(self, message: SimulatedMessage) -> None:
        """Records the end of a send on the running rank."""
        task = self._scheduler.task
        begin, ready = message.began, message.began
        if not message.buffered and message.receive is not None:
            ready = min(message.arrives, max(begin, message.receive.began))
            task.clock = max(task.clock, message.arrives)
        self._scheduler.record(
            RankEvent(task.rank, "send", message.title, begin, ready, task.clock, message.dest,
                  message.nbytes, message.tag, message.number, message.group.number, message.site)
        )  # fmt: skip

    def received(self, receive: PostedReceive) -> None:
        """Records the end of a receive on the running rank."""
        task, message = self._scheduler.task, receive.message
        assert message is not None
        begin = task.clock
        task.clock = max(task.clock, message.arrives)
        sent = message.began if message.buffered else max(message.began, receive.began)
        payload = message.data if message.pickled and message.nbytes <= _SHORT_NBYTES else b""
        self._scheduler.record(
            RankEvent(task.rank, "receive", receive.title, begin, min(max(begin, sent), task.clock),
                  task.clock, message.source, message.nbytes, message.tag, message.number,
                  message.group.number, receive.site, receive.races, payload)
        )  # fmt: skip
