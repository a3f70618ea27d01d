"""Calls that have been posted and not waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.call import Call
from allranks.errors import StaleHandle, UsageError


class Handle:
    """What an ``_async`` function returns.

    Calls of one process set are carried out in the order in which they were posted. There is no
    thread behind them: they move on whenever this rank polls, synchronizes or makes another call.
    """

    def __init__(self, call: Call, pick: Callable[[Any], Any] | None = None) -> None:
        self._call = call
        self._pick = pick
        self._world = world.current()
        self._epoch = self._world.epoch
        self._world.submit(call)

    def poll(self) -> bool:
        """True when the result is there; never waits.

        Raises:
            StaleHandle: the epoch of the call has ended.
            RankLeft: this rank has left another call of the epoch unfinished.
        """
        self._check()
        if not self._call.done:
            self._world.poll(self._call)
        return self._call.done

    def synchronize(self) -> Any:
        """Waits for the call and returns its result.

        Raises:
            StaleHandle: the epoch of the call has ended.
            CollectiveMismatch: the ranks passed different arguments.
            RankLeft: a rank will never make this call.
        """
        self._check()
        result = self._world.join(self._call)
        return result if self._pick is None else self._pick(result)

    def _check(self) -> None:
        if not self._call.done and self._epoch != self._world.epoch:
            raise StaleHandle(
                f"synchronize() needs a handle of this epoch: {self._call.spec.title} at "
                f"{self._call.site} was posted before an error or an interrupt ended its epoch. "
                "Post it again."
            )


def run(call: Call) -> Any:
    """Drives a call of this rank's world to its end and returns its result."""
    return world.current().run(call)


def first(results: Sequence[Any]) -> Any:
    """What a call of one array has ended with."""
    return results[0]


def poll(handle: Handle) -> bool:
    """True when the result of an ``_async`` call is there; never waits."""
    return _checked(handle, "poll").poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an ``_async`` call and returns its result."""
    return _checked(handle, "synchronize").synchronize()


def _checked(handle: Any, op: str) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise UsageError(
        f"{op} expected the handle of one call, as allreduce_async returns it, found "
        f"{handle!r:.60}. Type: {op}(allreduce_async(x))"
    )
