"""Runs cells on the ranks: one after the other, or an ensemble's members side by side."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from allranks.cluster.connection import Connection
from allranks.cluster.failures import CellRecord, ExitReport, ending
from allranks.cluster.run import CellRun, View
from allranks.cluster.sharing import DetachedCell
from allranks.cluster.variables import HiddenView, pack
from allranks.cluster.wire import AnswersSoFar, InterruptRequested
from allranks.errors import ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.wire import (
    Interrupt,
    Output,
    Reply,
    Result,
    RunCell,
    RunMember,
)


@dataclass
class Slot:
    """Some ranks in a row, and the member that they run now, if they do.

    ``epoch`` is that of the world that they are by themselves; where ``dirty``, the next member
    must have another one.
    """

    ranks: tuple[int, ...]
    member: int | None = None
    cell: int = 0
    epoch: int = 0
    dirty: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)


class MemberSlots:
    """The slots of one ensemble on one set of ranks.

    Args:
        ranks: the connection to them.
        cells: how many cells they have been sent.
        ranks_each: how many ranks a slot has; it divides their number.
    """

    def __init__(self, ranks: Connection, cells: int, ranks_each: int) -> None:
        self.ranks = ranks
        self.cells = cells
        self.slots = [
            Slot(tuple(range(first, first + ranks_each)))
            for first in range(0, ranks.size, ranks_each)
        ]
        #: Takes what a slot's ranks tell of the member that they run.
        self.deliver: Callable[[MemberSlots, Slot, CellRecord, list[bytes]], None] = lambda *_: None

    def free(self) -> Slot | None:
        """Returns a slot that runs nothing."""
        return next((slot for slot in self.slots if slot.member is None), None)

    def running(self, member: int) -> Slot | None:
        """Returns the slot that runs a member."""
        return next((slot for slot in self.slots if slot.member == member), None)

    def at_work(self) -> list[Slot]:
        """Returns the slots that run a member."""
        return [slot for slot in self.slots if slot.member is not None]

    def start(
        self,
        slot: Slot,
        member: int,
        values: dict[str, Any],
        *,
        ensemble: str,
        source: str,
        number: int,
        limit_nbytes: int,
        shared: bool,
    ) -> None:
        """Sends a member to a slot that is free.

        Raises:
            UsageError: its values cannot be pickled.
        """
        payload = pack(values, "a rank")
        slot.epoch += slot.dirty
        slot.dirty = False
        self.cells += 1
        slot.member, slot.cell, slot.replies = member, self.cells, {}
        record = RunMember(
            cell=self.cells,
            member=member,
            ensemble=ensemble,
            source=source,
            number=number,
            label=f"member {member}",
            limit_nbytes=limit_nbytes,
            ranks_each=len(slot.ranks),
            epoch=slot.epoch,
            shared=shared,
        )
        self.ranks.send(slot.ranks, record, payload)

    def interrupt(self, slot: Slot) -> None:
        """Interrupts the member that a slot runs, on the ranks that have not left it."""
        pending = [rank for rank in slot.ranks if rank not in slot.replies]
        self.ranks.send(pending, Interrupt(slot.cell))

    def take(self, record: CellRecord, payloads: list[bytes]) -> bool:
        """Handles a record if it is a member's; returns whether it is."""
        for slot in self.slots:
            if slot.member is not None and slot.cell == record.cell:
                if isinstance(record, Reply):
                    slot.replies[record.rank] = record
                    slot.dirty = slot.dirty or record.dirty
                self.deliver(self, slot, record, payloads)
                return True
        return False

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Within, :meth:`attend` counts the notebook's interrupts, which raise nothing."""
        with self.ranks.inbox.hearing_interrupts():
            yield

    def attend(self, seconds: float) -> int:
        """Handles what comes within ``seconds``; returns how often the notebook was interrupted."""
        return len(self.ranks.step(seconds))

    @contextmanager
    def awaiting(self) -> Iterator[Callable[[float], Awaitable[int]]]:
        """Within, a coroutine can await what :meth:`attend` does."""
        with self.ranks.inbox.waking() as next_event:

            async def attend(seconds: float) -> int:
                await next_event(seconds)
                return self.attend(0)

            yield attend


_REPLACE_SECONDS = 15.0
_SLOW_SECONDS = 2.0
_SETTLE_SECONDS = 0.3
_STEP_SECONDS = 0.1
_TRIES = 5


