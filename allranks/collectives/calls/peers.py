"""The scope that ranks enter and leave together: a notebook cell, or the whole process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.board import GONE, Board
from allranks.records.ranks import compact

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call

NEWLINE = "\n"
FINISHED = "finished the cell"
"""Why a rank has left a cell in which nothing went wrong for it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What this rank runs now, and which ranks run it with it."""

    name: str
    number: int
    ranks: frozenset[int] | None


_LOST = {
    fields.SILENT: "its host {} does not answer",
    fields.ENDED: "the first rank of its host {} has ended",
}
PROCESS = Scope("the program", 0, None)


@dataclass(slots=True)
class State:
    """What is known of a rank, from the board."""

    entered: int = 0
    left: int = 0
    failed: bool = False
    broken: int = 0
    reason: str = ""
    where: str = ""
    broke: str = ""
    lost: int = 0
    """`SILENT` or `ENDED` where its host cannot be reached any more."""


class Peers:
    """Who of the others is in the scope, who has left it and why."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.host_names: tuple[str, ...] = ()
        """For every rank the name of its host, where there are several."""
        self.died: dict[int, str] = {}
        """How ranks died that were not replaced yet, in words that follow the name."""

    def state(self, rank: int) -> State:
        """What is known of a rank now."""
        board = self.board
        left, broken = board.get(rank, fields.LEFT), board.get(rank, fields.BROKEN)
        return State(
            entered=board.get(rank, fields.ENTERED),
            left=left,
            failed=bool(board.get(rank, fields.FAILED)),
            broken=broken,
            reason=board.text(rank, fields.REASON) if left else "",
            where=board.text(rank, fields.WHERE) if left else "",
            broke=board.text(rank, fields.BROKE) if broken else "",
            lost=board.get(rank, fields.LOST),
        )

    def progress(self, rank: int, group: int) -> tuple[int, int]:
        """The last call that a rank has agreed on in a group, and the last that it finished."""
        return self.board.progress(rank, group)

    def lost(self, rank: int) -> bool:
        """Whether it has died, or its host cannot be reached any more."""
        return rank in self.died or bool(self.board.get(rank, fields.LOST))

    def departure(self, rank: int, scope: Scope, epoch: int) -> tuple[int, str] | None:
        """Why a rank will never come, in words that follow its name; None while it may.

        The number orders reasons: a rank that raised tells more than one that gave up after it.
        """
        if rank in self.died:
            return -1, self.died[rank]
        if scope.ranks is not None and rank not in scope.ranks:
            return 1, f"does not run {scope.name} (-r {compact(scope.ranks, '-').replace(' ', '')})"
        state = self.state(rank)
        # Numbers on the board are one higher than the scope's: 0 says "never".
        here = scope.number + 1
        if state.left >= (here if scope.number else GONE):
            if state.reason == FINISHED:
                cell = scope.name.removeprefix("cell ")
                return 1, FINISHED if cell == "cell" else f"finished {cell}"
            reason = f" ({state.reason.partition(NEWLINE)[0]})" if state.reason else ""
            where = f" at {state.where}" if state.where else ""
            return 0 if state.failed else 1, f"has left {scope.name}{where}{reason}"
        if scope.number > 0 and state.entered > here:
            return 1, f"has left {scope.name}"
        if state.lost:
            return 0, "cannot be reached: " + _LOST[state.lost].format(self.host_names[rank])
        if state.broken >> 1 == epoch + 1:
            return 2, state.broke
        return None

    def refusal(self, rank: int, call: Call) -> tuple[int, str] | None:
        """Why a rank will not do its part of a call to which it has come, as `departure`."""
        board = self.board
        of, number = board.get(rank, fields.REFUSED_OF), board.get(rank, fields.REFUSED)
        refused = of == call.members.number + 1 and number == call.number
        return (0, board.text(rank, fields.BROKE)) if refused else None

    def deadlocked(self, rank: int, epoch: int) -> str | None:
        """What a rank found when it saw that ranks wait for each other."""
        state = self.state(rank)
        return state.broke if state.broken == (epoch + 1) * 2 + 1 else None
