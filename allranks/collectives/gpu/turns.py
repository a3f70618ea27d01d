"""One order for the NCCL calls of all process sets, the same on every rank that is in several.

NCCL's kernels wait for each other between GPUs, and one may keep another from starting: the order
in which a GPU starts those of several communicators has to be the same everywhere. Programs post to
their sets in any order, so the ranks number a call once all of its members have come: each proposes
a number above all that it knows, the call gets the largest, and every rank goes by these.

Source: NCCL user guide, "Using multiple NCCL communicators concurrently". The numbering is Skeen's:
K. Birman and T. Joseph, Reliable communication in the presence of failures, 1987, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps


class Turns:
    """The calls that this rank has agreed on and that have not ended, by their numbers."""

    def __init__(self) -> None:
        self._last = 0
        self._calls: dict[int, tuple[tuple[int, int], Call]] = {}
        """For each group the number of its call, or the least that it can get."""

    def take(self, call: Call, host: Transport) -> Steps[None]:
        """Ends when it is this call's turn on all of its members. They have come to the call."""
        number, size = call.members.number, call.members.size
        self._last += 1
        self._calls[number] = (self._last, number), call
        proposed = np.array([self._last], np.int64).view(np.uint8)
        every: list[Any] = yield from call.moved(host.allgather, proposed, [8] * size)
        chosen = max(int(each.view(np.int64)[0]) for each in every)
        self._last = max(self._last, chosen)
        mine = chosen, number
        self._calls[number] = mine, call
        call.stage += 1
        # What has only been proposed here gets that number or a larger one.
        while (ahead := min(self._calls.values()))[0] < mine:
            call.behind = ahead[1]
            yield call
        call.behind = None
        # A member whose turn has not come may need this rank's host first, and what is launched by
        # then could keep the host: whatever waits for the whole GPU waits for the other members.
        yield from call.moved(host.allgather, proposed[:1], [1] * size)
        call.stage += 1

    def leave(self, call: Call) -> None:
        """A call is over, or has been left."""
        call.behind = None
        found = self._calls.get(call.members.number)
        if found is not None and found[1] is call:
            del self._calls[call.members.number]

    def clear(self) -> None:
        """None of them goes on: their epoch has ended."""
        self._calls.clear()
