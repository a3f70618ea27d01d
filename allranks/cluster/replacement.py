"""Has new processes take the places of ranks that have died, while the others keep what they have.

The ranks that live are asked to: they shrink their communicator, spawn a process for each place,
and agree that all have come (see ``allranks.collectives.start.healing``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from allranks.cluster.answers import Got
from allranks.cluster.connection import Connection
from allranks.cluster.deaths import End
from allranks.cluster.failures import ending
from allranks.errors import ClusterLost
from allranks.records import requests
from allranks.records.ranks import label

_SECONDS = 15.0
_SLOW_SECONDS = 2.0
_SETTLE_SECONDS = 0.3
_POLL_SECONDS = 0.1
_TRIES = 5


class Replacement:
    """New processes for the ranks that are dead, and for those that die meanwhile.

    Args:
        ranks: the connection to all of them.
        epoch: the number of the epoch that begins with the new ones, or one more for each new try.
        tell: called with what happens meanwhile.

    Attributes:
        epoch: the number of the epoch that has begun.
        ends: how the ranks that were replaced had ended.
        presses: how often the notebook was interrupted meanwhile.
    """

    def __init__(self, ranks: Connection, epoch: int, tell: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.ends: dict[int, End] = {}
        self.presses = 0
        self._ranks = ranks
        self._tell = tell

    def make(self) -> None:
        """Replaces the ranks. An interrupt is heard when it has; the second one ends all ranks.

        Raises:
            ClusterLost: they could not be replaced, and all were killed.
        """
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        with ranks.inbox.hearing_interrupts():
            for epoch in range(self.epoch, self.epoch + _TRIES):
                self.epoch = epoch
                try:
                    problem = self._try()
                except TimeoutError as error:  # who did not hear this will not hear the next
                    problem = str(error)
                    break
                if not roster.dead:
                    ranks.all_up()
                    return
                if roster.ends:
                    break
                if problem:
                    self._wait(lambda: bool(roster.ends), _SETTLE_SECONDS)
        roster.ends = roster.ends or list(roster.dead.values())
        why = f"{ranks.loss(shown=True)}\nIt could not be replaced: {problem}"
        ranks.close("lost", why)
        raise ClusterLost(why)

    def _try(self) -> str:
        """Tries to replace the ranks that are dead now; returns what was in the way, if anything.

        Once one of those that live has done its part all of them have, and the new ones belong to
        them, whoever dies then: a rank that does is for the next try.

        Raises:
            TimeoutError: they did not come to an end.
        """
        ranks, roster = self._ranks, self._ranks.roster
        dead, left = sorted(roster.dead), roster.left
        roster.fresh.clear()
        roster.again.clear()
        seconds = _SECONDS + len(dead)
        with ranks.asking(left, requests.HEAL, {"dead": dead, "epoch": self.epoch}) as got:

            def agreed() -> bool:
                return any(not answer.problem for answer, _ in got.values())

            def over() -> bool:
                answered = all(rank in got or rank in roster.dead for rank in left)
                came = all(rank in roster.fresh or rank in roster.again for rank in dead)
                return bool(roster.ends) or (answered and (came or not agreed()))

            self._wait(over, seconds)
        problem = _problem(got)
        if not over():
            why = f"took over {seconds:g} s" if self.presses < 2 else "was interrupted twice"
            raise TimeoutError(f"replacing {label(dead)} {why}")
        if roster.ends or not agreed():
            return problem or "another rank has died meanwhile"
        if problem:
            raise TimeoutError(problem)
        for rank in dead:
            self.ends[rank] = roster.dead.pop(rank)
            roster.lines.pop(rank, None)
            if rank in roster.again:
                end = roster.dead[rank] = roster.again[rank]
                self._tell(f"rank {rank}, which was new, {ending(end.code, end.memory)}")
        for warning in {answer.content.get("warning", "") for answer, _ in got.values()} - {""}:
            self._tell(warning)
        return ""

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Handles what comes until ``done``, or so long, or until the second interrupt."""
        dead = self._ranks.roster.dead
        known, began, slow = set(dead), time.monotonic(), False
        while not done() and time.monotonic() < began + seconds and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_POLL_SECONDS))
            except Exception as error:  # it concerns no rank's place
                self._tell(str(error))
            for rank in sorted(dead.keys() - known):
                known.add(rank)
                self._tell(f"rank {rank} {ending(dead[rank].code, dead[rank].memory)}")
            if not slow and time.monotonic() > began + _SLOW_SECONDS:
                slow = True
                still = "still being replaced; interrupt twice to kill all ranks"
                self._tell(f"{label(sorted(known))}: {still}")


def _problem(got: Got) -> str:
    """Returns what the first rank says that could not do what it was asked."""
    problems = [answer.problem for answer, _ in got.values() if answer.problem]
    # Those that were made to leave by another one's error have nothing to tell.
    return min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")
