"""Requests made of ranks, by number, and the answers that come to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from allranks.records.wire import Answer, Ask

Answers = dict[int, tuple[dict[str, Any], list[bytes]]]
"""By rank, what it answered, and the payloads of that."""
Got = dict[int, tuple[Answer, list[bytes]]]
"""What has been answered so far: by which rank, and what came with it."""
DeliverAnswer = Callable[[Answer], None]


class Requests:
    """The requests of one notebook that answers may still come to.

    Args:
        last: the number before the first one's.
    """

    def __init__(self, last: int = 0) -> None:
        self._last = last
        self._open: dict[int, Got] = {}
        self._delivers: dict[int, DeliverAnswer] = {}

    @contextmanager
    def awaited(self, name: str, arguments: dict[str, Any]) -> Iterator[tuple[Ask, Got]]:
        """Yields a request that is to be sent; within, its answers are there as they come."""
        ask, got = self._new(name, arguments), Got()
        self._open[ask.request] = got
        try:
            yield ask, got
        finally:
            del self._open[ask.request]

    def delivered(self, name: str, arguments: dict[str, Any], deliver: DeliverAnswer) -> Ask:
        """Returns a request that is to be sent; ``deliver`` is called with each answer to it."""
        ask = self._new(name, arguments)
        self._delivers[ask.request] = deliver
        return ask

    def take(self, answer: Answer, payloads: list[bytes]) -> None:
        """Hands an answer to who waits for it; one that comes too late is left out."""
        if answer.request in self._open:
            self._open[answer.request][answer.rank] = (answer, payloads)
        elif answer.request in self._delivers:
            self._delivers[answer.request](answer)

    def _new(self, name: str, arguments: dict[str, Any]) -> Ask:
        self._last += 1
        return Ask(self._last, name, arguments)
