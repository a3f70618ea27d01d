"""The text view of a notebook: displays that are updated in place while the cell runs."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from html import escape

from allranks.records.wire import Output
from allranks.widgets.displays import (
    DisplaySlot,
    Gallery,
    ShownValue,
    put_above,
    reorder,
)
from allranks.widgets.extensions import (
    DISPLAY_FOLDERS,
    DISPLAY_OBSERVERS,
    DisplayFolder,
    DisplayObserver,
    leaving_out,
)
from allranks.widgets.text import Data, Line, RankText, Row, TextView, described, is_rich, render

#: The kind of line of a value.
_VALUE = "value"
_REFRESH_SECONDS = 0.1
#: A long text is sent less often, as it is sent whole each time; and the less, the more was sent.
_NBYTES_A_SECOND = 200_000
_SLOWER_NBYTES = 500_000
#: Text of more lines than this, as wide as a page shows them, stands in a scroller.
_MOST_LINES = 40
_LINE_WIDTH = 120
#: Turned over, so that it stands at its end, where the newest lines are, without a script.
_BOX = (
    "display: flex; flex-direction: column-reverse; max-height: 480px; overflow: auto; "
    "border: 1px solid #8884"
)
_WHOLE_WORDS_STYLE = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
_FONT = "flex: none; margin: 0; font-family: monospace; font-size: 13px; line-height: 1.3"

_CODES = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("#7f7f7f", "#d04437", "#00966b", "#a87b00", "#1f83c9", "#a05fc0", "#138f98", "#8f8f8f")
_TEXT_STYLES = {1: "font-weight: bold", 3: "font-style: italic", 4: "text-decoration: underline"}

#: Puts the words of an error, whose output is the notebook's own, onto lines as a whole.
WHOLE_WORDS: Data = {
    "text/html": (
        f"<style>.jp-OutputArea:has(.allranks-words) pre {{ {_WHOLE_WORDS_STYLE} }}</style>"
        '<i class="allranks-words"></i>'
    ),
    "text/plain": "",
}


class _TextAndPictures:
    """Some text and the pictures below it; text that comes after them begins another one."""

    def __init__(self, view: NotebookView, slots: list[DisplaySlot]) -> None:
        self.texts = {rank: RankText() for rank in view.ranks}
        self.shown = DisplaySlot(slots)
        self.pictures = Gallery(view.fold, slots, view.noun)

    def in_order(self) -> list[DisplaySlot]:
        return [*([self.shown] if self.shown else []), *self.pictures.in_order()]


class NotebookView(TextView):
    """Shows labelled text and pictures of ranks in a notebook's cell."""

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Whether the values of a cell that has not failed are left to the caller, as `value`.
        self.returns_value = False
        self._hidden: dict[int, tuple[int, int]] = {}
        self._next_refresh = self._next_folded = 0.0
        self._sent_nbytes = 0
        self._changed = self._failed = False
        self._slots: list[DisplaySlot] = []
        self._slots_above: list[DisplaySlot] = []
        self._panel = DisplaySlot(self._slots)
        self._said: list[DisplaySlot] = []
        #: What stands below the panel, the newest last.
        self._below: list[DisplaySlot] = []
        #: Stands last, where an error follows.
        self._words = DisplaySlot(self._slots)
        self._stretches = [_TextAndPictures(self, self._slots)]
        #: Those above the last prompt, whose displays may still be updated.
        self._above: list[_TextAndPictures] = []
        self._folders = [make() for make in DISPLAY_FOLDERS]
        #: The stretch that a rank writes to: a rank never writes above its own last picture.
        self._at = dict.fromkeys(self.ranks, 0)
        #: Ranks whose output is cleared as soon as there is something to put in its place.
        self._cleared_next: set[int] = set()

    def output(self, batch: Output) -> None:
        if batch.hidden_nbytes:
            self._hidden[batch.rank] = (batch.hidden_lines, batch.hidden_nbytes)
        for kind, *rest in batch.entries:
            if batch.rank in self._cleared_next and kind in ("out", "err", "display", "result"):
                self._clear(batch.rank)
            if kind == "hidden":
                self._hidden.pop(batch.rank, None)
            if line := self._as_text(batch.rank, [kind, *rest]):
                self._write(batch.rank, *line)
            elif kind == "clear" and rest[0]:
                self._cleared_next.add(batch.rank)
            elif kind == "clear":
                self._clear(batch.rank)
            else:
                self._display(batch.rank, kind, *rest)
        # Last: text below a picture shows all that is above it, and not yet itself.
        self._changed = True

    def _clear(self, rank: int) -> None:
        self._cleared_next.discard(rank)
        for stretch in (*self._above, *self._stretches):
            stretch.texts.pop(rank, None)
            stretch.pictures.clear(rank)
        for stretch in self._above:
            self._show_text(stretch)
        self._at[rank] = 0

    def _write(self, rank: int, kind: str, text: str) -> None:
        at = self._at.get(rank, 0)
        if self._stretches[at].pictures.has(rank):
            at = self._at[rank] = at + 1
            if at == len(self._stretches):
                self._flush()
                self._stretches.append(_TextAndPictures(self, self._slots))
        self._stretches[at].texts.setdefault(rank, RankText()).feed(kind, text)

    def _display(
        self, rank: int, kind: str, data: Data, metadata: Data, name: str | None = None
    ) -> None:
        if kind == "update":
            found = [
                stretch.pictures.update(rank, data, metadata, name or "")
                for stretch in (*self._above, *self._stretches)
            ]
            if any(found):
                return
        if self.fold and len(self.ranks) > 1:
            for folder in [*self._folders]:
                with leaving_out(self._folders, folder, folder.fold):
                    data = folder.fold(rank, data)
        if name or kind == "update" or is_rich(data):
            self._stretches[self._at.get(rank, 0)].pictures.add(rank, data, metadata, name or "")
        else:
            text = str(data.get("text/plain", ""))
            self._write(rank, _VALUE if kind == "result" else "out", text + "\n")

    def left(self, rank: int, status: str) -> None:
        self._failed = self._failed or status != "ok"

    def notice(self, text: str) -> None:
        for rank in self.ranks:
            self._write(rank, "note", text + "\n")
        self._changed = True
        # At the next refresh: before a cell, and where it does not begin, no other one follows.
        self._next_refresh = 0.0

    def say(self, text: str) -> None:
        """Shows a line of no rank; at the end these lines stand above the output."""
        self._flush()
        shown = DisplaySlot(self._slots)
        self._said.append(shown)
        shown.show({"text/plain": f"· {text}"})

    def show_text(self, text: str) -> None:
        self.show_panel({"text/plain": text})

    def show_panel(self, data: Data) -> None:
        # Above all output of the ranks, or in place of the panel that is there.
        if self._panel:
            self._panel.show(data)
        else:
            put_above(self._panel, data, self._slots)

    def show_below_panel(self, data: Data) -> None:
        shown = DisplaySlot(self._slots)
        put_above(shown, data, self._slots, first=int(self._panel in self._slots))
        self._below.append(shown)

    def refresh(self) -> None:
        _refresh_all(DISPLAY_OBSERVERS)
        now = time.monotonic()
        if now >= self._next_folded:
            self._next_folded = now + _REFRESH_SECONDS
            _refresh_all(self._folders)
        if self._changed and now >= self._next_refresh:
            nbytes = self._flush(now=False)
            self._sent_nbytes += nbytes
            slower = 1 + self._sent_nbytes / _SLOWER_NBYTES
            self._next_refresh = now + max(_REFRESH_SECONDS, slower * nbytes / _NBYTES_A_SECOND)

    def make_way(self) -> None:
        # A person is asked below: everything is shown as at the end.
        NotebookView.finish(self)
        self._above += self._stretches
        self._slots_above += self._slots
        self._slots, self._said, self._below = [], [], []
        if not self._panel:
            self._panel = DisplaySlot(self._slots)
        self._stretches = [_TextAndPictures(self, self._slots)]
        self._at = dict.fromkeys(self.ranks, 0)

    def finish(self) -> None:
        """Shows everything, in an order that does not depend on who was faster."""
        _refresh_all(self._folders)
        self.returns_value = self.returns_value and not self._failed
        self._flush()
        panel = [self._panel] if self._panel in self._slots else []
        written = [shown for stretch in self._stretches for shown in stretch.in_order()]
        if self._failed and not self._words:
            self._words.show(WHOLE_WORDS)
        words = [self._words] if self._words in self._slots else []
        reorder([*panel, *reversed(self._below), *self._said, *written, *words], self._slots)

    @property
    def value(self) -> ShownValue | None:
        """The values of the ranks, if they are left to the caller and there are any."""
        stretches = [*self._above, *self._stretches] if self.returns_value else []
        lines = defaultdict[int, list[Line]](list)
        for stretch in stretches:
            for rank, text in stretch.texts.items():
                lines[rank] += (line for line in text.shown if line.kind == _VALUE)
        rows = self._rows(lines)
        if not rows:
            return None
        return ShownValue(shown_as(render(rows, self.noun)), described(rows, self.noun))

    def outputs(self) -> list[tuple[Data, Data]]:
        every = [shown.content for shown in (*self._slots_above, *self._slots)]
        every += [(value.data, value.metadata)] if (value := self.value) is not None else []
        return [content for content in every if content[0]]

    def _show_text(self, stretch: _TextAndPictures) -> int:
        lines = {rank: text.shown for rank, text in stretch.texts.items()}
        if self.returns_value:
            lines = {r: [one for one in lines[r] if one.kind != _VALUE] for r in lines}
        rows = self._rows(lines)
        if stretch is self._stretches[-1]:
            rows += [
                Row((rank,), Line("note", self._hidden_note(rank, *hidden)))
                for rank, hidden in self._hidden.items()
            ]
        text = render(rows, self.noun)
        if not text:
            return stretch.shown.blank()
        return stretch.shown.show(shown_as(text), described(rows, self.noun))

    def _flush(self, now: bool = True) -> int:
        nbytes = 0
        for stretch in self._stretches:
            nbytes += self._show_text(stretch) + stretch.pictures.show(now)
        nbytes += sum(stretch.pictures.show(now) for stretch in self._above)
        every = (*self._above, *self._stretches)
        self._changed = any(stretch.pictures.changed for stretch in every)
        return nbytes


