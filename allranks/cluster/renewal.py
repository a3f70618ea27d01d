"""Between two cells: the ranks leave the one before, and move to a fresh communicator, with what
their features do then.

A rank may have work to end first: a library's process groups, or an object's finalizer. What takes
longer than a second is shown. An interrupt ends it; a rank that the interrupt does not free is
ended, and replaced like one that has died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from allranks.cluster.connection import Connection
from allranks.cluster.driver import AnswersSoFar
from allranks.countdown import Countdown
from allranks.errors import ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import IDLE, MEETS, Activity, label
from allranks.records.wire import BETWEEN_CELLS, Answer, Interrupt

_SHOWN_SECONDS = 1.0
#: After this time the ranks are interrupted without an interrupt of the user.
_PATIENCE_SECONDS = 30.0
#: How long an interrupted rank has to go on.
_FREED_SECONDS = 5.0
_STEP_SECONDS = 0.1
_MEETS = str(MEETS)
_WAITS = "the new cell waits for that, or interrupt to end it"
#: How long the next cell waits for one that was interrupted and left.
_DETACHED_SECONDS = 10.0
#: After this time the ranks are asked whether they are still in it: a reply may be lost.
_REPLY_SECONDS = 1.0


def renew(ranks: Connection, tell: Callable[[str], None]) -> None:
    """Moves all ranks to a fresh communicator if they need one. Ranks may die meanwhile.

    Raises KeyboardInterrupt if the user has interrupted that.
    """
    await_abandoned(ranks)
    epoch, dead = ranks.roster.epoch, ranks.roster.dead
    epoch.follow(ranks.roster.begun_epoch)
    epoch.dirty = epoch.dirty or ranks.roster.ended_epoch >= epoch.number
    # A new communicator needs all ranks. The living ones can run cells without collectives.
    if epoch.dirty and not dead:
        epoch.number += 1
        renewal = Renewal(ranks, tell)
        try:
            renewal.make(epoch.number)
        except UsageError:
            if renewal.pressed:
                raise KeyboardInterrupt from None
            if not dead:
                raise
        if ranks.roster.ends:
            raise ClusterLost(ranks.loss_text())
        if not dead:  # else the new ranks begin an epoch with the others
            epoch.begin(epoch.number)
        if renewal.pressed:
            raise KeyboardInterrupt


def await_abandoned(ranks: Connection) -> None:
    """Waits until all ranks have left an interrupted cell; raises UsageError if one stays."""
    cell = ranks.roster.cell
    if cell is None:
        return
    deadline = time.monotonic() + _DETACHED_SECONDS
    ranks.wait_until(lambda: ranks.is_left(cell), _REPLY_SECONDS)
    while not ranks.is_left(cell) and (busy := not_idle(ranks, cell.pending)):
        if time.monotonic() > deadline:
            raise UsageError(
                f"expected idle ranks, found {label(busy)} still in a cell that "
                "was interrupted. Wait for its end, or type: %distributed restart"
            )
        ranks.wait_until(lambda: ranks.is_left(cell), _REPLY_SECONDS)
    ranks.end_cell()


def not_idle(ranks: Connection, chosen: Collection[int]) -> list[int]:
    """Returns which of these ranks do not say that they are idle."""
    told = ranks.ask(requests.STATUS, {}, ranks=chosen, seconds=1.0, strict=False)
    idle = {rank for rank, (content, _) in told.items() if Activity.read(content["doing"]) == IDLE}
    return [rank for rank in chosen if rank not in idle]


class Renewal:
    """Moves all ranks to a fresh communicator, and waits until they have.

    ``tell`` shows a line at once.
    """

    def __init__(self, ranks: Connection, tell: Callable[[str], None]) -> None:
        self._ranks, self._tell = ranks, tell
        self._doing: dict[int, str] = {}
        """What each rank that has not answered does, as far as its state is known."""
        self.pressed = False
        """Whether the user has interrupted it."""
        self._requests: dict[int, dict[str, str]] = {}
        """The requests of clients that ranks run, as far as is known."""
        self._limit: Countdown | None = None
        """From the interrupt on."""

    def make(self, epoch: int) -> None:
        """Raises UsageError if a rank has not done its part; KeyboardInterrupt if the user has
        interrupted it while ranks run requests of clients, which go on. Ranks may die meanwhile.
        """
        ranks = self._ranks
        shown, answered = Countdown(_SHOWN_SECONDS), Countdown(2 * _SHOWN_SECONDS)
        patience, asked, told = Countdown(_PATIENCE_SECONDS), False, 0
        every = range(ranks.size)
        with (
            ranks.inbox.hearing_interrupts(),
            ranks.asking(every, requests.RENEW, {"epoch": epoch}) as got,
        ):
            while self._silent(got):
                pressed = bool(ranks.step(_STEP_SECONDS))
                self.pressed |= pressed
                if not (silent := self._silent(got)):
                    break
                if pressed:
                    self._interrupt(silent)
                if not asked and shown.left() <= 0:
                    asked = True
                    ranks.ask_soon(requests.STATUS, {}, self._take_status, silent)
                held = {r: self._requests[r] for r in silent if r in self._requests}
                if held and self.pressed:
                    # They begin the epoch once they have answered.
                    raise KeyboardInterrupt(ranks.hooks.command("leave_held_cell", ranks, held))
                if answered.left() <= 0:
                    self._doing = dict.fromkeys(silent, "") | self._doing
                busy = self._busy(silent)
                known = [rank for rank in busy if self._doing.get(rank)]
                if busy and told <= bool(known):  # once more when it is known what a rank does
                    told = 1 + bool(known)
                    self._tell(self._wait_text(known or busy, held))
                if patience.left() <= 0 and held:
                    patience, asked = Countdown(_PATIENCE_SECONDS), False
                elif patience.left() <= 0 and self._limit is None:
                    self._interrupt(silent)
                if self._limit is not None and self._limit.left() <= 0:
                    self._end(self._busy(silent) or silent)
        # A renewal ends what a rank may have needed another one for.
        ranks.roster.needs |= {
            rank: answer.content["needs"]
            for rank, (answer, _) in got.items()
            if "needs" in answer.content
        }
        problems = [answer.problem for _, (answer, _) in sorted(got.items()) if answer.problem]
        if problems:
            raise UsageError(problems[0])

    def _silent(self, got: AnswersSoFar) -> list[int]:
        """The ranks that have not answered, and can. Without one rank the others cannot go on."""
        roster = self._ranks.roster
        if roster.dead or roster.ends or self._ranks.closed:
            return []
        return [rank for rank in range(self._ranks.size) if rank not in got]

    def _take_status(self, answer: Answer) -> None:
        doing = answer.content.get("doing")
        self._doing[answer.rank] = str(Activity.read(doing)) if doing else ""
        self._requests.pop(answer.rank, None)
        if request := answer.content.get("request"):
            self._requests[answer.rank] = request

    def _busy(self, silent: Iterable[int]) -> list[int]:
        """Those that do not merely wait for the others."""
        return [rank for rank in silent if self._doing.get(rank, _MEETS) != _MEETS]

    def _wait_text(self, ranks: list[int], held: Mapping[int, Mapping[str, str]]) -> str:
        others = [rank for rank in ranks if rank not in held]
        said = [self._ranks.hooks.command("held_text", held)] if held else []
        said += [f"{self._text(others)}; {_WAITS}"] if others else []
        return "\n".join(said)

    def _text(self, ranks: list[int]) -> str:
        one = len(ranks) == 1
        if doing := self._doing.get(ranks[0], ""):
            return f"{label(ranks)} {'is' if one else 'are'} still {doing}"
        return f"{label(ranks)} {'has' if one else 'have'} not answered since the last cell"

    def _interrupt(self, silent: list[int]) -> None:
        self._ranks.send(self._busy(silent) or silent, Interrupt(BETWEEN_CELLS))
        # A second interrupt does not wait for what the first one may still end.
        self._limit = Countdown(_FREED_SECONDS if self._limit is None else 0)

    def _end(self, stuck: list[int]) -> None:
        if not self._ranks.roster.can_replace and not self.pressed:
            raise UsageError(
                f"{self._text(stuck)} after {_PATIENCE_SECONDS:g} s, and cannot be interrupted. "
                "Type: %distributed restart"
            )
        for rank in stuck:
            self._ranks.end_rank(rank, f"it was {self._doing.get(rank) or 'silent'} between cells")
        self._limit = Countdown(_PATIENCE_SECONDS)  # for the news of their deaths