class Replacement:
    """New processes for the ranks that are dead, and for those that die meanwhile.

    Args:
        ranks: the connection to all of them.
        epoch: the number of the epoch that begins with the new ones, or one more for each new try.
        tell: called with what happens meanwhile.

    Attributes:
        epoch: the number of the epoch that has begun.
        ends: how the ranks that were replaced had ended.
        presses: how often the notebook was interrupted meanwhile.
    """

    def __init__(self, ranks: Connection, epoch: int, tell: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.ends: dict[int, ExitReport] = {}
        self.presses = 0
        self._ranks = ranks
        self._tell = tell

    def make(self) -> None:
        """Replaces the ranks. An interrupt is heard when it has; the second one ends all ranks.

        Raises:
            ClusterLost: they could not be replaced, and all were killed.
        """
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        with ranks.inbox.hearing_interrupts():
            for epoch in range(self.epoch, self.epoch + _TRIES):
                self.epoch = epoch
                try:
                    problem = self._try()
                except TimeoutError as error:  # who did not hear this will not hear the next
                    problem = str(error)
                    break
                if not roster.dead:
                    ranks.all_up()
                    return
                if roster.ends:
                    break
                if problem:
                    self._wait(lambda: bool(roster.ends), _SETTLE_SECONDS)
        roster.ends = roster.ends or list(roster.dead.values())
        why = f"{ranks.loss(shown=True)}\nIt could not be replaced: {problem}"
        ranks.close("lost", why)
        raise ClusterLost(why)

    def _try(self) -> str:
        """Tries to replace the ranks that are dead now; returns what was in the way, if anything.

        Once one of those that live has done its part all of them have, and the new ones belong to
        them. A rank that dies after that is replaced by the next try.

        Raises:
            TimeoutError: they did not come to an end.
        """
        ranks, roster = self._ranks, self._ranks.roster
        dead, left = sorted(roster.dead), roster.left
        roster.fresh.clear()
        roster.again.clear()
        seconds = _REPLACE_SECONDS + len(dead)
        with ranks.asking(left, requests.HEAL, {"dead": dead, "epoch": self.epoch}) as got:

            def agreed() -> bool:
                return any(not answer.problem for answer, _ in got.values())

            def over() -> bool:
                answered = all(rank in got or rank in roster.dead for rank in left)
                came = all(rank in roster.fresh or rank in roster.again for rank in dead)
                return bool(roster.ends) or (answered and (came or not agreed()))

            self._wait(over, seconds)
        problem = _problem(got)
        if not over():
            why = f"took over {seconds:g} s" if self.presses < 2 else "was interrupted twice"
            raise TimeoutError(f"replacing {label(dead)} {why}")
        if roster.ends or not agreed():
            return problem or "another rank has died meanwhile"
        if problem:
            raise TimeoutError(problem)
        for rank in dead:
            self.ends[rank] = roster.dead.pop(rank)
            roster.lines.pop(rank, None)
            if rank in roster.again:
                end = roster.dead[rank] = roster.again[rank]
                self._tell(f"rank {rank}, which was new, {ending(end.code, end.memory)}")
        for warning in {answer.content.get("warning", "") for answer, _ in got.values()} - {""}:
            self._tell(warning)
        return ""

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Handles events until ``done``, the time is over, or the second interrupt."""
        dead = self._ranks.roster.dead
        known, began, slow = set(dead), time.monotonic(), False
        while not done() and time.monotonic() < began + seconds and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_STEP_SECONDS))
            except Exception as error:  # it concerns no rank's place
                self._tell(str(error))
            for rank in sorted(dead.keys() - known):
                known.add(rank)
                self._tell(f"rank {rank} {ending(dead[rank].code, dead[rank].memory)}")
            if not slow and time.monotonic() > began + _SLOW_SECONDS:
                slow = True
                still = "still being replaced; interrupt twice to kill all ranks"
                self._tell(f"{label(sorted(known))}: {still}")


def _problem(got: AnswersSoFar) -> str:
    problems = [answer.problem for answer, _ in got.values() if answer.problem]
    # Those that were made to leave by another one's error have nothing to tell.
    return min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")


_rank_of = attrgetter("rank")
_DETACHED_SECONDS = 10.0
"""How long the next cell waits for one that was interrupted and left."""
_REPLY_SECONDS = 1.0
"""After this time the ranks are asked whether they are still in it: a reply may be lost."""


class Cells:
    """Numbers the cells, sends them, and hands on what ranks tell of the one that runs.

    Between a cell that has left its communicator unusable and the next one, the ranks move to a
    fresh one. What is written when its cell has ended is shown with the next one.
    """

    _ranks: Connection

    def __init__(self) -> None:
        self.late: list[Output] = []
        self._running: CellRun | None = None
        self._left: CellRun | None = None
        self._crew: MemberSlots | None = None
        self._number = 0
        self._epoch = 0
        self._dirty = False

    def begin(self, ranks: Connection) -> None:
        """Starts to use these ranks, which are new."""
        self._ranks = ranks
        self._epoch, self._dirty, self._left = 0, False, None
        ranks.of_death = self._take_death
        self.late.clear()

    def take_over(self, ranks: Connection, left: DetachedCell) -> None:
        """Starts to use these ranks, which another notebook has started."""
        self.begin(ranks)
        self._number, self._epoch, self._dirty = left.cell, left.epoch, left.dirty
        if left.members:
            self._end_members(left)

    def _end_members(self, left: DetachedCell) -> None:
        """Interrupts the members of an ensemble whose notebook is gone."""
        for rank, cell in left.members.items():
            self._ranks.send((rank,), Interrupt(cell))
            self._ranks.ask_soon(requests.SEEN, {"cell": cell}, lambda _: None, (rank,))
        deadline = time.monotonic() + _DETACHED_SECONDS
        while (busy := self._not_idle(left.members)) and time.monotonic() < deadline:
            self._ranks.wait_until(lambda: False, _REPLY_SECONDS / 4)
        if busy:
            raise UsageError(
                f"expected idle ranks, found {label(busy)} still in a member of an ensemble that "
                "was interrupted. Try again: %distributed attach   or type: %distributed restart"
            )
        self._dirty = True
        for rank, cell in left.members.items():
            self._ranks.ask_soon(requests.SEEN, {"cell": cell}, lambda _: None, (rank,))
        self._ask(requests.MEMBERS, {"ranks_each": 0})

    def follow(self, run: CellRun) -> None:
        """Shows a cell from now on that another notebook has sent."""
        self._running = run

    def show_late(self, view: View) -> None:
        """Shows what was written between cells."""
        self._show_late(view)

    @property
    def busy(self) -> bool:
        """Whether a cell or a crew is under way."""
        return self._running is not None or self._crew is not None

    @property
    def count(self) -> int:
        """How many cells these ranks have been sent, by any notebook."""
        return self._number

    @property
    def running(self) -> CellRun | None:
        """The cell that is under way, if one is."""
        return self._running if self._running is not None and self._running.pending else None

    def check_idle(self) -> None:
        """Raises where another cell is under way: one that is awaited lets its event loop run.

        Raises:
            UsageError: the ranks run a cell or an ensemble.
        """
        if self._running is not None:
            if not self._running.settled():
                raise UsageError(
                    "expected idle ranks, found them running a cell. Wait for its end, or "
                    "interrupt it: cluster.interrupt()"
                )
            # An interrupt came before the wait for it began.
            self.end(self._running)
        if self._crew is not None:
            raise UsageError(
                "expected idle ranks, found them running an ensemble. Wait for its end, or type: "
                "runs.stop()"
            )

    def prepare(self, view: View) -> int:
        """Makes the ranks ready for another cell, shown in ``view``; returns its number.

        Ranks may die meanwhile.
        """
        self._show_late(view)
        self._renew()
        self._number += 1
        return self._number

    def send(self, cell: RunCell, run: CellRun, *payloads: bytes) -> None:
        """Sends a cell to the ranks of ``run``, all of them or none."""
        self._running = run
        self._ranks.send(run.ranks, cell, *payloads)

    def end(self, run: CellRun) -> None:
        """Records that a cell has ended, with or without an error."""
        self._running = None
        self._dirty = self._dirty or run.dirty

    @contextmanager
    def attended(self, run: CellRun) -> Iterator[None]:
        """Interrupts the cell if an exception ends the wait for it."""
        try:
            yield
        except BaseException:
            self._running, self._left = None, run
            self._ranks.hooks.cell_abandoned()
            if not self._ranks.closed:
                run.interrupt()
            raise

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[MemberSlots]:
        """Within, members of an ensemble run side by side, each on ``ranks_each`` ranks in a row.

        Raises:
            UsageError: the ranks run a cell or another ensemble.
        """
        self.check_idle()
        self._renew()
        told = self._ask(requests.MEMBERS, {"ranks_each": ranks_each})
        self._crew = MemberSlots(self._ranks, self._number, ranks_each)
        for slot in self._crew.slots:
            slot.epoch = max(told[rank]["epoch"] for rank in slot.ranks)
            slot.dirty = any(told[rank]["dirty"] for rank in slot.ranks)
        # Members begin again on fresh ranks, from what the store has.
        self._ranks.in_crew = True
        try:
            yield self._crew
        finally:
            self._number = self._crew.cells
            self._crew = None
            self._ranks.in_crew = False
            if not self._ranks.closed:
                self._ranks.ask_soon(
                    requests.MEMBERS, {"ranks_each": 0}, lambda _: None, range(self._ranks.size)
                )

    def interrupt(self) -> bool:
        """Interrupts what is under way; returns whether something was."""
        if self._crew is not None:
            self._ranks.inbox.put(InterruptRequested())
            return True
        if self._running is None:
            return False
        self._running.press()
        return True

    def take(self, record: CellRecord, payloads: list[bytes]) -> None:
        """Handles a record of a cell."""
        if self._crew is not None and self._crew.take(record, payloads):
            return
        if self._running is not None and record.cell == self._running.cell:
            if not isinstance(record, Result):
                self._running.take(record, payloads)
            return
        if isinstance(record, Output) and record.entries:
            self.late.append(record)
            if self._running is not None:
                # The rank had not begun this cell yet: what it writes in it comes after.
                self._show_late(self._running.view)
        elif isinstance(record, Reply) and self._left and record.cell == self._left.cell:
            self._left.replies[record.rank] = record

    def _take_death(self, end: ExitReport) -> None:
        if self._running is not None:
            self._running.died(end)
        if self._left is not None:
            self._left.died(end)

    @property
    def occupied(self) -> bool:
        """Whether ranks are still in a cell that was interrupted, or may be."""
        return self._left is not None and not self._left.settled()

    def heal(self, tell: Callable[[str], None]) -> Replacement:
        """Has new processes take the place of ranks that have died, in a fresh epoch.

        Raises:
            UsageError: a rank is still in a cell that was interrupted.
            ClusterLost: they could not be replaced, and all were killed.
        """
        if self._left is not None:
            self._see_off(self._left)
        healed = Replacement(self._ranks, self._epoch + 1, tell)
        healed.make()
        self._epoch = healed.epoch
        self._dirty = False
        return healed

    def _show_late(self, view: View) -> None:
        if isinstance(view, HiddenView):
            return
        for rank, batches in groupby(sorted(self.late, key=_rank_of), key=_rank_of):
            notice: list[Any] = ["notice", "written after its cell had ended:"]
            late = [notice, *(entry for batch in batches for entry in batch.entries)]
            view.output(Output(rank, 0, tuple(late), 0, 0, 0))
        self.late.clear()

    def _see_off(self, left: CellRun) -> None:
        """Waits until all ranks have left a cell that was interrupted.

        Raises:
            UsageError: a rank stays in it.
        """
        deadline = time.monotonic() + _DETACHED_SECONDS
        self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        while not left.settled() and (busy := self._in_it(left)):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"expected idle ranks, found {label(busy)} still in a cell that "
                    "was interrupted. Wait for its end, or type: %distributed restart"
                )
            self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        # It is unknown how a rank has left it whose reply was lost.
        self._dirty = self._dirty or left.dirty or bool(left.pending)
        self._left = None

    def _in_it(self, left: CellRun) -> list[int]:
        return self._not_idle(left.pending)

    def _not_idle(self, ranks: Collection[int]) -> list[int]:
        told = self._ranks.ask(requests.STATUS, {}, ranks=ranks, seconds=1.0, strict=False)
        idle = {rank for rank, (content, _) in told.items() if content["state"] == "idle"}
        return [rank for rank in ranks if rank not in idle]

    def _renew(self) -> None:
        if self._left is not None:
            self._see_off(self._left)
        # Not without all ranks: those that are left can run what needs no others.
        if self._dirty and not self._ranks.roster.dead:
            self._epoch += 1
            try:
                self._ask(requests.RENEW, {"epoch": self._epoch})
            except UsageError:
                if not self._ranks.roster.dead:
                    raise
                return  # those that take the places of the dead begin an epoch with the others
            self._dirty = False

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[int, dict[str, Any]]:
        answers = self._ranks.ask(name, arguments, ranks=range(self._ranks.size))
        return {rank: content for rank, (content, _) in answers.items()}
