"""Labelled text: the lines of ranks, each behind the ranks that wrote it, and a terminal's view.

A rank's lines are collected as a terminal would show them (``RankText``). Identical lines of
several ranks become one row (``merge``), and so do lines that a feature folds, as progress bars.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, islice
from typing import Any, NamedTuple

from allranks.errors import COLOURS, for_screen
from allranks.records import config
from allranks.records.ranks import label, spans
from allranks.records.telemetry import Telemetry
from allranks.records.wire import Output
from allranks.widgets.extensions import LINE_FOLDERS, LineFolder, leaving_out

VARIABLE = "ALLRANKS_FRONT_END"
NOTEBOOK, CONSOLE, TERMINAL = "notebook", "console", "terminal"
#: What JupyterLab, Notebook 7 and VS Code send with the source of a cell.
_OF_CELLS = {"cellId", "deletedCells"}


def front_end() -> str:
    """Returns the kind of front end that shows the output of the running code.

    ``notebook`` changes displays in place; ``console`` is another front end of a kernel;
    ``terminal`` is no kernel's. Front ends do not identify themselves, and those without updates of
    displays drop them silently. So output is only appended, unless the request of the cell shows
    that its front end updates displays: then no output is lost.
    """
    kernel = of_this_process()
    if kernel is None:
        return TERMINAL
    said = config.variable_choice(VARIABLE, ("auto", NOTEBOOK, CONSOLE), "auto")
    if said != "auto":
        return said
    return NOTEBOOK if shows_updates(kernel.get_parent("shell")) else CONSOLE


def of_this_process() -> Any:
    """Returns the kernel that this process is, or None."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None)


def shows_updates(request: dict[str, Any]) -> bool:
    """Whether the front end that sent this request is known to change displays in place."""
    if request.get("header", {}).get("msg_type", "").startswith("comm_"):
        return True  # a button was clicked: where widgets are drawn, displays are updated
    # nbclient, and so papermill and nbconvert, keeps a notebook and accepts no input.
    nobody_types = request.get("content", {}).get("allow_stdin") is False
    return nobody_types or bool(_OF_CELLS & request.get("metadata", {}).keys())


_GUTTER = {"out": "│", "err": "!", "value": "→", "note": "·"}
_UP, _UP_ONE = "\x1b[A", "\x1b[1A"
_MOVES = re.compile(r"(\n|\x1b\[A)")
#: Erases the line; and what hides the cursor, which there is none of, or shows it.
_ERASE = "\x1b[2K"
_CURSOR = re.compile(r"\x1b\[\?25[hl]")
#: Colour codes stay; every other control character would act on the screen instead of showing.
#: Bytes of a file's name that are no text cannot be printed.
_CONTROL = re.compile(
    r"\x1b\[(?![0-9;]*m)[0-9;?]*[A-Za-z]|\x1b(?!\[[0-9;]*m)"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]"
)


#: The beginning of a note about a wait that lasts. The next note about the same wait says all
#: again, with more seconds; one with as many, or fewer, is of the next time that the call waits.
_WAIT = re.compile(r"(.+? has (?:waited|moved no data for)) (\d+) s\b")


class Line(NamedTuple):
    """One line of one rank. ``kind`` is out, err, value or note."""

    kind: str
    text: str


class Row(NamedTuple):
    """One line that these ranks wrote."""

    ranks: tuple[int, ...]
    line: Line


