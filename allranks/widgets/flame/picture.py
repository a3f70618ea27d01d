"""The flame graph: a still picture, the outermost frame above, as wide as the time in it.

Where a notebook is not trusted `<svg>` is taken out, so it stands there as a picture; an image map
over it says of each frame what it is, without scripts.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.dashboard.svg import PAPER, WRONG
from allranks.widgets.flame.tree import Folded, Node
from allranks.widgets.flame.words import DIFFERS, by_rank, differences, summary, text

_WIDTH, _ROW = 900, 18
_LETTER = 6.2
_LEAST_WIDTH = 1.5
_MOST_ROWS = 60
_MOST_BOXES = 1500
#: Of the cell's own lines, of waiting and calls of allranks, and of libraries.
_CELL, _OURS, _OTHER = "#cfe4f7", "#f8dcae", "#e9e9e9"
_FONT = "#212121"


@dataclass(frozen=True)
class _Box:
    node: Node
    row: int
    x: float
    width: float


def page(folded: Folded) -> str:
    """Returns the profile as HTML."""
    boxes = list(_boxes(folded))
    name = f"allranks-{uuid.uuid4().hex}"
    data = base64.b64encode(svg(folded, boxes).encode()).decode()
    areas = "".join(
        f'<area shape="rect" coords="{b.x:.0f},{b.row * _ROW},{b.x + b.width:.0f},'
        f'{(b.row + 1) * _ROW}" title="{escape(_title(folded, b.node))}" alt="">'
        for b in boxes
    )
    said = "".join(f"<br>{escape(line)}" for line in differences(folded))
    return (
        f'<div class="allranks-still"><p><b>{escape(summary(folded))}</b>{said}</p>'
        f'<img alt="flame graph, as text below" src="data:image/svg+xml;base64,{data}" '
        f'usemap="#{name}" width="{_WIDTH}" height="{_height(boxes)}" style="max-width: none">'
        f'<map name="{name}">{areas}</map>'
        f"<details><summary>as text</summary><pre>{escape(text(folded))}</pre></details></div>"
    )


def svg(folded: Folded, boxes: list[_Box] | None = None, titled: bool = False) -> str:
    """Returns the picture alone; ``titled``, each frame says what it is where a pointer rests."""
    boxes = list(_boxes(folded)) if boxes is None else boxes
    body = "".join(_drawn(folded, box, titled) for box in boxes)
    height = _height(boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11" fill="{_FONT}">'
        f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>{body}</svg>'
    )


def _height(boxes: list[_Box]) -> int:
    return _ROW * (1 + max((box.row for box in boxes), default=0))


def _boxes(folded: Folded) -> Iterator[_Box]:
    """Returns what is wide enough to be seen, row by row."""
    scale = _WIDTH / (folded.root.total or 1.0)
    row = [_Box(folded.root, 0, 0.0, float(_WIDTH))]
    count = 0
    while row and row[0].row < _MOST_ROWS:
        following: list[_Box] = []
        for box in row:
            if count == _MOST_BOXES:
                return
            count += 1
            yield box
            x = box.x
            for child in box.node.by_time:
                width = child.total * scale
                if width >= _LEAST_WIDTH:
                    following.append(_Box(child, box.row + 1, x, width))
                x += width
        row = following


def _drawn(folded: Folded, box: _Box, titled: bool) -> str:
    node, y = box.node, box.row * _ROW
    differs = box.row > 0 and folded.differs(node)
    words = _shown(f"{DIFFERS} {node.name}" if differs else _label(folded, box), box.width)
    line = f'stroke="{WRONG}" stroke-width="2"' if differs else f'stroke="{PAPER}"'
    inset = 1 if differs else 0
    width = max(0.5, box.width - 2 * inset)
    rect = (
        f'<rect x="{box.x + inset:.1f}" y="{y + inset}" width="{width:.1f}"'
        f' height="{_ROW - 1 - 2 * inset}" fill="{_colour(node)}" {line}/>'
    )
    label = f'<text x="{box.x + 4:.1f}" y="{y + 12.5}">{escape(words)}</text>' if words else ""
    title = f"<title>{escape(_title(folded, node))}</title>" if titled else ""
    return f"<g>{title}{rect}{label}</g>" if titled else rect + label


def _label(folded: Folded, box: _Box) -> str:
    return summary(folded) if box.row == 0 else box.node.name


def _shown(words: str, width: float) -> str:
    most = int((width - 8) / _LETTER)
    if len(words) <= most:
        return words
    return words[: most - 1] + "…" if most > 3 else ""


def _colour(node: Node) -> str:
    if "(allranks)" in node.name:
        return _OURS
    return _CELL if "In[" in node.name else _OTHER


def _title(folded: Folded, node: Node) -> str:
    share = node.total / (folded.root.total or 1.0)
    said = f"{node.name}\n{seconds(folded.mean(node))}, {share:.1%}"
    return f"{said}\n{by_rank(folded, node)}" if folded.differs(node) else said
