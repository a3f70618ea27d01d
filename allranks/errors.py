"""The exceptions that allranks raises. Both sides; standard library only.

AllranksError
├── UsageError                invalid input: nothing was sent to the ranks, nothing is lost
│   └── InvalidCell           the cell is not valid Python: it was not run on any rank
├── MissingDependency         a package or program is missing: the message has the install command
├── ClusterError
│   ├── StartFailed           the ranks did not start: the message has the launcher's last lines
│   ├── ClusterLost           ranks died, and the cluster ended with them
│   └── WireError             a message between notebook and ranks cannot be read or written
├── CellFailed                a cell raised on at least one rank (carries one report per rank)
│   ├── RankDied              a rank died while it ran the cell; the others keep their variables
│   ├── CellInterrupted       the cell was interrupted
│   ├── CellTimeout           the cell exceeded its ``--timeout``
│   └── MapFailed             items of ``map`` failed (carries the results of the others)
│       └── MapInterrupted    ``map`` was interrupted (a CellInterrupted as well)
├── CheckFailed               a check of an exercise has failed: a box, without a traceback
├── FeatureFailed             a feature failed: its cell fails, the ranks and their variables stay
└── CollectiveError
    ├── CollectiveMismatch    the ranks passed different arguments to a collective
    │   └── Deadlock          ranks wait for messages of each other
    ├── RankLeft              a collective can never complete: a rank it needs has left the cell
    │   └── RankLost          a rank it needs has died, or its host cannot be reached
    ├── NotFinite             with --check nan, a rank has NaN or infinity in its input of a sum
    ├── WeightsDiffer         with --check weights, the ranks' weights differ after a step
    ├── StaleHandle           an asynchronous handle belongs to an epoch that has ended
    ├── TransportFailed       NCCL has failed, or the GPU itself
    └── NotInitialized        a collective was called before ``init()``

A message has three parts: what was expected, what was found, and what to type next.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

#: Heads the list of places at the end of the message of a rank that waited.
WAITING = "Waiting for it:"


#: What a user types: a magic, or what follows "Type:", up to the end of the clause.
_COMMAND = re.compile(
    r"(?:%{1,2}[a-z]{2}|(?<=[Tt]ype: )\S|(?<=[Tt]ype for example: )\S)"
    r"(?:[^\s.,;]|[.,;](?=\S)| (?! |\(|(?:and|or)\b))*"
)
#: They take no room on a line.
COLOURS = re.compile(r"\x1b\[[\d;]*m")
#: Stands for a space within a command, and is no white space where a line is broken.
_WITHIN = "\0"


def whole_commands(text: str, width: int) -> str:
    """Returns a text whose long lines with commands are broken between words, and no command is,
    unless it is longer than a line.
    """
    return "\n".join(
        _broken(line, width) if _is_long(line, width) and _COMMAND.search(line) else line
        for line in text.split("\n")
    )


def _is_long(line: str, width: int) -> bool:
    return len(line) > width and len(COLOURS.sub("", line)) > width


def _broken(line: str, width: int) -> str:
    def joined(found: re.Match[str]) -> str:
        return found[0].replace(" ", _WITHIN) if len(found[0]) <= width else found[0]

    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(_COMMAND.sub(joined, line)).replace(_WITHIN, " ")


def for_screen(text: str) -> str:
    """Returns a text as a terminal shows it: with `whole_commands`. Elsewhere it stays as it is,
    because a page has scrollers, or breaks lines itself.
    """
    if not sys.stdout.isatty():
        return text
    return whole_commands(text, shutil.get_terminal_size().columns)


@dataclass(frozen=True, slots=True)
class Report:
    """The reason why a cell ended early on one rank, as text for the notebook."""

    rank: int
    host: str
    device: str
    etype: str
    message: str
    traceback: tuple[str, ...]
    line: int | None
    source_line: str
    waiting: bool


class AllranksError(Exception):
    """Base class of the exceptions that allranks raises."""


class _WithoutTraceback(AllranksError):
    """An error whose message needs no traceback: all frames above it are in this package."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback.
        return [for_screen(f"{type(self).__name__}: {self}")]


class UsageError(_WithoutTraceback, ValueError):
    """Invalid input; nothing was sent to the ranks and nothing is lost."""


class InvalidCell(UsageError):
    """The cell is not valid Python; it was not run on any rank."""


