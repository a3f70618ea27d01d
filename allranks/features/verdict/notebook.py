"""Shows why a cell was slow: a line below it, and ``%distributed why``.

While a cell runs, only its records that come anyway are looked at, from the first one on: of most
cells there are none. The ranks are asked for more when a cell with a loop of collectives has ended.
"""

from __future__ import annotations

import os
import time
from functools import cached_property, partial
from typing import Any

from allranks.cluster.features import CellContext, ClusterContext, NotebookFeature
from allranks.cluster.options import CellOption, LineCommand, StartOption
from allranks.errors import UsageError
from allranks.features.verdict import CHECK, LEAST_STEPS, MEASURED, VARIABLE
from allranks.features.verdict.explained import compare, explain
from allranks.features.verdict.logged import NotNumbers
from allranks.features.verdict.records import CellParts, RankPart
from allranks.features.verdict.results import not_a_number
from allranks.features.verdict.rules import verdicts
from allranks.records.telemetry import Points, Pulse, Timings
from allranks.records.wire import Record

_OPTION = StartOption(
    "verdict", VARIABLE, ("on", "off"), "a line below a cell that says why it is slow"
)
#: A shorter cell is not judged.
_LEAST_SECONDS = 1.0
#: Ranks answer at once, unless C code holds the interpreter.
_ASK_SECONDS = 1.0
#: The parts of this many cells are kept.
_CELLS = 20
_KEPT = (
    f"ran for {_LEAST_SECONDS:g} s or longer on several ranks, with {LEAST_STEPS} or more "
    "collectives of one line"
)
#: Of a row of `Timings`.
_CALLS_AT = 6


class WatchedCell:
    """What the records that come by themselves say of a cell. Filled by the receiving thread."""

    def __init__(self, cell: CellContext) -> None:
        self.cell = cell
        self.loops = False
        """Whether a line has made enough calls."""
        self.trains = False
        """Whether an optimizer has: also ranks that each train a model alone are compared."""
        self.said = ""
        """What was shown while the cell ran."""
        self.logs = False
        """Whether a rank has logged values."""

    @cached_property
    def logged(self) -> NotNumbers:
        return NotNumbers()

    def take(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Timings) and not self.loops:
            self.loops = any(row[_CALLS_AT] >= LEAST_STEPS for row in record.rows)
        elif isinstance(record, Pulse):
            self.trains = self.trains or record.optimizer_steps >= LEAST_STEPS
        elif isinstance(record, Points):
            self.logged.take(record, payloads[0])
            if not self.logs:
                self.logs = True
                self.cell.poll(self._say_nan)

    def _say_nan(self) -> bool:
        """Shows at once that a value has become NaN: the rest of the cell may be in vain."""
        if not self.said and (found := self.logged.lasting_not_numbers()):
            (cause,) = not_a_number(CellParts(self.cell.number, [], not_numbers=found))
            self.said = str(cause)
            self.cell.notice(self.said)
        return False

    @property
    def well(self) -> bool:
        return all(one.status == "ok" for one in self.cell.replies().values())

    def left(self) -> tuple[tuple[int, ...], int | None]:
        """Returns the ranks that had ended the cell, and the line in which others waited."""
        replies = self.cell.replies()
        ok = tuple(sorted(rank for rank, one in replies.items() if one.status == "ok"))
        lines = {
            one.report.line
            for one in replies.values()
            if one.report is not None and one.report.waiting and one.report.etype == "RankLeft"
        }
        others = {one.status for one in replies.values()} - {"ok"}
        return (ok, lines.pop()) if len(lines) == 1 and others == {"waiting"} else ((), None)


