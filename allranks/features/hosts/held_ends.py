"""The ends of ranks on several hosts, which wait until their cause is known."""

from __future__ import annotations

from collections.abc import Iterable

from allranks.cluster.agents import DeliverEvent
from allranks.cluster.failures import Ended
from allranks.records.agent import Exit, LauncherExit

#: Beats of a host until its earlier news has surely come: the first may have been on the way.
_BEATS = 2


class HeldEnds:
    """The first ends of ranks on several hosts, until their cause is known.

    If a host is cut off, or a rank there is killed, MPI ends ranks of other hosts with an exit
    code, and this may be the first news. So ends wait for a rank that a signal has ended, for the
    loss of a host, or until each other host has sent heartbeats, with its own news before them.

    It is called with the lock of its `MultiHostAgents`.
    """

    def __init__(self, deliver: DeliverEvent, can_replace: bool) -> None:
        self._deliver = deliver
        #: Then MPI ends no rank because another one has died.
        self._can_replace = can_replace
        self._ends: list[tuple[Ended, str]] = []
        #: How many beats of each host are still to come.
        self._beats: dict[str, int] = {}
        self._known = False

    def take(self, end: Exit | LauncherExit, host: str, others: Iterable[str]) -> None:
        """Takes an end, which comes from none of the ``others``."""
        by_itself = isinstance(end, Exit) and not end.by_launcher
        if self._known or (self._can_replace and by_itself):
            self._deliver(end, host)
        elif by_itself and end.code < 0:
            self.release((end, host))
        else:
            if not self._ends:
                self._beats = dict.fromkeys(others, _BEATS)
            self._ends.append((end, host))
            if not self._beats:
                self.release()

    def beat(self, host: str) -> None:
        if host in self._beats:
            self._beats[host] -= 1
            if max(self._beats.values()) <= 0:
                self.release()

    def wait_for(self, host: str) -> bool:
        return self._beats.get(host, 0) > 0

    def release(self, *causes: tuple[Ended, str]) -> None:
        """Delivers the causes first, then the ends."""
        ends, self._ends, self._beats, self._known = self._ends, [], {}, not self._can_replace
        for end, host in (*causes, *ends):
            self._deliver(end, host)
