"""The same order on every rank where TensorFlow keeps none. Runs in every rank.

A graph of TensorFlow 1 runs its operations in any order, in several threads, and another on every
rank. So the ranks go by name: whenever the agreed order is used up, the first rank says which
operations are ready there, and every rank carries these out next, each as soon as it is ready here.
One of the waiting threads does so for all of them, so that many small ones cost no change of
thread each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from allranks import collectives
from allranks.collectives import ProcessSet
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.world.world import World, current
from allranks.errors import CollectiveMismatch

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0


class _Turn:
    """An operation that is ready on this rank, and what came of it."""

    def __init__(self, name: str, act: Callable[[], Any], lock: threading.Lock) -> None:
        self.name, self.act = name, act
        self.noticed = threading.Condition(lock)
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Wakes whoever waits for it."""
        self.over, self.error = True, error
        self.noticed.notify()


class Turns:
    """The operations of one process set that are ready on this rank."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._ready: dict[str, deque[_Turn]] = {}
        self._agreed: deque[str] = deque()
        self._led = False

    def take(self, name: str, act: Callable[[], Any]) -> Any:
        """Calls ``act`` when it is this operation's turn on every rank; returns what it returns.

        Raises:
            CollectiveMismatch: another operation's turn does not come.
            RankLeft: a rank will never come.
        """
        with self._lock:
            turn = _Turn(name, act, self._lock)
            self._ready.setdefault(name, deque()).append(turn)
            self._arrived.notify()
            while not turn.over:
                if self._led:
                    turn.noticed.wait()
                else:
                    self._lead(turn)
        if turn.error is not None:
            raise turn.error
        return turn.result

    def _lead(self, own: _Turn) -> None:
        """Carries out turns until this one is over, and those whose turn it is by then."""
        self._led = True
        try:
            while not own.over or (self._agreed and self._agreed[0] in self._ready):
                if not self._agreed:
                    self._agreed.extend(self._asked())
                self._carry_out(self._next())
        except BaseException as error:
            # Whoever has not led would go on waiting for what the others have given up.
            self._agreed.clear()
            for turn in [turn for turns in self._ready.values() for turn in turns]:
                turn.end(error)
            self._ready.clear()
        finally:
            self._led = False
            if self._ready:
                next(iter(self._ready.values()))[0].noticed.notify()

    def _next(self) -> _Turn:
        """The turn that the ranks have agreed on, once it is ready here."""
        name, began, told = self._agreed[0], time.monotonic(), False
        while name not in self._ready:
            if self._arrived.wait(_LOOK_SECONDS):
                continue
            if ear.heard():
                raise KeyboardInterrupt
            waited = time.monotonic() - began
            if waited > _PATIENCE_SECONDS:
                raise CollectiveMismatch(
                    f"{name} needs every rank to run it: {self._found(waited)}. "
                    "Fetch the same operations on every rank."
                )
            if waited > current().late_seconds and not told:
                told = True
                current().notice(f"{name} is next on all ranks: {self._found(waited)}")
        turns = self._ready[name]
        turn = turns.popleft()
        if not turns:
            del self._ready[name]
        self._agreed.popleft()
        return turn

    def _found(self, waited: float) -> str:
        return (
            f"rank {current().rank} has not reached it for {waited:.0f} s, "
            f"and waits in {', '.join(self._ready)}"
        )

    def _carry_out(self, turn: _Turn) -> None:
        self._lock.release()
        error: BaseException | None = None
        try:
            turn.result = turn.act()
        except BaseException as raised:
            error = raised
        finally:
            self._lock.acquire()
        turn.end(error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _asked(self) -> list[str]:
        """What is ready on the first rank. Collective over the process set."""
        mine = [name for name, turns in self._ready.items() for _ in turns]
        self._lock.release()
        try:
            told: list[str] = collectives.broadcast_object(
                mine, self._process_set.ranks[0], process_set=self._process_set
            )
        finally:
            self._lock.acquire()
        return told


_Key = tuple[int | None, int, int]
_turns: WeakKeyDictionary[World, dict[_Key, Turns]] = WeakKeyDictionary()
"""By process set, epoch and cell: what was agreed on in a cell that has been interrupted is
nobody's turn in the next. By world as well: the members of an ensemble have worlds of their own."""


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
