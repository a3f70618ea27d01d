"""Ranks that run small cells side by side: each on one of them, or on a few in a row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.connection import Connection
from allranks.cluster.roster import CellRecord
from allranks.cluster.variables import pack
from allranks.records.wire import Interrupt, Reply, RunMember


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


class Crew:
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
        self.deliver: Callable[[Crew, Slot, CellRecord, list[bytes]], None] = lambda *_: None

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
        """Takes in a record of a member; returns whether it is one."""
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
        """Within, an interrupt of the notebook is told by :meth:`attend`, and raises nothing."""
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
