"""Passes on to a recovery what happens to the ranks, and does what it commands."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from allranks.cluster.cell_run import CellRun
from allranks.cluster.connection import Connection
from allranks.cluster.driver import AnswersSoFar
from allranks.cluster.failures import NEXT_CELL, death_lines, plain
from allranks.cluster.renewal import await_abandoned
from allranks.cluster.state import NotRecovered, Seating, StartsAgain, TookPlaces
from allranks.countdown import Countdown
from allranks.errors import CellFailed, CellInterrupted, ClusterLost
from allranks.features.heal.recovered import text_of, text_of_kept, text_of_new
from allranks.features.heal.recovery import (
    Ask,
    Limit,
    Note,
    RecoveryState,
    Say,
    Seat,
    Stage,
    StartAgain,
    Up,
)
from allranks.records.agent import Again

_STEP_SECONDS = 0.1


def replace(ranks: Connection, tell: Callable[[str], None]) -> tuple[str, bool]:
    """Replaces dead ranks by new processes, in a fresh epoch; raises ClusterLost after it has
    killed all ranks. Returns a line about it, and whether an interrupt came meanwhile.
    """
    began = time.monotonic()
    await_abandoned(ranks)
    ranks.roster.epoch.follow(ranks.roster.begun_epoch)
    return _run(ranks, _new_recovery(ranks), tell, began)


def replace_after(ranks: Connection, run: CellRun) -> str:
    """Replaces ranks that have died in a cell; returns a line about it."""

    def tell(text: str) -> None:
        run.view.notice(text)
        run.view.refresh()

    # The replacement gives up on a rank that is long in another request. An interrupt ends these.
    with suppress(KeyboardInterrupt, CellInterrupted):
        ranks.await_clients(ranks.roster.alive, tell)
    dead = set(ranks.roster.dead)
    if dead - run.told:  # since the end of the cell
        tell(ranks.words.deaths_text())
    try:
        said, _ = replace(ranks, tell)  # an interrupt concerns the cell, which has ended
    except ClusterLost:
        # The cell's own failure would be hidden by the loss: show it as text.
        try:
            run.check()
        except CellFailed as failed:
            run.view.notice(plain(failed.text))
        raise
    run.replaced(dead.intersection(run.ranks), said)
    return said


def go_on(
    ranks: Connection, tell: Callable[[str], None], record: Mapping[str, Any]
) -> tuple[str, bool]:
    """Starts all ranks again, because another notebook has ended while it did that. Returns as
    `replace` does.
    """
    began = time.monotonic()
    for press in ranks.step(0):  # hosts may have been lost since: it begins with these
        ranks.inbox.put(press)
    done = RecoveryState.continued(record, ranks.agent.hosts())
    return _run(ranks, done, tell, began, done.restarted)


def restore(ranks: Connection, tell: Callable[[str], None], replaced: Collection[int] = ()) -> str:
    """New ranks, by default all, take back what was kept in their places. Returns a line about it;
    "" if nothing was kept for all of them.
    """
    done = _new_recovery(ranks, replaces=False)
    new = replaced or range(ranks.size)
    RecoveryDriver(ranks, done, tell).run(lambda: done.ranks_are_new(new))
    return text_of_new(done, replaced) if replaced else text_of_kept(done)


def _run(
    ranks: Connection,
    recovery: RecoveryState,
    tell: Callable[[str], None],
    began: float,
    begin: Callable[[], None] = lambda: None,
) -> tuple[str, bool]:
    RecoveryDriver(ranks, recovery, tell).run(begin)
    ranks.roster.epoch.begin(recovery.epoch)
    return text_of(recovery, time.monotonic() - began), recovery.presses > 0


def _new_recovery(ranks: Connection, replaces: bool = True) -> RecoveryState:
    roster = ranks.roster
    hosts = {rank: hello.host for rank, hello in sorted(roster.hellos.items())}
    return RecoveryState(hosts, roster.epoch.number, roster.saved, roster.can_relocate, replaces)


def start_again(ranks: Connection) -> dict[str, list[int]]:
    """Starts all ranks again on the hosts that are left; returns the ranks of each, which is empty
    if no host is left. They are up once the roster misses none.
    """
    ranks.hooks.call_each(ranks.listeners.get(Again, ()), Again(), None)
    agents = ranks.agent
    # Before the hosts hear of it: what comes from then on is of the new ranks.
    if not agents.relocate(lambda hosts: ranks.apply(StartsAgain(hosts))):
        return {}
    try:
        for press in ranks.step(0):  # the last news of the ranks that end
            ranks.inbox.put(press)
    except Exception as error:  # of the display: the ranks already start again
        ranks.notices.append(str(error))
    return agents.hosts()


class RecoveryDriver:
    """Passes on to a recovery what happens, and does what it commands."""

    def __init__(
        self, ranks: Connection, recovery: RecoveryState, tell: Callable[[str], None]
    ) -> None:
        self._ranks, self._recovery, self._tell = ranks, recovery, tell
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
            if recovery.step is Stage.UP:  # what has ended the job ends also what begins now
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
        if recovery.step is Stage.LOST:
            self._lose()
        self._ranks.roster.saved, self._ranks.roster.goes_on = recovery.own, recovery.goes_on

    def _pass_on(self) -> None:
        self._obey()
        while self._pass_next():
            self._obey()

    def _pass_next(self) -> bool:
        """Passes on what has happened first; returns false if nothing has."""
        recovery, roster = self._recovery, self._ranks.roster
        ended = [*roster.ends]  # first: what came before these is taken, and no later ones are
        if not self._known["ended"].issuperset(ended):
            self._take_answers()
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
        elif ends := list(self._news("ended", ended)):  # last: what was saved outlives it
            recovery.job_ended(ends)
        else:
            return False
        return True

    def _take_answers(self) -> None:
        """Takes the answers that came before an end: the state of the ranks is ahead of them."""
        try:
            for press in self._ranks.step(0):
                self._ranks.inbox.put(press)
        except Exception as error:  # as in `run`
            self._tell(str(error))

    def _news(self, kind: str, found: Iterable[Any]) -> Iterator[Any]:
        known = self._known[kind]
        for each in [*found]:  # ranks may die meanwhile
            if each not in known:
                known.add(each)
                yield each

    def _obey(self) -> None:
        recovery, ranks, roster = self._recovery, self._ranks, self._ranks.roster
        while recovery.commands:
            match recovery.commands.pop(0):
                case Seat(dead):
                    ranks.apply(Seating())
                    self._known["came"].clear()
                    recovery.seated(ranks.agent.seat_spares(dead))
                case Ask(name, asked, arguments):
                    self._request.close()
                    self._known["answered"].clear()
                    asking = ranks.asking(asked, name, dict(arguments))
                    self._got = self._request.enter_context(asking)
                case Up(joined):
                    ranks.apply(TookPlaces(joined))
                    if not roster.dead:
                        ranks.all_up()
                case Note(record):
                    ranks.agent.note({"cells": roster.cells, **record})
                case StartAgain():
                    self._request.close()
                    self._known.clear()
                    recovery.placed(start_again(ranks))
                case Limit(seconds):
                    self._limit = Countdown(seconds)
                case Say(text):
                    self._tell(text)

    def _lose(self) -> None:
        ranks, done = self._ranks, self._recovery
        ranks.apply(NotRecovered(tuple(done.gone.values())))
        if done.starts_again:
            why = f"{death_lines(done.gone.values())}. All variables are lost, because the ranks "
            why += f"could not be started again: {done.problem}. {NEXT_CELL} The logs are in "
            why += ranks.log_dir
        else:
            why = ranks.loss_text(shown=True)
            why += f"\nIt could not be replaced: {done.problem}" if done.problem else ""
        ranks.close("lost", why)
        raise ClusterLost(why)
