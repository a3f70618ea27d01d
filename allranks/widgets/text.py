"""Labelled text: what ranks wrote, each line behind the ranks that wrote it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.records.ranks import label
from allranks.widgets.fold import Line, Row

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


class RankText:
    """The lines that one rank has written, the last of them perhaps not ended."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._open = False
        #: How far above the last line the next text goes, as where there are several bars.
        self._up = 0

    def feed(self, kind: str, text: str) -> None:
        """Takes in text; a carriage return starts its line anew, as on a terminal."""
        if "\x1b[" in text:
            text = _CURSOR.sub("", text).replace(_UP_ONE, _UP)
        if self._up or _UP in text:
            self._feed_around(kind, text)
        else:
            self._feed(kind, text)

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
            shown = (before + piece).removesuffix("\r") if ended else before + piece
            self.lines.append(Line(kind, _as_shown(shown)))
            self._open = not ended

    def add(self, line: Line) -> None:
        """Takes in a whole line."""
        self.lines.append(line)
        self._open = False

    def take(self, ended_only: bool) -> list[Line]:
        """Returns the lines and forgets them; an unended last one stays where asked."""
        kept = self.lines[-1 - self._up :] if ended_only and self._open else []
        self._up = self._up if kept else 0
        taken = self.lines[: len(self.lines) - len(kept)]
        self.lines = kept
        self._open = bool(kept)
        return taken

    def clear(self) -> None:
        """Forgets the lines."""
        self.lines.clear()
        self._open, self._up = False, 0


def _as_shown(text: str) -> str:
    """What of a line is still to be seen."""
    head, _, last = text.rpartition(_ERASE)[2].rpartition("\r")
    return last or head.rpartition("\r")[2]


def clean(text: str) -> str:
    """Returns a text in which nothing but colour codes acts on the screen."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def render(rows: Sequence[Row], noun: str = "rank") -> str:
    """Returns the rows as text; a run of rows of the same ranks is labelled once."""
    width = max((len(label(row.ranks, noun)) for row in rows), default=0)
    lines = []
    before: tuple[int, ...] | None = None
    for row in rows:
        name = label(row.ranks, noun) if row.ranks != before else ""
        before = row.ranks
        lines.append(f"{name:<{width}} {_GUTTER[row.line.kind]} {clean(row.line.text)}".rstrip())
    return "\n".join(lines)


def hidden_note(lines: int, nbytes: int, path: str) -> str:
    """Returns the line that stands for what is in the log only."""
    where = f"; the whole output is in {path}" if path else ""
    return f"… {lines:,} lines ({nbytes / 1e6:.1f} MB) are not shown{where}"