def _refresh_all(parts: list[DisplayFolder] | list[DisplayObserver]) -> None:
    for part in [*parts]:
        with leaving_out(parts, part, part.refresh):
            part.refresh()


def shown_as(text: str) -> Data:
    """Returns text as a display's data: in a scroller of bounded height where it is long."""
    count = sum(1 + len(line) // _LINE_WIDTH for line in text.split("\n"))
    if count <= _MOST_LINES:
        return {"text/plain": text}
    box = f'role="region" aria-label="text of {count:,} lines" tabindex="0" style="{_BOX}"'
    html = f'<div {box}><pre style="{_FONT}; {_WHOLE_WORDS_STYLE}">{_in_colours(text)}</pre></div>'
    return {"text/html": html, "text/plain": text}


def _in_colours(text: str) -> str:
    first, *rest = _CODES.split(text)
    parts, styles = [escape(first, quote=False)], dict[str, str]()
    for codes, piece in zip(rest[::2], rest[1::2], strict=True):
        _apply_codes(codes, styles)
        piece = escape(piece, quote=False)
        style = "; ".join(styles.values())
        parts.append(f'<span style="{style}">{piece}</span>' if style and piece else piece)
    return "".join(parts)


def _apply_codes(codes: str, styles: dict[str, str]) -> None:
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number == 0:
            styles.clear()
        elif number in _TEXT_STYLES:
            styles[f"{number}"] = _TEXT_STYLES[number]
        elif number in (22, 23, 24):
            styles.pop(f"{number - 20 if number > 22 else 1}", None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            styles["colour"] = f"color: {_COLOURS[number % 10]}"
        # 48 is a background, which changes nothing, but its numbers must be read.
        elif number in (38, 48):  # a colour of many, in one number or in three
            wide = next(numbers, 0) == 2
            given = [next(numbers, 0) for _ in range(3 if wide else 1)]
            if number == 38 and wide:
                styles["colour"] = f"color: rgb{tuple(given)}"
        elif number == 39:
            styles.pop("colour", None)
