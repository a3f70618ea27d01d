"""What the ranks of a cluster are given to run: one cell after the other, or a crew's members."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any

from allranks.cluster.connection import Connection
from allranks.cluster.crew import Crew
from allranks.cluster.deaths import End
from allranks.cluster.explaining import Aside
from allranks.cluster.inbox import Pressed
from allranks.cluster.left import Left
from allranks.cluster.replacement import Replacement
from allranks.cluster.roster import CellRecord
from allranks.cluster.run import Run, View
from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.wire import Interrupt, Output, Prompt, Reply, Result, RunCell, Typed

_rank_of = attrgetter("rank")
_IN_AN_ENSEMBLE = (
    "cannot ask for input in an ensemble: run the member's cell with %%distributed -r 0"
)
_LEFT_SECONDS = 10.0
"""How long the next cell waits for one that was interrupted and left."""
_REPLY_SECONDS = 1.0
"""After so long the ranks are asked whether they are still in it: a reply may have been lost."""


class Cells:
    """Numbers the cells, sends them, and hands on what ranks tell of the one that runs.

    Between a cell that has left its communicator unusable and the next one, the ranks move to a
    fresh one. What is written when its cell has ended is shown with the next one.
    """

    _ranks: Connection

    def __init__(self) -> None:
        self.late: list[Output] = []
        self._running: Run | None = None
        self._left: Run | None = None
        self._crew: Crew | None = None
        self._number = 0
        self._epoch = 0
        self._dirty = False

    def begin(self, ranks: Connection) -> None:
        """Takes in that these ranks, which are new, run what follows."""
        self._ranks = ranks
        self._epoch, self._dirty, self._left = 0, False, None
        ranks.of_death = self._take_death
        self.late.clear()

    def take_over(self, ranks: Connection, left: Left) -> None:
        """Takes in that these ranks, which another notebook has started, run what follows."""
        self.begin(ranks)
        self._number, self._epoch, self._dirty = left.cell, left.epoch, left.dirty
        if left.members:
            self._end_members(left)

    def _end_members(self, left: Left) -> None:
        """Interrupts the members of an ensemble, of which nobody runs the rest."""
        for rank, cell in left.members.items():
            self._ranks.send((rank,), Interrupt(cell))
            self._ranks.ask_soon(requests.SEEN, {"cell": cell}, lambda _: None, (rank,))
        deadline = time.monotonic() + _LEFT_SECONDS
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

    def follow(self, run: Run) -> None:
        """Takes in that a cell which another notebook has sent is shown from now on."""
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
    def running(self) -> Run | None:
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
            # Nobody waited for it: an interrupt came before that.
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

    def send(self, cell: RunCell, run: Run, *payloads: bytes) -> None:
        """Sends a cell to the ranks of ``run``, all of them or none."""
        self._running = run
        self._ranks.send(run.ranks, cell, *payloads)

    def end(self, run: Run) -> None:
        """Takes in that a cell has ended, however it did."""
        self._running = None
        self._dirty = self._dirty or run.dirty

    @contextmanager
    def attended(self, run: Run) -> Iterator[None]:
        """Within, somebody waits for a cell: where an exception ends that, it is interrupted."""
        try:
            yield
        except BaseException:
            self._running, self._left = None, run
            if not self._ranks.closed:
                run.interrupt()
            raise

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[Crew]:
        """Within, members of an ensemble run side by side, each on ``ranks_each`` ranks in a row.

        Raises:
            UsageError: the ranks run a cell or another ensemble.
        """
        self.check_idle()
        self._renew()
        told = self._ask(requests.MEMBERS, {"ranks_each": ranks_each})
        self._crew = Crew(self._ranks, self._number, ranks_each)
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
            self._ranks.inbox.put(Pressed())
            return True
        if self._running is None:
            return False
        self._running.press()
        return True

    def take(self, record: CellRecord, payloads: list[bytes]) -> None:
        """Takes in what a rank tells of a cell."""
        if isinstance(record, Prompt) and self._crew is not None:
            self._ranks.send((record.rank,), Typed(record.cell, record.number, "", _IN_AN_ENSEMBLE))
            return
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

    def _take_death(self, end: End) -> None:
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
        if isinstance(view, Aside):
            return
        for rank, batches in groupby(sorted(self.late, key=_rank_of), key=_rank_of):
            notice: list[Any] = ["notice", "written after its cell had ended:"]
            late = [notice, *(entry for batch in batches for entry in batch.entries)]
            view.output(Output(rank, 0, tuple(late), 0, 0, 0))
        self.late.clear()

    def _see_off(self, left: Run) -> None:
        """Waits until all ranks are out of a cell that nobody waits for any longer.

        Raises:
            UsageError: a rank stays in it.
        """
        deadline = time.monotonic() + _LEFT_SECONDS
        self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        while not left.settled() and (busy := self._in_it(left)):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"expected idle ranks, found {label(busy)} still in a cell that "
                    "was interrupted. Wait for its end, or type: %distributed restart"
                )
            self._ranks.wait_until(left.settled, _REPLY_SECONDS)
        # Nobody knows how a rank has left it whose reply was lost.
        self._dirty = self._dirty or left.dirty or bool(left.pending)
        self._left = None

    def _in_it(self, left: Run) -> list[int]:
        """Returns the ranks that have not replied to a cell, and do not say that they are idle."""
        return self._not_idle(left.pending)

    def _not_idle(self, ranks: Collection[int]) -> list[int]:
        told = self._ranks.ask(requests.STATUS, {}, ranks=ranks, seconds=1.0, strict=False)
        idle = {rank for rank, (content, _) in told.items() if content["state"] == "idle"}
        return [rank for rank in ranks if rank not in idle]

    def _renew(self) -> None:
        """Moves the ranks to a fresh communicator where a cell has left the old one unusable."""
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