class RankText:
    """The lines that one rank has written, the last of them perhaps not ended."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._open = False
        #: How far above the last line the next text goes, as where there are several bars.
        self._up = 0
        #: The call of the last note about a wait, its seconds, and the lines from there to its end.
        self._wait, self._waited, self._wait_lines = "", 0, (0, 0)

    def feed(self, kind: str, text: str) -> None:
        if "\x1b[" in text:
            text = _CURSOR.sub("", text).replace(_UP_ONE, _UP)
        if self._up or _UP in text:
            self._feed_around(kind, text)
        elif kind == "note" and (found := _WAIT.match(text)):
            self._feed_wait(found[1], int(found[2]), text)
        else:
            self._feed(kind, text)

    def _feed_wait(self, call: str, seconds: int, text: str) -> None:
        begin, end = self._wait_lines
        if call == self._wait and seconds > self._waited and end == len(self.lines):
            del self.lines[begin:]
        begin = len(self.lines)
        self._feed("note", text)
        self._wait, self._waited = call, seconds
        self._wait_lines = begin, len(self.lines)

    def _feed_around(self, kind: str, text: str) -> None:
        for piece in _MOVES.split(text):
            if piece == "\n" and self._up:
                self._up -= 1
            elif piece == _UP:
                if not self._open:
                    self.add(Line(kind, ""))
                    self._open = True
                self._up = min(self._up + 1, len(self.lines) - 1)
            elif self._up:
                at = len(self.lines) - 1 - self._up
                self.lines[at] = Line(kind, _as_shown(self.lines[at].text + piece))
            else:
                self._feed(kind, piece)

    def _feed(self, kind: str, text: str) -> None:
        pieces = text.split("\n")
        for index, piece in enumerate(pieces):
            ended = index < len(pieces) - 1
            if self._open and self.lines and self.lines[-1].kind == kind:
                before = self.lines.pop().text
            elif piece or ended:
                before = ""
            else:
                continue
            # The line may have ended in \r\n.
            shown = (before + piece).removesuffix("\r") if ended else before + piece
            self.lines.append(Line(kind, _as_shown(shown)))
            self._open = not ended

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self._open = False

    @property
    def shown(self) -> list[Line]:
        """The lines, without blank ones at an end that is open, as bars of tqdm leave."""
        count = len(self.lines)
        while self._open and count and not self.lines[count - 1].text.strip():
            count -= 1
        return self.lines[:count]

    def take(self, ended_only: bool) -> list[Line]:
        kept = self.lines[-1 - self._up :] if ended_only and self._open else []
        self._up = self._up if kept else 0
        taken = self.lines[: len(self.lines) - len(kept)] if ended_only else self.shown
        self.lines = kept
        self._open, self._wait = bool(kept), ""
        return taken

    def clear(self) -> None:
        self.lines.clear()
        self._open, self._up, self._wait = False, 0, ""


def _as_shown(text: str) -> str:
    head, _, last = text.rpartition(_ERASE)[2].rpartition("\r")
    return last or head.rpartition("\r")[2]


#: The first line of a printed array, tensor, list or dictionary that continues on other lines.
_VALUE_BEGINS = re.compile(r"\s*[\w.]*[\[({]")
#: A bracket that is open for more lines than this belongs to no value.
_MOST_VALUE_LINES = 1000


def merge(lines: Mapping[int, Sequence[Line]]) -> list[Row]:
    """Returns the rows of several ranks' lines.

    Every rank's lines stay in their order. A line waits for the ranks that are still to write it,
    so that the rows do not depend on who was faster. Lines that a feature folds are one line.
    The lines of a value are folded together or not at all.
    """
    rows = _merged_and_folded({rank: _joined(some) for rank, some in lines.items() if some})
    return [
        Row(row.ranks, Line(row.line.kind, text))
        for row in rows
        for text in row.line.text.split("\n")
    ]


def _joined(lines: Sequence[Line]) -> Sequence[Line]:
    """Returns lines with those of each value joined into one, by line ends."""
    last = _lines_of_values(lines)
    if not last:
        return lines
    joined, at = [], 0
    while at < len(lines):
        end = last.get(at, at) + 1
        text = "\n".join(line.text for line in lines[at:end]) if end > at + 1 else lines[at].text
        joined.append(Line(lines[at].kind, text))
        at = end
    return joined


def _lines_of_values(lines: Sequence[Line]) -> dict[int, int]:
    """Returns the last line of each value that begins with a line, by position."""
    last: dict[int, int] = {}
    #: The lines that have opened brackets, and how many were open before.
    open_lines: list[tuple[int, int]] = []
    kind, first, depth = "", 0, 0
    for at, line in enumerate(lines):
        if line.kind != kind:
            kind, first, depth = line.kind, at, 0
            open_lines.clear()
        if kind == "value":
            if at > first:
                last[first] = at
            continue
        text = COLOURS.sub("", line.text) if "\x1b" in line.text else line.text
        begins = _VALUE_BEGINS.match(text)
        if not begins and not open_lines:
            continue  # most lines, in little time
        opened = sum(map(text.count, "[({")) - sum(map(text.count, "])}"))
        if begins and opened > 0:
            open_lines.append((at, depth))
        depth += opened
        while open_lines and open_lines[-1][1] >= depth:
            begun, _ = open_lines.pop()
            if at - begun < _MOST_VALUE_LINES:
                last[begun] = at
    return last


def _merged_and_folded(lines: Mapping[int, Sequence[Line]]) -> list[Row]:
    texts = [line.text for some in lines.values() for line in some]
    for folder in [*LINE_FOLDERS]:
        with leaving_out(LINE_FOLDERS, folder, folder.folded):  # also where its marks are no texts
            if any(mark in text for mark in folder.marks for text in texts):
                return _folded(lines, folder)
    return _merged(lines)


def _folded(lines: Mapping[int, Sequence[Line]], folder: LineFolder) -> list[Row]:
    name_of = folder.name_of
    named = {
        rank: [Line(kind, name_of(text) or text) for kind, text in lines[rank]] for rank in lines
    }
    rows = []
    at = dict.fromkeys(lines, 0)
    for ranks, line in _merged(named):
        own = [lines[rank][at[rank]] for rank in ranks]
        if own[0].text is not line.text:
            line = Line(line.kind, folder.folded([one.text for one in own], ranks))
        for rank in ranks:
            at[rank] += 1
        rows.append(Row(ranks, line))
    return rows


def _merged(lines: Mapping[int, Sequence[Line]]) -> list[Row]:
    left = {rank: Counter(lines[rank]) for rank in sorted(lines)}
    #: How many ranks have still to write each line.
    owners = Counter(line for counts in left.values() for line in counts)
    coming = {rank: iter(lines[rank]) for rank in left}
    #: By the next line of each rank, whose it is.
    heads: dict[Line, list[int]] = {}
    #: Lines that no further rank will write, that of the lowest rank first.
    ready: list[tuple[int, Line]] = []

    def advance(ranks: Iterable[int]) -> None:
        seen = set()
        for rank in ranks:
            for line in islice(coming[rank], 1):
                heads.setdefault(line, []).append(rank)
                seen.add(line)
        for line in seen:
            if len(heads[line]) == owners[line]:
                heappush(ready, (min(heads[line]), line))

    def width(line: Line) -> tuple[int, int]:
        return len(heads[line]), -min(heads[line])

    rows: list[Row] = []
    advance(left)
    while heads:
        # Where orders cross, the widest agreement goes first.
        line = heappop(ready)[1] if ready else max(heads, key=width)
        ranks = sorted(heads.pop(line))
        rows.append(Row(tuple(ranks), line))
        for rank in ranks:
            left[rank][line] -= 1
            owners[line] -= not left[rank][line]
        advance(ranks)
    return rows


def clean(text: str) -> str:
    # Only colour codes act on the screen.
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def render(rows: Sequence[Row], noun: str = "rank") -> str:
    # A run of rows of the same ranks is labelled once.
    labels = {ranks: label(ranks, noun) for ranks in {row.ranks for row in rows}}
    width = max(map(len, labels.values()), default=0)
    lines = []
    before: tuple[int, ...] | None = None
    for row in rows:
        name = labels[row.ranks] if row.ranks != before else ""
        before = row.ranks
        lines.append(f"{name:<{width}} {_GUTTER[row.line.kind]} {clean(row.line.text)}".rstrip())
    return "\n".join(lines)


def described(rows: Sequence[Row], noun: str = "rank") -> Data:
    """Returns the metadata of what `render` returns: whose lines they are, one run after the other,
    and where their text begins. A front end shows them rank by rank.
    """
    if noun != "rank":
        return {}
    width = max((len(label(ranks)) for ranks in {row.ranks for row in rows}), default=0)
    runs = [[spans(ranks), len([*run])] for ranks, run in groupby(rows, key=lambda row: row.ranks)]
    return {"allranks": {"lines": runs, "indent": width + 3}}


@dataclass(eq=False, repr=False)
class TextView:
    """The common part of the text views of a notebook and of a terminal.

    Telemetry is ignored here: views with a panel show it. ``noun`` is rank, member or item.
    """

    ranks: Sequence[int]
    log_dir: str = ""
    fold: bool = True
    noun: str = "rank"

    def __post_init__(self) -> None:
        #: The logs of members, which have names of their own.
        self.log_of: dict[int, str] = {}

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None: ...

    def left(self, rank: int, status: str) -> None: ...

    def name_cause(self, text: str) -> None:
        """Does nothing: there is no panel, and a line below the cell names it."""

    def _as_text(self, rank: int, entry: list[Any]) -> tuple[str, str] | None:
        # The kind of line and the text of an entry of a rank's output; None for displays.
        kind, *rest = entry
        if kind in ("out", "err"):
            return kind, rest[0]
        if kind == "notice":
            return "note", f"{rest[0]}\n"
        return ("note", f"{self._hidden_note(rank, *rest)}\n") if kind == "hidden" else None

    def _hidden_note(self, rank: int, lines: int, nbytes: int) -> str:
        default = f"{self.log_dir}/rank-{rank}.log" if self.log_dir else ""
        path = self.log_of.get(rank, default)
        where = f"; the whole output is in {path}" if path else ""
        size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else config.size_text(nbytes)
        if not lines:
            return f"… {size} of long lines are not shown{where}"
        what, are = ("line", "is") if lines == 1 else ("lines", "are")
        return f"… {lines:,} {what} ({size}) {are} not shown{where}"

    def _rows(self, lines: Mapping[int, Sequence[Line]]) -> list[Row]:
        if self.fold:
            return merge(lines)
        return [Row((rank,), line) for rank in sorted(lines) for line in lines[rank]]


Data = dict[str, Any]


def is_rich(data: Mapping[str, Any]) -> bool:
    return not set(data) <= {"text/plain"}


#: A line is held this long, for ranks that write the same one a moment later.
_LINE_HOLD_SECONDS = 0.25
#: What is updated is printed again, at most so often, as it then is.
_UPDATE_SECONDS = 2.0
_PICTURE = "rich"


class TerminalView(TextView):
    """Prints labelled lines of ranks on standard output, and figures where they can be seen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in_kernel = front_end() != TERMINAL
        self._texts = {rank: RankText() for rank in self.ranks}
        self._oldest: float | None = None
        #: Of each rank, what it has updated and that is not printed yet.
        self._updated: dict[int, dict[str, tuple[Data, Data]]] = {}
        self._next_update = 0.0
        self._rich: dict[str, tuple[Data, Data]] = {}

    def output(self, batch: Output) -> None:
        text = self._texts.setdefault(batch.rank, RankText())
        for kind, *rest in batch.entries:
            if kind == "update":
                data, metadata, name = rest
                self._updated.setdefault(batch.rank, {})[name or ""] = data, metadata
                continue
            if kind == "clear":
                text.clear()
                self._updated.pop(batch.rank, None)
                continue
            self._print_updated(batch.rank)
            if line := self._as_text(batch.rank, [kind, *rest]):
                text.feed(*line)
            else:
                self._display(batch.rank, kind, rest[0], rest[1])
        if batch.entries and self._oldest is None:
            self._oldest = time.monotonic()

    def _print_updated(self, rank: int) -> None:
        for data, metadata in self._updated.pop(rank, {}).values():
            self._display(rank, "display", data, metadata)

    def _display(self, rank: int, kind: str, data: Data, metadata: Data) -> None:
        text = self._texts.setdefault(rank, RankText())
        if self._in_kernel and is_rich(data):
            # The same one of several ranks is folded as a line is.
            name = repr((data, metadata))
            self._rich[name] = data, metadata
            text.add(Line(_PICTURE, name))
            return
        plain = str(data.get("text/plain", f"<{', '.join(data)}>"))
        text.feed("value" if kind == "result" else "out", plain + "\n")

    def notice(self, text: str) -> None:
        self._print()
        self.write(for_screen(f"· {text}"))

    def say(self, text: str) -> None:
        self.notice(text)

    def show_text(self, text: str) -> None:
        self._print()
        self.write(text)

    def write(self, text: str) -> None:
        print(text, file=sys.stdout, flush=True)

    def make_way(self) -> None:
        self._print()

    def refresh(self) -> None:
        if self._oldest is not None and time.monotonic() - self._oldest >= _LINE_HOLD_SECONDS:
            self._print(ended_only=True)

    def finish(self) -> None:
        self._print()

    def _print(self, ended_only: bool = False) -> None:
        if self._updated and (not ended_only or time.monotonic() >= self._next_update):
            self._next_update = time.monotonic() + _UPDATE_SECONDS
            for rank in list(self._updated):
                self._print_updated(rank)
        taken = {rank: text.take(ended_only) for rank, text in self._texts.items()}
        self._oldest = time.monotonic() if self._updated else None
        for is_line, some in groupby(self._rows(taken), lambda row: row.line.kind != _PICTURE):
            if is_line:
                self.write(render(list(some), self.noun))
            else:
                for row in some:
                    self._show_rich(row)
        self._rich.clear()

    def _show_rich(self, row: Row) -> None:
        from IPython.display import display

        show: Any = display
        data, metadata = self._rich[row.line.text]
        self.write(f"{label(row.ranks, self.noun)}:")
        show(data, raw=True, metadata=metadata)
