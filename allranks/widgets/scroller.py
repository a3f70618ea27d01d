"""Text for a notebook: long text stands in a scroller, and lines break between words."""

from __future__ import annotations

import re
from html import escape

from allranks.widgets.shown import Data

#: Text of more lines than this, as wide as a page shows them, stands in a scroller.
_MOST_LINES = 40
_LINE_WIDTH = 120
#: Turned over, so that it stands at its end, where the newest lines are, without a script.
_BOX = (
    "display: flex; flex-direction: column-reverse; max-height: 480px; overflow: auto; "
    "border: 1px solid #8884"
)
_WORDS = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
_FONT = "flex: none; margin: 0; font-family: monospace; font-size: 13px; line-height: 1.3"

_CODES = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("#7f7f7f", "#d04437", "#00966b", "#a87b00", "#1f83c9", "#a05fc0", "#138f98", "#8f8f8f")
_MARKS = {1: "font-weight: bold", 3: "font-style: italic", 4: "text-decoration: underline"}

#: Puts the words of an error, whose output is the notebook's own, onto lines as a whole.
WHOLE_WORDS: Data = {
    "text/html": (
        f"<style>.jp-OutputArea:has(.allranks-words) pre {{ {_WORDS} }}</style>"
        '<i class="allranks-words"></i>'
    ),
    "text/plain": "",
}


def shown_as(text: str) -> Data:
    """Returns text as a display's data: in a scroller of bounded height where it is long."""
    count = sum(1 + len(line) // _LINE_WIDTH for line in text.split("\n"))
    if count <= _MOST_LINES:
        return {"text/plain": text}
    box = f'role="region" aria-label="text of {count:,} lines" tabindex="0" style="{_BOX}"'
    html = f'<div {box}><pre style="{_FONT}; {_WORDS}">{_in_colours(text)}</pre></div>'
    return {"text/html": html, "text/plain": text}


def _in_colours(text: str) -> str:
    """Returns text as HTML, in which colour codes have become styles."""
    first, *rest = _CODES.split(text)
    parts, styles = [escape(first, quote=False)], dict[str, str]()
    for codes, piece in zip(rest[::2], rest[1::2], strict=True):
        _take(codes, styles)
        piece = escape(piece, quote=False)
        style = "; ".join(styles.values())
        parts.append(f'<span style="{style}">{piece}</span>' if style and piece else piece)
    return "".join(parts)


def _take(codes: str, styles: dict[str, str]) -> None:
    """Changes the styles as a sequence of codes says; those of a background change nothing."""
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number == 0:
            styles.clear()
        elif number in _MARKS:
            styles[f"{number}"] = _MARKS[number]
        elif number in (22, 23, 24):
            styles.pop(f"{number - 20 if number > 22 else 1}", None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            styles["colour"] = f"color: {_COLOURS[number % 10]}"
        elif number in (38, 48):  # a colour of many, in one number or in three
            wide = next(numbers, 0) == 2
            given = [next(numbers, 0) for _ in range(3 if wide else 1)]
            if number == 38 and wide:
                styles["colour"] = f"color: rgb{tuple(given)}"
        elif number == 39:
            styles.pop("colour", None)
