"""The epoch of a set of ranks: the time in which they use one communicator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from allranks.records.wire import Reply


@dataclass
class Epoch:
    """``number`` counts the epochs. The ranks need another one before their next cell if this one
    is ``dirty``: a rank has left a call unfinished, or a cell has failed while messages may have
    been on their way. ``traffic``: whether ranks have used a communicator in this epoch.
    """

    number: int = 0
    dirty: bool = False
    traffic: bool = False

    def note(self, replies: Collection[Reply]) -> None:
        """Handles the replies to a cell, as far as they have come."""
        latest, traffic, failed = 0, False, False
        for reply in replies:
            latest = max(latest, reply.epoch)
            traffic = traffic or reply.traffic
            failed = failed or reply.status != "ok"
            self.dirty = self.dirty or reply.dirty
        if latest > self.number:  # a cell may have begun epochs itself
            self.number, self.traffic = latest, False
        self.traffic = self.traffic or traffic
        # One rank may have sent what a rank that failed has not received.
        self.dirty = self.dirty or (self.traffic and failed)

    def follow(self, number: int) -> None:
        """Handles that the ranks have begun this epoch by themselves."""
        if number > self.number:
            self.begin(number)

    def begin(self, number: int) -> None:
        self.number, self.dirty, self.traffic = number, False, False
