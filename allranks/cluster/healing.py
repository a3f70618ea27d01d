"""Replacing ranks that have died, and the variables that their places had kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from allranks.cluster.cells import CellRun, Cells
from allranks.cluster.connection import Connection
from allranks.cluster.failures import NEXT_CELL, ProcessExit, ending, plain
from allranks.cluster.members import MemberSlots
from allranks.cluster.relocation import Relocation
from allranks.cluster.variables import OnRank
from allranks.countdown import Countdown
from allranks.errors import CellFailed, ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import label

HEALING = ("on", "ask", "off")
keep_here = OnRank("allranks.collectives.ops.keeping", "keep")

_REPLACE_SECONDS = 15.0
_SLOW_SECONDS = 2.0
_SETTLE_SECONDS = 0.3
_STEP_SECONDS = 0.1
_TRIES = 5
#: A model's library may have to be imported first.
_RESTORE_SECONDS = 120.0


class CannotReplace(Exception):
    """Dead ranks cannot be replaced, however often it is tried."""


class Replacement:
    """New processes for dead ranks, and for ranks that die meanwhile.

    ``epoch`` is one more for each new try, ``ends`` how the replaced ranks had ended, ``presses``
    the number of the notebook's interrupts meanwhile.
    """

    def __init__(self, ranks: Connection, epoch: int, tell: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.ends: dict[int, ProcessExit] = {}
        self.presses = 0
        self._ranks = ranks
        self._tell = tell

    def make(self) -> bool:
        """Replaces the ranks. The first interrupt waits for the end; the second one ends all ranks.

        Returns False if all ranks have to start again instead, because a host is lost or the ranks
        cannot be replaced. Raises ClusterLost if that is not possible; all are killed then.
        """
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        with ranks.inbox.hearing_interrupts():
            for epoch in range(self.epoch, self.epoch + _TRIES):
                self.epoch = epoch
                try:
                    problem = self._try()
                except CannotReplace as error:  # the next try would not help either
                    # The obstacle that earlier tries have met explains more than the time.
                    problem = "; ".join(filter(None, (problem, str(error))))
                    break
                if roster.lost_hosts:
                    return False
                if not roster.dead:
                    ranks.all_up()
                    return True
                if roster.ends:
                    break
                if problem:  # the death that caused it may be reported in a moment
                    self._wait(lambda: bool(roster.ends), _SETTLE_SECONDS)
        if ranks.can_relocate and not roster.ends and self.presses < 2:
            self._tell(f"{label(sorted(roster.dead))} could not be replaced: {problem}")
            return False
        roster.ends = roster.ends or list(roster.dead.values())
        why = f"{ranks.loss_text(shown=True)}\nIt could not be replaced: {problem}"
        ranks.close("lost", why)
        raise ClusterLost(why)

    def _try(self) -> str:
        """Tries to replace the ranks that are dead now; returns the obstacle, if any.

        Once one living rank has done its part, all have, and the new ranks belong to them. A rank
        that dies after that is replaced by the next try.
        """
        ranks, roster = self._ranks, self._ranks.roster
        dead, left = sorted(roster.dead), roster.alive
        roster.new.clear()
        roster.died_again.clear()
        seconds = _REPLACE_SECONDS + len(dead)
        if problem := ranks.seat_spares(dead):
            raise CannotReplace(problem)
        with ranks.asking(left, requests.HEAL, {"dead": dead, "epoch": self.epoch}) as got:

            def agreed() -> bool:
                return any(not answer.problem for answer, _ in got.values())

            def over() -> bool:
                answered = all(rank in got or rank in roster.dead for rank in left)
                came = all(rank in roster.new or rank in roster.died_again for rank in dead)
                return bool(roster.ends or roster.lost_hosts) or (
                    answered and (came or not agreed())
                )

            self._wait(over, seconds)
        if roster.lost_hosts:
            return ""
        problems = [answer.problem for answer, _ in got.values() if answer.problem]
        # Ranks that left because of another rank's error add nothing to the report.
        problem = min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")
        if not over():
            why = f"took over {seconds:g} s" if self.presses < 2 else "was interrupted twice"
            raise CannotReplace(f"replacing {label(dead)} {why}")
        if roster.ends or not agreed():
            return problem or "another rank has died meanwhile"
        if problem and not roster.died_again:
            raise CannotReplace(problem)
        for rank in dead:
            self.ends[rank] = roster.dead.pop(rank)
            roster.lines.pop(rank, None)
            if rank in roster.died_again:
                end = roster.dead[rank] = roster.died_again[rank]
                self._tell(f"rank {rank}, which was new, {ending(end.code, end.memory)}")
        for warning in {answer.content.get("warning", "") for answer, _ in got.values()} - {""}:
            self._tell(warning)
        return ""

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        dead = self._ranks.roster.dead
        known, began, slow = set(dead), time.monotonic(), False
        limit = Countdown(seconds)
        while not done() and limit.left() > 0 and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_STEP_SECONDS))
            except Exception as error:  # an error of the display, not of the replacement
                self._tell(str(error))
            for rank in sorted(dead.keys() - known):
                known.add(rank)
                self._tell(f"rank {rank} {dead[rank].how()}")
            if not slow and time.monotonic() > began + _SLOW_SECONDS:
                slow = True
                still = "still being replaced; interrupt twice to kill all ranks"
                self._tell(f"{label(sorted(known))}: {still}")


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
            tell(self._ranks.roster.deaths_text())
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
                or "the ranks are stopped. Type: %distributed start   or, of a Cluster: .start()"
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
            run.view.left(rank, "replaced")
        run.view.notice(said)

    def _replace(self, tell: Callable[[str], None]) -> tuple[str, bool]:
        """Replaces dead ranks by new processes, in a fresh epoch; raises ClusterLost after it has
        killed all ranks. Returns a line about it, and whether an interrupt came meanwhile.
        """
        began, hellos = time.monotonic(), self._ranks.roster.hellos
        before = {rank: hello.host for rank, hello in hellos.items()}
        self._await_abandoned()
        if self._ranks.roster.lost_hosts:
            return self._relocate(tell)
        self._epoch.follow(self._ranks.epoch)
        healed = Replacement(self._ranks, self._epoch.number + 1, tell)
        with self._ranks.inbox.hearing_interrupts():
            if not healed.make():
                return self._relocate(tell, healed.presses)
        self._epoch.begin(healed.epoch)
        dead = sorted(healed.ends)
        left = [rank for rank in range(self._ranks.size) if rank not in healed.ends]
        new = _came(dead, self._restore(set(dead) - set(self.dead)))
        moved = [
            f"; rank {r} is on {hellos[r].host} now" for r in dead if hellos[r].host != before[r]
        ]
        new += "".join(moved)
        kept = f"{label(left)} kept {'its' if len(left) == 1 else 'theirs'} " if left else ""
        return f"{label(dead)} {new}; {kept}({time.monotonic() - began:.1f} s)", healed.presses > 0

    def _relocate(self, tell: Callable[[str], None], presses: int = 0) -> tuple[str, bool]:
        """Starts all ranks again without the lost hosts; returns as `_replace`."""
        began, moved = time.monotonic(), Relocation(self._ranks, tell, presses)
        moved.make()
        self._epoch.begin(0)
        had = self._restore(moved.dead)
        self.goes_on = moved.goes_on
        return moved.text(had, time.monotonic() - began), moved.presses > 0

    def _restore_late(self, new: Collection[int]) -> None:
        """As `_restore`, where another notebook has replaced ranks and has ended before this."""
        if new:
            self.news.append(f"{label(sorted(new))} {_came(new, self._restore(new))}")

    def _restore(self, new: Iterable[int]) -> str:
        """New ranks take back what was kept in their places, also those that another death has kept
        from it. Returns what that is, as ``model and step kept 12 s ago``.
        """
        ask, all_ranks, new = self._ranks.ask, self._ranks.roster.alive, set(new)
        try:
            settled = ask(requests.SETTLE, {}, ranks=all_ranks, seconds=_RESTORE_SECONDS)
            told = {rank: content for rank, (content, _) in settled.items()}
            new |= {rank for rank, content in told.items() if content["new"]}
            old = (told[rank]["goes_on"] for rank in told.keys() - new)
            self.goes_on = min(old, default=0)
            # Each host has its own files, of which the last may be of a version that not all have.
            wanted = {
                "version": min(content["version"] for content in told.values()),
                "saved": sorted(self._saved & new),
            }
            self._saved -= new
            answers = ask(requests.RESTORE, wanted, ranks=new, seconds=_RESTORE_SECONDS).values()
        except UsageError as error:
            self.news.append(str(error))
            return ""
        found = [content for content, _ in answers if content["names"]]
        if not found:
            return ""
        seconds = max(content["seconds"] for content in found)
        ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"{listed(found[0]['names'])} kept {ago} ago"

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


def _came(ranks: Collection[int], had: str) -> str:
    """Returns that ranks were replaced, and what they have; ``had`` is what was restored."""
    are = "was replaced" if len(ranks) == 1 else "were replaced"
    return f"{are}, with {had}" if had else f"{are} and {have(len(ranks))} no variables"


def have(count: int) -> str:
    return "has" if count == 1 else "have"


def listed(names: Sequence[str]) -> str:
    """Returns names as ``model, optimizer and step``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
