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
    """A row of ranks, and the member that they run now, if any. ``epoch`` is that of their own
    world. After a member that left it ``dirty``, the next one needs another epoch.
    """

    ranks: tuple[int, ...]
    member: int | None = None
    cell: int = 0
    epoch: int = 0
    dirty: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)


class MemberSlots:
    """The slots of one ensemble on one set of ranks. ``cells`` is the number of cells sent to the
    ranks so far; ``ranks_each`` divides the number of ranks.
    """

    def __init__(self, ranks: Connection, cells: int, ranks_each: int) -> None:
        self.ranks = ranks
        self.cells = cells
        self.slots = [
            Slot(tuple(range(first, first + ranks_each)))
            for first in range(0, ranks.size, ranks_each)
        ]
        #: Called with the records of a slot's ranks about their member.
        self.deliver: Callable[[MemberSlots, Slot, CellRecord, list[bytes]], None] = lambda *_: None

    def free(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.member is None), None)

    def running(self, member: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.member == member), None)

    def at_work(self) -> list[Slot]:
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
        # Only the ranks that have not left the member.
        pending = [rank for rank in slot.ranks if rank not in slot.replies]
        self.ranks.send(pending, Interrupt(slot.cell))

    def take(self, record: CellRecord, payloads: list[bytes]) -> bool:
        """Handles a record of a member; returns false for any other record."""
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
        # Within, `attend` counts the notebook's interrupts instead of raising them.
        with self.ranks.inbox.hearing_interrupts():
            yield

    def attend(self, seconds: float) -> int:
        """Handles events within ``seconds``; returns the number of the notebook's interrupts."""
        return len(self.ranks.step(seconds))

    @contextmanager
    def awaiting(self) -> Iterator[Callable[[float], Awaitable[int]]]:
        """Within, `attend` can be awaited."""
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
    """New processes for dead ranks, and for ranks that die meanwhile.

    ``epoch`` is one more for each new try, ``ends`` how the replaced ranks had ended, ``presses``
    the number of the notebook's interrupts meanwhile.
    """

    def __init__(self, ranks: Connection, epoch: int, tell: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.ends: dict[int, ExitReport] = {}
        self.presses = 0
        self._ranks = ranks
        self._tell = tell

    def make(self) -> None:
        """Replaces the ranks. The first interrupt waits for the end; the second one ends all ranks.

        Raises ClusterLost if they cannot be replaced; all are killed then.
        """
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        with ranks.inbox.hearing_interrupts():
            for epoch in range(self.epoch, self.epoch + _TRIES):
                self.epoch = epoch
                try:
                    problem = self._try()
                except TimeoutError as error:  # the next try would have no answer either
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
        """Tries to replace the ranks that are dead now; returns the obstacle, if any.

        Once one living rank has done its part, all have, and the new ranks belong to them. A rank
        that dies after that is replaced by the next try.
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
        dead = self._ranks.roster.dead
        known, began, slow = set(dead), time.monotonic(), False
        while not done() and time.monotonic() < began + seconds and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_STEP_SECONDS))
            except Exception as error:  # an error of the display, not of the replacement
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
    # Ranks that left because of another rank's error add nothing to the report.
    return min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")


_rank_of = attrgetter("rank")
_DETACHED_SECONDS = 10.0
"""How long the next cell waits for one that was interrupted and left."""
_REPLY_SECONDS = 1.0
"""After this time the ranks are asked whether they are still in it: a reply may be lost."""


class Cells:
    """Numbers the cells, sends them, and passes on the records of the one that runs.

    After a cell that left its communicator unusable, the ranks move to a fresh one before the next
    cell. Output that comes after the end of its cell is shown with the next one.
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
        self._ranks = ranks
        self._epoch, self._dirty, self._left = 0, False, None
        ranks.of_death = self._take_death
        self.late.clear()

    def take_over(self, ranks: Connection, left: DetachedCell) -> None:
        self.begin(ranks)
        self._number, self._epoch, self._dirty = left.cell, left.epoch, left.dirty
        if left.members:
            self._end_members(left)

    def _end_members(self, left: DetachedCell) -> None:
        """Interrupts the members of an ensemble whose notebook has ended."""
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
        """Shows a cell of another notebook from now on."""
        self._running = run

    def show_late(self, view: View) -> None:
        self._show_late(view)

    @property
    def busy(self) -> bool:
        # An ensemble counts as well.
        return self._running is not None or self._crew is not None

    @property
    def count(self) -> int:
        """The number of cells that these ranks have run, of any notebook."""
        return self._number

    @property
    def running(self) -> CellRun | None:
        return self._running if self._running is not None and self._running.pending else None

    def check_idle(self) -> None:
        """Raises UsageError while another cell runs: an awaited cell lets its event loop run."""
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
        """Makes idle ranks ready for another cell; returns its number. Ranks may die meanwhile."""
        self.check_idle()
        self._show_late(view)
        self._renew()
        self._number += 1
        return self._number

    def send(self, cell: RunCell, run: CellRun, *payloads: bytes) -> None:
        self._running = run
        try:
            self._ranks.send(run.ranks, cell, *payloads)
        except BaseException:
            self.abandon(run)
            raise

    def end(self, run: CellRun) -> None:
        self._running = None
        self._note_dirty(run)

    def _note_dirty(self, run: CellRun) -> None:
        self._dirty = self._dirty or any(reply.dirty for reply in run.replies.values())

    def abandon(self, run: CellRun) -> None:
        """Interrupts a cell after an exception has ended the wait for it."""
        self._running, self._left = None, run
        self._ranks.hooks.cell_abandoned()
        if not self._ranks.closed:
            run.interrupt()

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[MemberSlots]:
        """Within, members run side by side, each on ``ranks_each`` ranks in a row."""
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
        if self._crew is not None:
            self._ranks.inbox.put(InterruptRequested())
            return True
        if self._running is None:
            return False
        self._running.press()
        return True

    def take(self, record: CellRecord, payloads: list[bytes]) -> None:
        if self._crew is not None and self._crew.take(record, payloads):
            return
        if self._running is not None and record.cell == self._running.cell:
            if not isinstance(record, Result):
                self._running.take(record, payloads)
            return
        if isinstance(record, Output) and record.entries:
            self.late.append(record)
            if self._running is not None:
                # The rank had not begun this cell yet: output of the cell comes later.
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
        # Ranks may still be in a cell that was interrupted.
        return self._left is not None and not self._left.settled()

    def heal(self, tell: Callable[[str], None]) -> Replacement:
        """Replaces dead ranks by new processes, in a fresh epoch; raises ClusterLost after it has
        killed all ranks.
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
        """Waits until all ranks have left an interrupted cell; raises UsageError if one stays."""
        deadline = time.monotonic() + _DETACHED_SECONDS
        self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        while not left.settled() and (busy := self._in_it(left)):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"expected idle ranks, found {label(busy)} still in a cell that "
                    "was interrupted. Wait for its end, or type: %distributed restart"
                )
            self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        # The reply of a rank was lost, and with it how the rank has left the cell.
        self._note_dirty(left)
        self._dirty = self._dirty or bool(left.pending)
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
        # A new communicator needs all ranks. The living ones can run cells without collectives.
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
