"""Replacing ranks that have died, and the variables that their places had kept."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from allranks.cluster.cells import CellRun, Cells
from allranks.cluster.connection import AnswersSoFar, Connection
from allranks.cluster.failures import NEXT_CELL, death_lines, plain
from allranks.cluster.members import MemberSlots
from allranks.cluster.recovered import text_of
from allranks.cluster.recovery import Ask, Limit, Note, Recovery, Say, Seat, StartAgain, Step, Up
from allranks.cluster.state import NotRecovered, Replaced, Seating, TookPlaces
from allranks.cluster.variables import OnRank
from allranks.countdown import Countdown
from allranks.errors import CellFailed, ClusterLost, UsageError
from allranks.records import requests

HEALING = ("on", "ask", "off")
keep_here = OnRank("allranks.collectives.ops.keeping", "keep")

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


class HealedCells(Cells):
    """Cells on ranks that are replaced when they die, and then have again what they had kept."""

    def __init__(self) -> None:
        super().__init__()
        self.healing = "on"
        self.news: list[str] = []
        """Lines about events between cells, which the next cell shows."""
        self.goes_on = 0
        """The commit that a training which a death has ended can go on from; else 0."""

    @property
    def can_heal(self) -> bool:
        """Whether ranks that die can be replaced, where and as these run."""
        return self._ranks.can_heal

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have died, and can be replaced."""
        return tuple(sorted(self._ranks.roster.dead))

    def heal_when(self, healing: str) -> None:
        """Sets when ranks that die are replaced: ``on``, ``ask`` for it, or ``off``.

        Raises:
            UsageError: ``healing`` is none of these.
        """
        if healing not in HEALING:
            raise UsageError(
                f"expected {', '.join(HEALING)}, found {healing!r}. Type: %distributed heal on"
            )
        self.healing = healing

    def _spares_others(self) -> bool:
        # Members of an ensemble begin again on fresh ranks, from what the store has.
        return self.healing != "off" and self._crew is None

    @property
    def _heals_by_itself(self) -> bool:
        waiting = self.state == "running" and self.healing == "on" and not self._ranks.roster.ends
        return waiting and bool(self._ranks.roster.dead)

    def is_up(self, tell: Callable[[str], None] | None = None) -> bool:
        """Handles events since the last cell; returns whether the ranks are up. With automatic
        healing it replaces dead ranks.
        """
        self._look()
        if self._heals_by_itself and not self.busy and not self._occupied:
            tell = tell or self.news.append
            tell(self._ranks.words.deaths_text())
            with suppress(ClusterLost):  # then the state is lost, with the reason
                tell(self.heal(tell))
        return self.state == "running"

    def _look(self) -> None:
        if self.state == "running":
            self._ranks.step(0)
            if self._ranks.roster.ends and not self.busy:
                self._ranks.lose()

    def _catch_up(self) -> None:
        """Handles events since the last cell; raises ClusterLost if the ranks are not up."""
        self.is_up()
        self._check_up()

    def _check_up(self) -> None:
        why = self._ranks.lost_because  # raises where nothing was ever started
        if self.state != "running":
            raise ClusterLost(
                why.replace(NEXT_CELL, "To start them again, type: .start()")
                or f"the ranks are {self.state}. "
                "Type: %distributed start   or, of a Cluster: .start()"
            )

    def heal(self, tell: Callable[[str], None] | None = None) -> str:
        """Replaces ranks that have died by new processes; returns a line about it.

        Args:
            tell: called with a line about each event; by default the next cell shows these lines.

        Raises:
            ClusterLost: the dead ranks could not be replaced, and all were killed.
            UsageError: the ranks run a cell, or none has died.
            KeyboardInterrupt: an interrupt during the replacement, which takes effect after it.
        """
        self._check_idle()
        if not self.dead:
            raise UsageError("expected ranks that have died, found all ranks alive")
        said, pressed = self._replace(tell or self.news.append)
        if pressed:
            # The ranks are complete again, and the user still expects an interrupt.
            self.news.append(said)
            raise KeyboardInterrupt
        return said

    def _heal_after(self, run: CellRun) -> None:
        if not self._heals_by_itself:
            return

        def tell(text: str) -> None:
            run.view.notice(text)
            run.view.refresh()

        try:
            dead = self.dead
            said, _ = self._replace(tell)  # an interrupt concerns the cell, which has ended
        except ClusterLost:
            # The cell's own failure would be hidden by the loss: show it as text.
            try:
                run.check()
            except CellFailed as failed:
                run.view.notice(plain(failed.text))
            raise
        for rank in set(dead).intersection(run.ranks):
            run.apply(Replaced(rank))
        run.view.notice(said)

    def _replace(self, tell: Callable[[str], None]) -> tuple[str, bool]:
        """Replaces dead ranks by new processes, in a fresh epoch; raises ClusterLost after it has
        killed all ranks. Returns a line about it, and whether an interrupt came meanwhile.
        """
        began = time.monotonic()
        self._await_abandoned()
        self._epoch.follow(self._ranks.epoch)
        done = self._new_recovery()
        self._run(done, tell)
        self._epoch.begin(done.epoch)
        return text_of(done, time.monotonic() - began), done.presses > 0

    def _restore(self, new: Collection[int], tell: Callable[[str], None]) -> Recovery:
        """New ranks take back what was kept in their places."""
        done = self._new_recovery(replaces=False)
        self._run(done, tell, lambda: done.ranks_are_new(new))
        return done

    def _continue(self, record: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        """Starts all ranks again, because another notebook has ended while it did that."""
        began = time.monotonic()
        for press in self._ranks.step(0):  # hosts may have been lost since: it begins with these
            self._ranks.inbox.put(press)
        done = Recovery.continued(record, self._ranks.places())
        self._run(done, tell, done.restarted)
        self._epoch.begin(done.epoch)
        tell(text_of(done, time.monotonic() - began))
        if done.presses:
            raise KeyboardInterrupt

    def _new_recovery(self, replaces: bool = True) -> Recovery:
        ranks = self._ranks
        hosts = {rank: hello.host for rank, hello in sorted(ranks.roster.hellos.items())}
        return Recovery(hosts, self._epoch.number, self._saved, ranks.can_relocate, replaces)

    def _run(
        self,
        recovery: Recovery,
        tell: Callable[[str], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        RecoveryDriver(self._ranks, recovery, tell, self.count).run(begin)
        self._saved, self.goes_on = recovery.own, recovery.goes_on

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[MemberSlots]:
        """Within, members run side by side, each on ``ranks_each`` ranks in a row."""
        self._catch_up()
        self._ranks.hooks.ensemble_started()
        self._check_idle()
        self._renew(self.news.append)
        told = self._ask_all(requests.MEMBERS, {"ranks_each": ranks_each})
        # Members begin again on fresh ranks, from what the store has: no death is healed meanwhile.
        crew = self._crew = MemberSlots(self._ranks, self.count, ranks_each)
        self._caller = threading.get_ident()
        for slot in crew.slots:
            slot.epoch.begin(max(told[rank]["epoch"] for rank in slot.ranks))
            slot.epoch.dirty = any(told[rank]["dirty"] for rank in slot.ranks)
        try:
            yield crew
        finally:
            self.count, self._crew = crew.cells, None
            if not self._ranks.closed:
                self._ranks.ask_soon(
                    requests.MEMBERS, {"ranks_each": 0}, lambda _: None, range(self._ranks.size)
                )


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