class NotebookVerdict(NotebookFeature):
    """Judges each cell that the user sees."""

    start_options = (_OPTION,)
    cell_options = (
        CellOption(
            "check",
            "check",
            {
                "choices": ("weights", "nan"),
                "help": "raise where the ranks' weights differ after a step, or a rank adds NaN to "
                "a sum",
            },
            prepares=True,
        ),
    )
    line_commands = (
        LineCommand(
            "why",
            "says why a cell is slow, or compares two cells",
            "CELL",
            "numbers of one or two cells, as 12 15; default: the last one with a loop",
        ),
    )
    commands = frozenset({"check", "members", "verdict"})
    arriving: tuple[type[Record], ...] = ()

    def __init__(self) -> None:
        self._watched: WatchedCell | None = None
        self._judges = False
        self._is_off = False
        #: What the ranks check in the next cell.
        self._check = ""
        #: By the numbers that the notebook shows.
        self._cells: dict[int, CellParts] = {}
        self._is_last_kept = False
        """Whether the last of them is the last cell that the ranks have run."""

    def started(self, cluster: ClusterContext) -> None:
        said = cluster.settings.get(VARIABLE) or os.environ.get(VARIABLE, "")
        # One rank waits for none, and is the process of simulated ranks.
        self._is_off = said == "off"
        self._judges = cluster.size > 1 and not self._is_off
        self.arriving = (Timings, Points, Pulse) if self._judges else ()
        self._watched = None
        self._await_cell()

    def _await_cell(self) -> None:
        # For the beginning of the next cell; `message_arriving` does it for the end of this one.
        self.in_cells = bool(self._check) or (self._judges and self._is_last_kept)

    def cell_started(self) -> None:
        if self.cell is None or not self.cell.shown:
            return
        if self._check:
            check, self._check = self._check, ""
            self.cell.ask_soon(CHECK, {"what": check}, lambda _: None, self.cell.ranks)
        self._is_last_kept = False
        self._await_cell()

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        cell, watched = self.cell, self._watched
        if cell is None or getattr(record, "cell", 0) != cell.number:
            return record
        if watched is None or watched.cell is not cell:  # of a cell that was interrupted
            if not cell.shown or len(cell.ranks) < 2:
                return record
            self._watched = watched = WatchedCell(cell)
            self.in_cells = True
        watched.take(record, payloads)
        return record

    def cell_finished(self) -> None:
        watched, self._watched = self._watched, None
        self._await_cell()
        if watched is None or watched.cell is not self.cell:
            return
        if time.monotonic() - watched.cell.began < _LEAST_SECONDS:
            return
        logs_nan = watched.logs and watched.logged.causes()
        if not watched.loops and not watched.trains and not logs_nan:
            return
        try:
            line = self._line_of(watched)
        except KeyboardInterrupt:
            return  # while the ranks are asked: the cell itself has ended
        except Exception as error:  # which would fail a cell that is right
            line = (
                f"why this cell is slow cannot be said: {type(error).__name__}: {error}. To leave "
                "the line out: %distributed start --verdict off"
            )
        if line:
            # It was shown when fewer ranks had the same value.
            if not watched.said or _where(line) != _where(watched.said):
                watched.cell.notice(line)
            watched.cell.name_cause(line)
            watched.cell.show_output()

    def _line_of(self, watched: WatchedCell) -> str:
        parts = self._parts_of(watched)
        if parts is None:
            return ""
        self._keep(parts)
        found = verdicts(parts)
        return str(found[0]) if found else ""

    def _parts_of(self, watched: WatchedCell) -> CellParts | None:
        cell = watched.cell
        asked = {"cell": cell.number}
        answers = cell.ask(MEASURED, asked, cell.ranks, _ASK_SECONDS)
        ranks = [RankPart.read(rank, *answer) for rank, answer in sorted(answers.items())]
        # A new process in the place of a dead rank has nothing of the cell.
        if len(ranks) < len(cell.ranks) or any(part.number < 0 for part in ranks):
            return None
        left, waits_at = watched.left()
        return CellParts(
            number=ranks[0].number,
            ranks=ranks,
            logged=watched.logged.steps,
            not_numbers=watched.logged.causes() or watched.logged.never_numbers(),
            left=left,
            waits_at=waits_at,
            well=watched.well,
        )

    def _keep(self, parts: CellParts) -> None:
        self._cells.pop(parts.number, None)
        self._cells[parts.number] = parts
        self._is_last_kept = True
        self._await_cell()
        for old in [*self._cells][:-_CELLS]:
            del self._cells[old]

    def command(self, name: str, *arguments: Any) -> Any:
        """``why`` takes words, and returns a text. ``check`` takes the option of that name, and
        returns what has the next cell checked. ``verdict`` takes the number of a cell, and returns
        the lines of its causes. ``members`` returns what looks at the values that members of an
        ensemble log, None if nothing is judged.
        """
        if name == "check":
            (asked,) = arguments
            return partial(self._check_next, asked["check"])
        if name == "members":
            return NotNumbers() if not self._is_off else None
        if name == "verdict":
            (number,) = arguments
            parts = self._cells.get(number)
            return "\n".join(map(str, verdicts(parts))) if parts is not None else ""
        (words,) = arguments
        if len(words) > 2:
            raise UsageError(
                f"expected the numbers of one or two cells, found {len(words)}. "
                "Type for example: %distributed why 12 15"
            )
        cells = [self._find(word) for word in words] or [self._find("")]
        if not words and not self._is_last_kept:
            return (
                "the last cell on ranks has no records to explain. Needed is one that "
                f"{_KEPT}, as this earlier one:\n{explain(cells[0])}"
            )
        if len(cells) == 1:
            return explain(cells[0])
        return f"{compare(*cells)}\n\n{explain(cells[0])}\n\n{explain(cells[1])}"

    def _check_next(self, what: str) -> None:
        self._check = what
        self._await_cell()

    def _find(self, word: str) -> CellParts:
        number = next(reversed(self._cells), None) if not word else None
        if word.isdecimal() and len(word) < 10:
            number = int(word)
        found = self._cells.get(number) if number is not None else None
        if found is None:
            there = ", ".join(map(str, sorted(self._cells))) or "none so far"
            asked = f", and {word!r:.20} is none of them" if word else ""
            raise UsageError(
                f"expected the number of a cell that {_KEPT}, found {there}{asked}. "
                "Type for example: %distributed why 12"
            )
        return found


def _where(line: str) -> str:
    """Returns the part of a line before its ranks: the value, and the step."""
    return line.partition(" on rank")[0]


FEATURE = NotebookVerdict
