"""How long a rank was at its posted calls, and at which one.

A call that an ``_async`` function has posted goes on only while its rank polls, synchronizes or
makes another call; what the rank computes in between is neither waiting nor transfer. So time is
counted on a clock that stands still while the rank is away, and no moment of it is counted for
two calls that were under way together.
"""

from __future__ import annotations

from time import perf_counter

from allranks.collectives.calls.call import Call


class Presence:
    """One rank's time at calls that were under way together; entered while it is at them."""

    def __init__(self) -> None:
        self._away = 0.0
        self._came = 0.0
        self._left: float | None = None
        self._counted = 0.0
        self._ended = 0.0

    def __enter__(self) -> None:
        self._came = perf_counter()
        if self._left is not None:
            self._away += self._came - self._left
            self._left = None

    def __exit__(self, *_: object) -> None:
        self._left = perf_counter()

    def begin(self, call: Call) -> None:
        """Notes where the clock stands as a call is posted."""
        began = call.started - self._away
        call.began, call.uncounted = began, began - self._counted

    def note(self, call: Call) -> None:
        """Notes, once all ranks have arrived, since when this one could have known."""
        if call.moving and call.ready_at < 0:
            call.ready_at = max(call.last, self._came) - self._away

    def end(self, call: Call) -> None:
        """Counts the time that has not been counted for another call: waiting, and transfer."""
        now = call.ended - self._away
        self.note(call)
        fresh = max(now - self._counted - call.uncounted, now - max(call.began, self._ended))
        transfer = now - max(call.began, call.ready_at, self._ended)
        transfer = max(0.0, min(fresh, transfer))
        wait = max(0.0, min(fresh - transfer, call.ready_at - call.began))
        call.attended = wait, transfer
        self._counted += wait + transfer
        self._ended = now
