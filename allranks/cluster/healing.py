"""Replacing ranks that have died, and which variables their places keep."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from allranks.cluster.connection import AnswersSoFar, Connection
from allranks.cluster.failures import NEXT_CELL, death_lines
from allranks.cluster.recovery import Ask, Limit, Note, Recovery, Say, Seat, StartAgain, Step, Up
from allranks.cluster.state import NotRecovered, Seating, TookPlaces
from allranks.countdown import Countdown
from allranks.errors import ClusterLost, UsageError

HEALING = ("on", "ask", "off")

_STEP_SECONDS = 0.1


class RecoveryDriver:
    """Passes on to a recovery what happens, and does what it commands."""

    def __init__(
        self, ranks: Connection, recovery: Recovery, tell: Callable[[str], None], cells: int = 0
    ) -> None:
        self._ranks, self._recovery, self._tell, self._cells = ranks, recovery, tell, cells
        self._limit = Countdown(0.0)
        #: What it knows already: the ends of ranks, the ends of the job, and lost hosts; the ranks
        #: that have come, and those that have answered the last request.
        self._known: dict[str, set[Any]] = defaultdict(set)
        self._got: AnswersSoFar = {}

    def run(self, begin: Callable[[], None] = lambda: None) -> None:
        """Returns at the end of the recovery, which deaths or lost hosts begin, or the event
        ``begin``. Raises ClusterLost if it fails; all are killed then.
        """
        recovery = self._recovery
        with self._ranks.inbox.hearing_interrupts(), ExitStack() as self._request:
            self._pass_on()
            if recovery.step is Step.UP:  # what has ended the job ends also what begins now
                self._known["ended"].clear()
            begin()
            self._pass_on()
            while not recovery.is_over:
                presses = 0
                try:
                    presses = len(self._ranks.step(_STEP_SECONDS))
                except Exception as error:  # an error of the display, not of the recovery
                    self._tell(str(error))
                self._pass_on()
                for _ in range(presses):
                    recovery.interrupted()
                # Only after everything that has come: this process may have stood still.
                if self._limit.left() <= 0:
                    recovery.time_is_over()
                self._pass_on()
        if recovery.step is Step.LOST:
            self._lose()

    def _pass_on(self) -> None:
        self._obey()
        while self._pass_next():
            self._obey()

    def _pass_next(self) -> bool:
        """Passes on what has happened first; returns false if nothing has."""
        recovery, roster = self._recovery, self._ranks.roster
        for host in self._news("hosts", roster.lost_hosts):
            recovery.host_lost(host, roster.lost_hosts[host])
            return True
        if ends := list(self._news("died", (*roster.dead.values(), *roster.died_again.values()))):
            recovery.ranks_died(ends)
        elif (rank := next(self._news("came", sorted(roster.new)), None)) is not None:
            recovery.rank_came(rank, roster.hellos[rank].host)
        elif (rank := next(self._news("answered", self._got), None)) is not None:
            answer, _ = self._got[rank]
            recovery.rank_answered(rank, answer.content, answer.problem)
        elif ends := list(self._news("ended", roster.ends)):  # last: what was saved outlives it
            recovery.job_ended(ends)
        else:
            return False
        return True

    def _news(self, kind: str, found: Iterable[Any]) -> Iterator[Any]:
        known = self._known[kind]
        for each in found:
            if each not in known:
                known.add(each)
                yield each

    def _obey(self) -> None:
        recovery, ranks, roster = self._recovery, self._ranks, self._ranks.roster
        while recovery.commands:
            match recovery.commands.pop(0):
                case Seat(dead):
                    roster.apply(Seating())
                    self._known["came"].clear()
                    recovery.seated(ranks.seat_spares(list(dead)))
                case Ask(name, asked, arguments):
                    self._request.close()
                    self._known["answered"].clear()
                    asking = ranks.asking(asked, name, dict(arguments))
                    self._got = self._request.enter_context(asking)
                case Up(joined):
                    roster.apply(TookPlaces(joined))
                    if not roster.dead:
                        ranks.all_up()
                case Note(record):
                    ranks.note({"cells": self._cells, **record})
                case StartAgain():
                    self._request.close()
                    self._known.clear()
                    recovery.placed(ranks.relocate())
                case Limit(seconds):
                    self._limit = Countdown(seconds)
                case Say(text):
                    self._tell(text)

    def _lose(self) -> None:
        ranks, done = self._ranks, self._recovery
        ranks.roster.apply(NotRecovered(tuple(done.gone.values())))
        if done.starts_again:
            why = f"{death_lines(done.gone.values())}. All variables are lost, because the ranks "
            why += f"could not be started again: {done.problem}. {NEXT_CELL} The logs are in "
            why += ranks.log_dir
        else:
            why = ranks.loss_text(shown=True)
            why += f"\nIt could not be replaced: {done.problem}" if done.problem else ""
        ranks.close("lost", why)
        raise ClusterLost(why)


class AfterCells:
    """Which variables are kept after a cell; ``every`` is the least interval in seconds."""

    def __init__(self, names: Sequence[str], every: float = 0.0) -> None:
        if not every >= 0:
            raise UsageError(
                f"--every expected 0 seconds or more, found {every:g}. Type for example: --every 60"
            )
        self.names, self.every = tuple(names), every
        self._last = float("-inf")

    def due(self) -> bool:
        """Whether it is time; if so, the interval starts again."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True
