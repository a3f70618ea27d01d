"""The same order on every rank where TensorFlow keeps none. Runs in every rank.

A graph of TensorFlow 1 runs its operations in any order, in several threads, and another on every
rank. So the ranks take turns by name: the first rank names an operation that is ready there, and
each rank carries that one out next, when it is ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from allranks import collectives
from allranks.collectives import ProcessSet
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.world.world import World, current
from allranks.errors import CollectiveMismatch

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0


class Turns:
    """The operations of one process set that are ready on this rank."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._changed = threading.Condition()
        self._ready: list[str] = []
        self._named: str | None = None
        self._asking = False

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """The block runs when it is this operation's turn on every rank.

        Raises:
            CollectiveMismatch: another operation's turn does not come.
            RankLeft: a rank will never come.
        """
        with self._changed:
            self._ready.append(name)
            try:
                self._wait(name)
            finally:
                self._ready.remove(name)
        try:
            yield
        finally:
            with self._changed:
                self._named = None
                self._changed.notify_all()

    def _wait(self, name: str) -> None:
        began = time.monotonic()
        while self._named != name:
            if self._named is None and not self._asking:
                self._ask()
            elif not self._changed.wait(_LOOK_SECONDS):
                if ear.heard():
                    raise KeyboardInterrupt
                if self._stuck() and time.monotonic() - began > _PATIENCE_SECONDS:
                    raise CollectiveMismatch(
                        f"{self._named} needs every rank to run it: rank {collectives.rank()} "
                        f"has waited {_PATIENCE_SECONDS:.0f} s in {', '.join(self._ready)} and "
                        "has not come to it. Fetch the same operations on every rank, and give "
                        "the session threads: ConfigProto(inter_op_parallelism_threads=4)."
                    )

    def _ask(self) -> None:
        """Learns whose turn is next. Collective over the process set."""
        self._asking, mine = True, self._ready[0]
        self._changed.release()
        try:
            told = collectives.broadcast_object(
                mine, self._process_set.ranks[0], process_set=self._process_set
            )
        finally:
            self._changed.acquire()
            self._asking = False
        self._named = told
        self._changed.notify_all()

    def _stuck(self) -> bool:
        return self._named is not None and self._named not in self._ready


_Key = tuple[int | None, int, int]
_turns: WeakKeyDictionary[World, dict[_Key, Turns]] = WeakKeyDictionary()
"""By process set, epoch and cell: what was named in a cell that has been interrupted is nobody's
turn in the next. By world as well: the members of an ensemble have worlds of their own."""


def of(process_set: ProcessSet) -> Turns:
    """The turns of a process set's members."""
    world = current()
    here = _turns.setdefault(world, {})
    key = process_set.process_set_id, world.epoch, world.scope.number
    if key not in here:
        for other in [other for other in list(here) if other[0] == key[0] and other != key]:
            here.pop(other, None)
    return here.setdefault(key, Turns(process_set))


def forget() -> None:
    """Begins anew."""
    _turns.clear()
