"""Shows why a cell was slow: a line below it, and ``%distributed why``.

While a cell runs, only its records that come anyway are looked at. The ranks are asked for more
when a cell with a loop of collectives has ended.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from typing import Any

from allranks.cluster.features import CellContext, ClusterContext, NotebookFeature
from allranks.cluster.options import LineCommand, StartOption
from allranks.errors import UsageError
from allranks.features.verdict import CHECK, LEAST_STEPS, MEASURED, VARIABLE
from allranks.features.verdict.explained import compare, explain
from allranks.features.verdict.records import CellParts, NotANumber, RankPart
from allranks.features.verdict.results import NOT_NUMBERS, not_a_number
from allranks.features.verdict.rules import verdicts
from allranks.records.telemetry import Points, Pulse, Timings
from allranks.records.wire import Record, Reply

_OPTION = StartOption(
    "verdict", VARIABLE, ("on", "off"), "a line below a cell that says why it is slow"
)
#: A shorter cell is not judged.
_LEAST_SECONDS = 1.0
#: Ranks answer at once, unless C code holds the interpreter.
_ASK_SECONDS = 1.0
#: The parts of this many cells are kept.
_CELLS = 20
#: More curves are not looked at.
_MOST_CURVES = 10_000
#: Of a row of `Timings`.
_CALLS_AT = 6


class WatchedCell:
    """What the records that come by themselves say of a cell. Filled by the receiving thread."""

    def __init__(self, cell: CellContext) -> None:
        self.cell = cell
        self.began = time.monotonic()
        self.loops = False
        """Whether a line has made enough calls."""
        self.trains = False
        """Whether an optimizer has: also ranks that each train a model alone are compared."""
        self.said = ""
        """What was shown while the cell ran."""
        self._logged: dict[tuple[int, str, str], int] = {}
        #: The last step of each.
        self._reached: dict[tuple[int, str, str], float] = {}
        #: From which step on a value is NaN, and how often it was.
        self._not_numbers: dict[tuple[int, str, str], tuple[float, int]] = {}
        #: How often in a row it was NaN before it was a number, for each that ever was one.
        self._gaps: dict[tuple[int, str, str], int] = {}
        #: How often it was a number.
        self._numbers: dict[tuple[int, str, str], int] = {}
        self._replies: dict[int, Reply] = {}

    def take(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Timings) and not self.loops:
            self.loops = any(row[_CALLS_AT] >= LEAST_STEPS for row in record.rows)
        elif isinstance(record, Pulse):
            self.trains = self.trains or record.optimizer_steps >= LEAST_STEPS
        elif isinstance(record, Points):
            self._take_points(record, array("d", payloads[0]))
        elif isinstance(record, Reply):
            self._replies[record.rank] = record

    def _take_points(self, record: Points, pairs: array[float]) -> None:
        at = 0
        for name, member, count in record.series:
            steps, values = pairs[at : at + 2 * count : 2], pairs[at + 1 : at + 2 * count : 2]
            at += 2 * count
            key = record.rank, name, member
            if key not in self._logged and len(self._logged) >= _MOST_CURVES:
                continue
            self._logged[key] = self._logged.get(key, 0) + count
            self._reached[key] = max(steps, default=0.0)
            if not math.isnan(sum(values)):
                self._take_numbers(key, count)
                continue
            # The sum of opposite infinities is NaN as well.
            for step, value in zip(steps, values, strict=True):
                if math.isnan(value):
                    first, times = self._not_numbers.get(key, (step, 0))
                    self._not_numbers[key] = first, times + 1
                else:
                    self._take_numbers(key, 1)

    def _take_numbers(self, key: tuple[int, str, str], count: int) -> None:
        self._numbers[key] = self._numbers.get(key, 0) + count
        _, times = self._not_numbers.pop(key, (0.0, 0))
        self._gaps[key] = max(times, self._gaps.get(key, 0))

    @property
    def logged(self) -> int:
        return max(self._logged.copy().values(), default=0)

    def lasting_not_numbers(self) -> list[NotANumber]:
        """Returns where one value of the running cell is NaN, if it has been for some steps.

        A value that is NaN for fewer steps may be a number again. Ranks send their values in turns:
        none is named before all have sent the step.
        """
        lasting = {(one.name, one.member) for one in self.not_numbers(LEAST_STEPS)}
        if not lasting:
            return []
        reached: dict[tuple[str, str], float] = {}
        for (_, name, member), at in self._reached.copy().items():
            reached[name, member] = min(at, reached.get((name, member), math.inf))
        # A value may be a number again meanwhile: then its curve is missing here.
        found: dict[tuple[str, str], list[NotANumber]] = {}
        for one in self.not_numbers(1):
            found.setdefault((one.name, one.member), []).append(one)
        for curve, same in found.items():
            if curve in lasting and reached[curve] >= min(one.step for one in same):
                return same
        return []

    def not_numbers(self, least: int = NOT_NUMBERS) -> list[NotANumber]:
        """Returns the values that are NaN now, ``least`` times in a row at least."""
        if not self._not_numbers or self.logged < LEAST_STEPS:
            return []
        return [
            NotANumber(key[1], key[0], step, key[2])
            for key, (step, times) in self._not_numbers.copy().items()
            # A value that was never a number, or was NaN for as long before, may be one that is not
            # measured in each step; so may one that was measured once.
            if times >= least
            and times > self._gaps.get(key, times)
            and self._numbers.get(key, 0) > 1
        ]

    @property
    def well(self) -> bool:
        return all(one.status == "ok" for one in self._replies.values())

    def left(self) -> tuple[tuple[int, ...], int | None]:
        """Returns the ranks that had ended the cell, and the line in which others waited."""
        ok = tuple(sorted(rank for rank, one in self._replies.items() if one.status == "ok"))
        lines = {
            one.report.line
            for one in self._replies.values()
            if one.report is not None and one.report.waiting and one.report.etype == "RankLeft"
        }
        others = {one.status for one in self._replies.values()} - {"ok"}
        return (ok, lines.pop()) if len(lines) == 1 and others == {"waiting"} else ((), None)


class NotebookVerdict(NotebookFeature):
    """Judges each cell that the user sees."""

    start_options = (_OPTION,)
    line_commands = (
        LineCommand(
            "why",
            "says why a cell is slow, or compares two cells",
            "CELL",
            "numbers of one or two cells, as 12 15; default: the last one with a loop",
        ),
    )
    commands = frozenset({"check", "verdict"})
    arriving: tuple[type[Record], ...] = ()

    def __init__(self) -> None:
        self._watched: WatchedCell | None = None
        self._judges = False
        #: What the ranks check in the next cell.
        self._check = ""
        #: By the numbers that the notebook shows.
        self._cells: dict[int, CellParts] = {}

    def started(self, cluster: ClusterContext) -> None:
        said = cluster.settings.get(VARIABLE) or os.environ.get(VARIABLE, "")
        # One rank waits for none, and is the process of simulated ranks.
        self._judges = cluster.size > 1 and said != "off"
        self.in_cells = self._judges or bool(self._check)
        self._watched = None

    def cell_started(self) -> None:
        if self.cell is None or not self.cell.shown:
            return
        if self._check:
            check, self._check = self._check, ""
            self.cell.ask_soon(CHECK, {"what": check}, lambda _: None, self.cell.ranks)
            self.in_cells = self._judges
        if self._judges and len(self.cell.ranks) > 1:
            self._watched = WatchedCell(self.cell)
            self.arriving = (Timings, Points, Pulse, Reply)
            self.cell.poll(self._say_nan)

    def _say_nan(self) -> bool:
        """Shows at once that a value has become NaN: the rest of the cell may be in vain."""
        watched = self._watched
        if watched is not None and not watched.said and (found := watched.lasting_not_numbers()):
            (cause,) = not_a_number(CellParts(watched.cell.number, [], not_numbers=found))
            watched.said = str(cause)
            watched.cell.notice(watched.said)
        return False

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        watched = self._watched
        if watched is not None and getattr(record, "cell", 0) == watched.cell.number:
            watched.take(record, payloads)
        return record

    def cell_finished(self) -> None:
        # A call of allranks itself, as one that keeps variables, may end within the cell's end.
        if self.cell is not None and not self.cell.shown:
            return
        watched, self._watched = self._watched, None
        self.arriving = ()
        if watched is None or time.monotonic() - watched.began < _LEAST_SECONDS:
            return
        if not watched.loops and not watched.trains and not watched.not_numbers():
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
            logged=watched.logged,
            not_numbers=watched.not_numbers(),
            left=left,
            waits_at=waits_at,
            well=watched.well,
        )

    def _keep(self, parts: CellParts) -> None:
        self._cells.pop(parts.number, None)
        self._cells[parts.number] = parts
        for old in [*self._cells][:-_CELLS]:
            del self._cells[old]

    def command(self, name: str, *arguments: Any) -> Any:
        """``why`` takes words, and returns a text. ``check`` takes what the ranks check in the next
        cell, ``nan`` or ``weights``. ``verdict`` takes the number of a cell, and
        returns the lines of its causes.
        """
        if name == "check":
            (self._check,) = arguments
            self.in_cells = True
            return None
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
        if len(cells) == 1:
            return explain(cells[0])
        return f"{compare(*cells)}\n\n{explain(cells[0])}\n\n{explain(cells[1])}"

    def _find(self, word: str) -> CellParts:
        number = next(reversed(self._cells), None) if not word else None
        if word.isdecimal() and len(word) < 10:
            number = int(word)
        found = self._cells.get(number) if number is not None else None
        if found is None:
            there = ", ".join(map(str, sorted(self._cells))) or "none so far"
            asked = f", and {word!r:.20} is none of them" if word else ""
            raise UsageError(
                f"expected the number of a cell that ran for {_LEAST_SECONDS:g} s or longer on "
                f"several ranks, with {LEAST_STEPS} or more collectives of one line, found "
                f"{there}{asked}. Type for example: %distributed why 12"
            )
        return found


def _where(line: str) -> str:
    """Returns the part of a line before its ranks: the value, and the step."""
    return line.partition(" on rank")[0]


FEATURE = NotebookVerdict
