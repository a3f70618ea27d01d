"""What an explainer leaves in the notebook: a picture, the messages as a table, and text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from allranks.records.lessons import Explained
from allranks.widgets.dashboard.saved_panel import image, table_html
from allranks.widgets.dashboard.svg import COLOURS, INK, svg_page
from allranks.widgets.explainer.frames import Frame, cost, shown, steps, text, title

_WIDTH = 760
_ROW, _DIGIT, _ARCS, _HEAD = 15, 7.2, 26, 34
_GAP, _LEAST = 22, 116
_ADDED, _REPLACED = COLOURS[1], COLOURS[0]
#: Values in all frames together: a saved picture stays well below 200 kB.
_VALUES = 1400


def bundle(told: Explained, frames: list[Frame], place: str) -> dict[str, str]:
    """Returns text/html, without scripts or widgets, and text/plain.

    Args:
        told: what was run.
        frames: its frames.
        place: the class of the element that a live player takes the place of.
    """
    words = f"{title(told)}, round by round: see the table"
    body = f"<p><b>{escape(title(told))}</b><br>{escape(cost(told))}</p>"
    body += f"<div>{image(film(frames), words)}</div>{legend()}"
    table = table_html(steps(frames))
    body += f"<details><summary>every message as a table</summary>{table}</details>"
    html = f'<div class="allranks-still {place}">{body}</div>'
    return {"text/html": html, "text/plain": text(told, frames)}


def film(frames: Sequence[Frame]) -> str:
    """Returns the picture; of very many frames some are left out, never the last."""
    ranks, count = len(frames[0].values), len(frames[0].values[0])
    every = [shown(value) for frame in frames for row in frame.values for value in row]
    column = max(24.0, max(map(len, every)) * _DIGIT + 8)
    width = max(_LEAST, ranks * column + _GAP)
    height = _HEAD + _ARCS + _ROW * (count + 1) + 8
    across = max(1, int(_WIDTH // width))
    body = ""
    chosen = _chosen(len(frames), max(2, _VALUES // (ranks * count)))
    for place, number in enumerate(chosen):
        x, y = place % across * width, place // across * height
        drawn = _draw_frame(frames[number], number, column)
        body += f'<g transform="translate({x:.0f} {y:.0f})">{drawn}</g>'
    rows = -(-len(chosen) // across)
    style = (
        '<marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker>'
    )
    body = style + f'<g font-size="11" text-anchor="middle">{body}</g>'
    return svg_page(
        int(min(len(chosen), across) * width), int(rows * height), "", body, titled=False
    )


def legend() -> str:
    """Returns what the colours say, as HTML."""
    marks = ((_ADDED, "received value was added"), (_REPLACED, "received value replaced it"))
    parts = [f'<span style="color: {colour}">■</span> {said}' for colour, said in marks]
    return f"<p>{' &nbsp; '.join(parts)} &nbsp; <b>bold</b>: complete</p>"


def _chosen(count: int, most: int) -> list[int]:
    """Returns which frames are drawn: all, or the first, the last and some between them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _draw_frame(frame: Frame, number: int, column: float) -> str:
    ranks = len(frame.values)
    title = "start" if not number else f"{number} {frame.phase}"
    body = f'<text x="4" y="13" text-anchor="start" font-weight="bold">{escape(title)}</text>'
    top = _HEAD + _ARCS
    for message in frame.messages:
        body += _arc(message.sender, message.receiver, column)
        x, y = message.receiver * column, top + _ROW * (message.start + 1) - 11
        high = _ROW * (message.stop - message.start) - 1
        colour = _ADDED if message.adds else _REPLACED
        body += (
            f'<rect x="{x + 2:.0f}" y="{y + 8:.0f}" width="{column - 4:.0f}" height="{high}" '
            f'rx="2" fill="{colour}" fill-opacity="0.3"/>'
        )
    for rank, row in enumerate(frame.values):
        x = (rank + 0.5) * column
        body += f'<text x="{x:.0f}" y="{top:.0f}">{rank}</text>'
        for place, value in enumerate(row):
            whole = ' font-weight="bold"' if frame.shares[rank][place] == ranks else ""
            y = top + _ROW * (place + 1) + 8
            body += f'<text x="{x:.0f}" y="{y}"{whole}>{escape(shown(value))}</text>'
    return body


def _arc(sender: int, receiver: int, column: float) -> str:
    # Higher where it goes further, so that arrows that cross can be told apart.
    start, end = (sender + 0.5) * column, (receiver + 0.5) * column
    shift = 3 if sender < receiver else -3
    foot = _HEAD + _ARCS - 12
    top = foot - min(_ARCS - 2, 10 + 4 * abs(receiver - sender)) * 1.5
    middle = (start + end) / 2
    return (
        f'<path d="M{start + shift:.0f} {foot}Q{middle:.0f} {top:.0f} {end - shift:.0f} {foot}" '
        f'fill="none" stroke="{INK}" marker-end="url(#a)"/>'
    )
