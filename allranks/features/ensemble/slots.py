"""An ensemble's members on the ranks, side by side: each runs on a row of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster import variables
from allranks.cluster.cells import Cells
from allranks.cluster.connection import Connection
from allranks.cluster.failures import CellRecord
from allranks.cluster.features import NotebookFeature
from allranks.cluster.renewal import renew
from allranks.cluster.state import CellState, Epoch
from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.wire import Interrupt, Reply, RunMember

_RESERVED = "running an ensemble. Wait for its end, or type: runs.stop()"


@dataclass
class Slot:
    """A row of ranks, and the member that they run now, if any. ``epoch`` is that of their own
    world.
    """

    ranks: tuple[int, ...]
    member: int | None = None
    #: The last member that they have run.
    state: CellState = field(default_factory=lambda: CellState(0, ()))
    epoch: Epoch = field(default_factory=Epoch)

    @property
    def cell(self) -> int:
        return self.state.cell


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
        self.deliver: Callable[[Slot, CellRecord, list[bytes]], None] = lambda *_: None

    def running(self, member: int | None) -> Slot | None:
        """Returns the slot of a member; for None, a free one."""
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
        payload = variables.pack(values, "a rank")
        # The ranks of a slot renew their communicator only after a member that left it unusable.
        if slot.epoch.dirty:
            slot.epoch.begin(slot.epoch.number + 1)
        self.cells += 1
        slot.member, slot.state = member, CellState(self.cells, slot.ranks)
        record = RunMember(
            cell=self.cells,
            member=member,
            ensemble=ensemble,
            source=source,
            number=number,
            label=f"member {member}",
            limit_nbytes=limit_nbytes,
            ranks_each=len(slot.ranks),
            epoch=slot.epoch.number,
            shared=shared,
        )
        self.ranks.send(slot.ranks, record, payload)

    def interrupt(self, slot: Slot) -> None:
        self.ranks.send(slot.state.pending, Interrupt(slot.cell))

    def take(self, record: CellRecord, payloads: list[bytes]) -> bool:
        """Handles a record of a member; returns false for any other record."""
        for slot in self.slots:
            if slot.member is not None and slot.cell == record.cell:
                if isinstance(record, Reply):
                    slot.state.apply(record)
                    slot.epoch.note(slot.state.replies.values())
                self.deliver(slot, record, payloads)
                return True
        return False


@contextmanager
def member_slots(cells: Cells, ranks_each: int) -> Iterator[MemberSlots]:
    """Within, members run side by side, each on ``ranks_each`` ranks in a row."""
    ranks, found = cells.connection, _prepared(cells, ranks_each)
    try:
        # Members begin again on fresh ranks, from what the store has: no rank is replaced
        # meanwhile. One that has died just now is replaced before.
        while not ranks.reserve(_RESERVED):
            found = _prepared(cells, ranks_each)
        ranks.intercept = found.take
        yield found
    finally:
        ranks.intercept = None
        cells.roster.release(found.cells)
        cells.turns.wake()
        if not ranks.closed:
            ranks.ask_soon(requests.MEMBERS, {"ranks_each": 0}, lambda _: None, range(cells.size))


def _prepared(cells: Cells, ranks_each: int) -> MemberSlots:
    """Returns the slots of ranks that are alive, and ready for members."""
    cells.catch_up()
    cells.check_idle()
    ranks, roster, every = cells.connection, cells.roster, range(cells.size)
    while True:
        renew(ranks, cells.news.append)
        try:
            told = ranks.ask(requests.MEMBERS, {"ranks_each": ranks_each}, ranks=every)
        except UsageError:
            if not roster.replaces_now:
                raise
        if not roster.dead:
            break
        # A rank has died since, perhaps after its answer: if it stays dead, the next one fails.
        cells.catch_up()
    found = MemberSlots(ranks, roster.cells, ranks_each)
    for slot in found.slots:
        states = [told[rank][0] for rank in slot.ranks]
        slot.epoch.begin(max(state["epoch"] for state in states))
        slot.epoch.dirty = any(state["dirty"] for state in states)
    # Not before: features prepare the ranks that run the members, also those that have replaced
    # others just now.
    cells.hooks.call(NotebookFeature.ranks_reserved)
    return found
