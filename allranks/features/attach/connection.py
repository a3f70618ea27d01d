"""The connection of the notebook to ranks that another one has started."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allranks.cluster.connection import Connection
from allranks.cluster.driver import AnswersSoFar
from allranks.cluster.failures import ProcessExit
from allranks.cluster.sockets import RankSockets, closing_if_failed
from allranks.cluster.state import ClusterEvent, ClusterState, DiedBefore, HostLost, NotJoined
from allranks.countdown import Countdown
from allranks.errors import UsageError
from allranks.features.attach.requests import ATTACH
from allranks.features.attach.sessions import AttachedHostAgent
from allranks.records import limits, requests
from allranks.records.agent import Replaces
from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME, HostAgentConfig
from allranks.records.ranks import label
from allranks.records.wire import Answer, Query

DETACHED = "this notebook is detached from the ranks. Type: %distributed attach"
_REACH_SECONDS = 0.02
_JUST_ENDED = "the ranks have just ended. Type: %distributed start"


class EarlyEnds:
    """What has ended while this notebook attaches: it counts once the other ranks answer.

    ``events`` are in their order.
    """

    def __init__(self, roster: ClusterState) -> None:
        self._roster = roster
        self.events: list[ProcessExit | HostLost] = []

    def keep(self, event: ClusterEvent) -> bool:
        """Notes an end, or that another host has the place of a rank; returns whether the state of
        the ranks is not to change by it yet.
        """
        if isinstance(event, ProcessExit | HostLost):
            self._note_end(event)
            return True
        if isinstance(event, Replaces):
            self.events = [
                replace(early, ranks=tuple(r for r in early.ranks if r != event.rank))
                if isinstance(early, HostLost)
                else early
                for early in self.events
            ]
        return False

    def _note_end(self, event: ProcessExit | HostLost) -> None:
        end = event.end if isinstance(event, HostLost) else event
        # Without one of its hosts, MPI's job ends.
        known = end.rank == -1 and any(isinstance(other, HostLost) for other in self.events)
        if not known and not self._roster.is_no_news(end):
            self.events.append(event)

    @property
    def ends(self) -> list[ProcessExit]:
        """The ends of ranks, also those of lost hosts."""
        ends: list[ProcessExit] = []
        for event in self.events:
            if isinstance(event, HostLost):
                ends += [replace(event.end, rank=rank) for rank in event.ranks]
            elif not self._roster.is_outdated(event):
                ends.append(event)
        return ends

    @property
    def ranks(self) -> set[int]:
        """The ranks that have ended, also those whose places other processes are to take."""
        ended = {event.rank for event in self.events if isinstance(event, ProcessExit)}
        return ended | {end.rank for end in self.ends}


class AttachedConnection(Connection):
    """A set of ranks of another notebook, reachable once :meth:`attach` has returned."""

    starts_ranks = False

    def __init__(self, roster: ClusterState, *, taken: AttachedHostAgent, **options: Any) -> None:
        self._taken = taken
        super().__init__(roster, **options)
        # The ranks may still answer what another notebook has asked: begin with another number.
        self._numbers = itertools.count(secrets.randbits(31))
        #: What the notebook before has noted of its recovery.
        self.record: Mapping[str, Any] = {}

    def _open(self, *_: Any, **__: Any) -> tuple[RankSockets, HostAgentConfig, str]:
        taken = self._taken
        home = taken.config.session_dir
        place = taken.listening or (COMMANDS_AT_HOME.format(home), EVENTS_AT_HOME.format(home))
        wire = RankSockets(self.driver, self.hooks, place, taken.lease_seconds)
        self.driver.wire = wire
        with closing_if_failed(wire):
            wire.listen()
        return wire, taken.config, taken.folder

    def attach(self) -> dict[int, dict[str, Any]]:
        """Takes over the ranks; returns each living rank's answer about its last cell.

        Raises UsageError if a rank does not answer, or all have just ended; they stay detached,
        except new processes that no rank can join. If they are being started again, none answers.
        """
        taken, deliver = self._taken, self._agent_listener()
        early = EarlyEnds(self.roster)
        self.driver.early = early.keep
        try:
            taken.listen(deliver)
            hosts = taken.taken_hosts
            agent = taken if hosts is None else self._agents_of_hosts(deliver, hosts)
            self._agents.append(agent)
            self.record = agent.record
            with self._asking(ATTACH, {}) as (ask, got):
                if not agent.starts_again:
                    self._reach(early, ask, got)
            gone = {end.rank: end for end in early.ends} if got else {}
            told = {rank: answer.content for rank, (answer, _) in got.items() if rank not in gone}
            if not told and not agent.starts_again:
                raise UsageError(_JUST_ENDED)
        except BaseException:
            if not self.closed:
                self.release(DETACHED)
            raise
        # Ranks that died while no notebook was attached have sent no Hello to this one.
        for rank, end in gone.items():
            one = self.roster.hellos[min(told)]
            log, host = os.path.join(self.log_dir, f"rank-{rank}.log"), end.host or one.host
            hello = replace(one, rank=rank, local_rank=rank, host=host, pid=end.pid, log=log)
            self.apply(DiedBefore(hello))
            self.words.read_log(rank)
        with self._wire.lock:
            self.roster.set_phase("running")
            self.driver.early = None
            for event in early.events:
                self.apply(event)
        return told

    def _reach(self, early: EarlyEnds, ask: Query, got: AnswersSoFar) -> None:
        """Repeats a request until all answer: ranks may still be looking for this notebook."""
        limit = Countdown(limits.ATTACH_SECONDS)
        # There a rank that counts as dead too early would cost all variables.
        joining = Countdown(0 if self.roster.can_relocate else limits.REPLACED_SECONDS)
        reached, told, asked = set[int](), set[int](), set[int]()
        next_try = time.monotonic() + limits.REPEAT_SECONDS

        def living() -> set[int]:
            return set(range(self.size)) - early.ranks

        def silent_ranks() -> set[int]:
            return set(range(self.size)) - told - {end.rank for end in early.ends}

        while silent := silent_ranks():
            # Ranks look for this notebook twice a second, also at the relays of several hosts.
            if time.monotonic() > next_try:
                reached.clear()
                next_try = time.monotonic() + limits.REPEAT_SECONDS
            reached |= {rank for rank in silent - reached if self.send((rank,), ask)}
            self.step(_REACH_SECONDS)
            joins = any(answer.content["healing"] for answer, _ in got.values())
            is_over = limit.left() <= 0 and not (joins and joining.left() > 0)
            late = self._ask_to_heal(got, asked)
            told.clear()
            for rank, (answer, _) in got.items():
                # Soon a rank that joins with others knows whether that has succeeded. But MPI may
                # wait for one that has died without an end: then all start again.
                if is_over or not (answer.content["healing"] or rank in late):
                    told.add(rank)
            if is_over or got.keys() >= living():
                for rank in told:
                    self.apply(NotJoined(got[rank][0].content["died"]))
            if any(end.rank < 0 for end in early.ends):
                raise UsageError(_JUST_ENDED)
            # A host that is silent comes back, or is lost once its lease has ended.
            if is_over and (silent := silent_ranks()) and not self._wire.is_in_doubt(silent):
                if not living() and got.keys() <= {end.rank for end in early.ends}:
                    self.close()  # new processes are left, which no rank can join any more
                    raise UsageError(_JUST_ENDED)
                raise UsageError(
                    f"expected an answer of every rank, found that {label(silent)} did not answer "
                    f"within {limits.ATTACH_SECONDS:g} s: a call in C may be blocking Python "
                    "there. The ranks keep running. Try again: %distributed attach"
                )

    def _ask_to_heal(self, got: AnswersSoFar, asked: set[int]) -> set[int]:
        """The last notebook may have ended before it had asked all ranks to join with new ones, and
        all hosts to start these; the others wait for them in MPI. Asks them, once, and returns the
        ranks that have not confirmed it since.
        """
        told = {rank: answer.content for rank, (answer, _) in got.items()}
        heals = [content["heal"] for content in told.values() if content["healing"]]
        if not heals:
            return set()
        for agent in self._agents:
            agent.repeat_seats()
        last = max(heals, key=lambda heal: int(heal["epoch"]))
        late = {
            rank
            for rank, content in told.items()
            if max(content["epoch"], content["heal"].get("epoch", 0)) < last["epoch"]
        }
        if late - asked:
            self.ask_soon(requests.HEAL, last, self._note_warning, late - asked)
        asked |= late
        return late

    def _note_warning(self, answer: Answer) -> None:
        self.notices += filter(None, [answer.content.get("warning"), answer.problem])