class MissingDependency(_WithoutTraceback, ImportError):
    """A package or a program is missing; the message ends with the command that installs it."""


class ClusterError(_WithoutTraceback):
    """The cluster of ranks could not be started, reached or kept."""


class StartFailed(ClusterError):
    """The ranks did not start; the message ends with the launcher's last lines."""


class ClusterLost(ClusterError):
    """One or more ranks died, and the cluster ended with them."""


class WireError(ClusterError):
    """A message between notebook and ranks cannot be read or written.

    ``pid`` is the process that has sent it, on ``host`` if there are several, and ``rank`` the rank
    that it names, where they are known. ``is_unknown``: it is a record of a feature that this
    notebook does not have.
    """

    pid = 0
    host = ""
    rank = -1
    is_unknown = False


class CellFailed(AllranksError):
    """A cell raised on at least one rank.

    Attributes:
        reports: one :class:`Report` for each rank that did not finish.
        text: the whole report as the notebook shows it, with colour codes.
    """

    def __init__(self, message: str, text: str = "", reports: Sequence[Report] = ()) -> None:
        super().__init__(message)
        self.text = text or message
        self.reports = tuple(reports)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this text in place of the notebook's own frames."""
        return [for_screen(self.text)]


class RankDied(CellFailed):
    """A rank died while it ran a cell; the others have kept their variables."""


class CellInterrupted(CellFailed):
    """A cell was interrupted; ranks that leave it then, and their variables, are kept."""


class CellTimeout(CellFailed):
    """A cell exceeded its ``--timeout``; ranks that react to the interrupt are kept."""


class MapFailed(CellFailed):
    """Items of ``Cluster.map`` failed; all others have run.

    Attributes:
        results: the result of each item, in the order of the items; None for an item without one.
        failed: the report of each item that failed, by its number.
    """

    def __init__(
        self,
        message: str,
        text: str = "",
        results: Sequence[Any] = (),
        failed: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, text)
        self.results = list(results)
        self.failed = dict(failed or {})


class MapInterrupted(MapFailed, CellInterrupted):
    """``Cluster.map`` was interrupted; ``results`` has the items that had finished."""


class FeatureFailed(AllranksError):
    """A feature raised in a hook: the cell fails, the ranks and their variables stay."""


_BOX_WIDTH = 100
#: White on dark green and dark red, of the 256 fixed colours: JupyterLab's white is a grey, whose
#: contrast with its green and red is below 3, and not all terminals have colours of 24 bits.
RIGHT, WRONG, NOT_YET = "38;5;231;48;5;22", "38;5;231;48;5;88", "30;43"


def coloured_box(text: str, colour: str) -> str:
    """Returns the lines of a text on a background; ``colour`` is a code of ANSI terminals."""
    # A page would wrap longer lines, and the background of all others with them.
    parts = (wrap(line, _BOX_WIDTH, break_long_words=False) for line in text.splitlines())
    lines = [line for part in parts for line in part or [""]] or [""]
    width = max(map(len, lines))
    return "\n".join(f"\x1b[{colour}m {line:{width}} \x1b[0m" for line in lines)


class CheckFailed(AllranksError, AssertionError):
    """A check of an exercise has failed; its report has no traceback and no source of the check."""

    def _render_traceback_(self) -> list[str]:
        text = str(self)
        return [coloured_box(text, NOT_YET if text.startswith("not yet") else WRONG)]


class CollectiveError(AllranksError):
    """A collective operation could not be carried out."""


class CollectiveMismatch(CollectiveError):
    """The ranks passed different operations, dtypes, shapes or roots to one collective."""


class Deadlock(CollectiveMismatch):
    """Ranks wait for messages of each other, and none can go on."""


class NotFinite(CollectiveError):
    """A rank has NaN or infinity in its input of a sum or an average; no data was moved."""


class WeightsDiffer(CollectiveError):
    """The ranks' weights differ after a step of an optimizer."""


class RankLeft(CollectiveError):
    """A collective can never complete because a rank that it needs has left the cell."""


class RankLost(RankLeft):
    """A rank that a collective needs has died, or its host can no longer be reached."""


class StaleHandle(CollectiveError):
    """An asynchronous handle belongs to an epoch that has ended."""


class TransportFailed(CollectiveError):
    """NCCL, which moves a collective's data, has failed, or the GPU itself."""


class NotInitialized(CollectiveError, ValueError):
    """A collective was called before ``init()``, or after ``shutdown()``."""
