"""Replacing ranks that have died, and the variables that their places had kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from allranks.cluster.connection import Connection
from allranks.cluster.failures import ProcessExit, ending
from allranks.cluster.sockets import Answers
from allranks.cluster.variables import OnRank
from allranks.errors import ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import label

keep_here = OnRank("allranks.collectives.ops.keeping", "keep")

_REPLACE_SECONDS = 15.0
_SLOW_SECONDS = 2.0
_SETTLE_SECONDS = 0.3
_STEP_SECONDS = 0.1
_TRIES = 5


class Replacement:
    """New processes for dead ranks, and for ranks that die meanwhile.

    ``epoch`` is one more for each new try, ``ends`` how the replaced ranks had ended, ``presses``
    the number of the notebook's interrupts meanwhile.
    """

    def __init__(self, ranks: Connection, epoch: int, tell: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.ends: dict[int, ProcessExit] = {}
        self.presses = 0
        self._ranks = ranks
        self._tell = tell

    def make(self) -> None:
        """Replaces the ranks. The first interrupt waits for the end; the second one ends all ranks.

        Raises ClusterLost if they cannot be replaced; all are killed then.
        """
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        with ranks.inbox.hearing_interrupts():
            for epoch in range(self.epoch, self.epoch + _TRIES):
                self.epoch = epoch
                try:
                    problem = self._try()
                except TimeoutError as error:  # the next try would have no answer either
                    problem = str(error)
                    break
                if not roster.dead:
                    ranks.all_up()
                    return
                if roster.ends:
                    break
                if problem:  # the death that caused it may be reported in a moment
                    self._wait(lambda: bool(roster.ends), _SETTLE_SECONDS)
        roster.ends = roster.ends or list(roster.dead.values())
        why = f"{ranks.loss_text(shown=True)}\nIt could not be replaced: {problem}"
        ranks.close("lost", why)
        raise ClusterLost(why)

    def _try(self) -> str:
        """Tries to replace the ranks that are dead now; returns the obstacle, if any.

        Once one living rank has done its part, all have, and the new ranks belong to them. A rank
        that dies after that is replaced by the next try.
        """
        ranks, roster = self._ranks, self._ranks.roster
        dead, left = sorted(roster.dead), roster.alive
        roster.new.clear()
        roster.died_again.clear()
        seconds = _REPLACE_SECONDS + len(dead)
        with ranks.asking(left, requests.HEAL, {"dead": dead, "epoch": self.epoch}) as got:

            def agreed() -> bool:
                return any(not answer.problem for answer, _ in got.values())

            def over() -> bool:
                answered = all(rank in got or rank in roster.dead for rank in left)
                came = all(rank in roster.new or rank in roster.died_again for rank in dead)
                return bool(roster.ends) or (answered and (came or not agreed()))

            self._wait(over, seconds)
        problems = [answer.problem for answer, _ in got.values() if answer.problem]
        # Ranks that left because of another rank's error add nothing to the report.
        problem = min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")
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
            if rank in roster.died_again:
                end = roster.dead[rank] = roster.died_again[rank]
                self._tell(f"rank {rank}, which was new, {ending(end.code, end.memory)}")
        for warning in {answer.content.get("warning", "") for answer, _ in got.values()} - {""}:
            self._tell(warning)
        return ""

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        dead = self._ranks.roster.dead
        known, began, slow = set(dead), time.monotonic(), False
        while not done() and time.monotonic() < began + seconds and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_STEP_SECONDS))
            except Exception as error:  # an error of the display, not of the replacement
                self._tell(str(error))
            for rank in sorted(dead.keys() - known):
                known.add(rank)
                self._tell(f"rank {rank} {ending(dead[rank].code, dead[rank].memory)}")
            if not slow and time.monotonic() > began + _SLOW_SECONDS:
                slow = True
                still = "still being replaced; interrupt twice to kill all ranks"
                self._tell(f"{label(sorted(known))}: {still}")


class AfterCells:
    """Which variables are kept after a cell; ``every`` is the least interval in seconds."""

    def __init__(self, names: Sequence[str], every: float = 0.0) -> None:
        other = next((name for name in names if not name.isidentifier()), None)
        if other is not None:
            raise UsageError(
                f"expected the names of variables, found {other}. "
                "Type for example: %distributed keep x, y"
            )
        if not every >= 0:
            raise UsageError(
                f"--every expected 0 seconds or more, found {every:g}. Type for example: --every 60"
            )
        self.names, self.every = tuple(names), every
        self._last = float("-inf")

    def due(self) -> bool:
        """Whether it is time; if so, the interval starts again."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True


def restored(answers: Answers) -> str:
    """Returns what new ranks have again, as ``model and step kept 12 s ago``."""
    told = [content for content, _ in answers.values() if content["names"]]
    if not told:
        return ""
    seconds = max(content["seconds"] for content in told)
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{listed(told[0]['names'])} kept {ago} ago"


def listed(names: Sequence[str]) -> str:
    """Returns names as ``model, optimizer and step``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
