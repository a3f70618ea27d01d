"""Pictures of a simulated cell as SVG: its messages over time, or the bytes of each two ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from math import hypot
from typing import Any, NamedTuple
from zlib import crc32

from allranks.widgets.dashboard.svg import (
    INK,
    WRONG,
    draw_box,
    draw_swatch,
    draw_words,
    svg_page,
    ticks,
)
from allranks.widgets.dashboard.tables import labels
from allranks.widgets.palette import KINDS, TIME

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 64, 16, 34, 24
_WAITING, _TRANSFER = (TIME[KINDS.index(kind)] for kind in ("waiting", "transfer"))
_MAP = 384
_ZOOMS = (2, 4, 8)
_HEAD, _HEADS = 24, 80
"""The distance of arrows that end on one rank at the same time, and the most for all of them."""
# What is pointed at or chosen stands out, with its text in the picture.
_STYLE = (
    ".allranks-picture>div{overflow:auto;max-height:80vh}"
    ".allranks-picture svg{height:auto}"
    ".allranks-picture .about{display:none}"
    ".allranks-picture .part{cursor:pointer;outline:none}"
    ".allranks-picture .part:is(:hover,:focus) .about{display:inline}"
    ".allranks-picture .part:is(:hover,:focus) path{stroke-width:2.5}"
    ".allranks-picture svg:has(.part:focus) .part:not(:focus,:hover){opacity:.2}"
)
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw(sketch: bytes) -> tuple[str, str]:
    """Returns a heading, and the picture of what `sketches.sketch` has returned."""
    found = json.loads(sketch)
    if "sent" in found:
        heading = "bytes sent, by sender (rows) and receiver (columns)"
        return heading, _map(found["size"], found["each"], found["sent"])
    diagram = _Diagram(found["clocks"], found["stalled"])
    return "messages over simulated time", diagram.draw(
        [_Event(*one) for one in found["events"]], found["lost"]
    )


def explorable(svg: str) -> str:
    """Returns HTML in which a reader enlarges a picture, and points at or chooses a part of it.

    Without scripts, which a notebook that is not trusted would lose.
    """
    zooms = "".join(
        f'<label><input type="radio" name="zoom-{crc32(svg.encode()):x}" value="{by}"'
        f"{' checked' if by == 1 else ''}/>{by}×</label> "
        for by in (1, *_ZOOMS)
    )
    wider = "".join(
        f'.allranks-picture:has([value="{by}"]:checked) svg{{width:{by * _WIDTH}px;max-width:none}}'
        for by in _ZOOMS
    )
    style = f"<style>{_STYLE}{wider}</style>"
    return f'<div class="allranks-picture">{style}{zooms}<div>{svg}</div></div>'


class _Event(NamedTuple):
    rank: int
    kind: str
    begin: float
    ready: float
    end: float
    peer: int
    number: int
    about: str
    races: bool


class _Diagram:
    """A line for each rank, from left to right in simulated time."""

    def __init__(self, clocks: Sequence[float], stalled: Sequence[Any]) -> None:
        self._clocks, self._stalled = clocks, stalled
        size = len(clocks)
        self._step = 44 if size <= 8 else 24 if size <= 24 else 12
        self._height = _TOP + self._step * size + _BOTTOM
        self._end = max(clocks, default=0.0) or 1e-6

    def _x(self, seconds: float) -> float:
        # Behind the last event there is room for what never ends.
        return _LEFT + seconds / self._end * (_WIDTH - _LEFT - _RIGHT) * 0.85

    def _y(self, rank: int) -> float:
        return _TOP + self._step * (rank + 0.5)

    def draw(self, events: Sequence[_Event], lost: Sequence[Any]) -> str:
        received = Counter(one.rank for one in events if one.kind == "receive")
        ends = [self._x(clock) for clock in self._clocks]
        heads, arrows = [0.0] * len(ends), ""
        sent = {one.number: one for one in events if one.kind == "send"}
        for one in events:
            if one.kind == "receive":
                start = sent.get(one.number)
                # A send without a wait has no event of its own.
                begin = start.begin if start is not None else one.ready
                # Side by side, so that their order is seen.
                gap = min(_HEAD, _HEADS / received[one.rank])
                x = heads[one.rank] = max(self._x(one.end), heads[one.rank] + gap)
                arrows += self._arrow(begin, one.peer, x, one.rank, INK, one.about, one.races)
        for source, dest, began, about in lost:
            x = self._x(began + 0.12 * self._end)
            arrows += self._arrow(began, source, x, dest, WRONG, f"{about}: never received")
        body = self._legend(bool(lost), any(one.races for one in events))
        for rank, end in enumerate(map(max, ends, heads)):
            y = self._y(rank)
            body += f'<path d="M{_LEFT} {y:.1f}H{end:.1f}" stroke="{INK}"/>'
            body += draw_words(_LEFT - 6, y + 4, f"rank {rank}", "end")
        body += "".join(map(self._event, events)) + self._endless_waits() + arrows
        return svg_page(_WIDTH, self._height, "", body + self._axis(), titled=False)

    def _legend(self, lost: bool, races: bool) -> str:
        body = draw_swatch(_LEFT, 6, _WAITING, "waiting")
        body += draw_swatch(_LEFT + 80, 6, _TRANSFER, "collective")
        x = _LEFT + 172
        if races:
            body += _ring(x + 4.5, 10.5) + draw_words(x + 14, 14.5, "could get another message")
            x += 180
        if lost or self._stalled:
            body += draw_swatch(x, 6, WRONG, "never received, or waiting forever")
        return body

    def _event(self, event: _Event) -> str:
        x, ready, end = self._x(event.begin), self._x(event.ready), self._x(event.end)
        height = min(10, self._step - 4)
        y = self._y(event.rank) - height / 2
        body = draw_box(x, y, ready - x, height, _WAITING) if ready - x > 0.3 else ""
        if event.kind == "collective":
            body += draw_box(ready, y, max(2.0, end - ready), height, _TRANSFER)
        return _part(event.about, body) if body else ""

    def _endless_waits(self) -> str:
        body = ""
        for rank, clock, missing in self._stalled:
            x, y = self._x(clock), self._y(rank)
            body += draw_box(x, y - 5, _WIDTH - _RIGHT - x, min(10, self._step - 4), _WAITING)
            if self._step > 12:
                ranks = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
                words = f"waits for rank{'s' if len(missing) > 1 else ''} {ranks}"
                body += draw_words(_WIDTH - _RIGHT, y - 8, words if missing else "waits", "end",
                                   WRONG)  # fmt: skip
        return body

    def _arrow(
        self, begin: float, source: int, x1: float, dest: int, colour: str, about: str,
        races: bool = False,
    ) -> str:  # fmt: skip
        x, y, y1 = self._x(begin), self._y(source), self._y(dest)
        if source == dest:
            y1 -= 10  # else it would lie on the rank's line
        length = hypot(x1 - x, y1 - y) or 1.0
        dx, dy = (x1 - x) / length, (y1 - y) / length
        dash = ' stroke-dasharray="4 3"' if colour == WRONG else ""
        left, right = (
            f"{x1 - 7 * dx + side * dy:.1f},{y1 - 7 * dy - side * dx:.1f}" for side in (3, -3)
        )
        line = f"M{x:.1f} {y:.1f}L{x1:.1f} {y1:.1f}"
        # The second line is wider, for the pointer.
        return _part(
            f"rank {source} to rank {dest}: {about}",
            f'<path d="{line}" stroke="{colour}"{dash}/>'
            f'<polygon points="{x1:.1f},{y1:.1f} {left} {right}" fill="{colour}"/>'
            f"{_ring(x1, y1) if races else ''}"
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" '
            'stroke="transparent" stroke-width="9"/>',
        )

    def _axis(self) -> str:
        scale, unit = next((one for one in _UNITS if self._end >= one[0]), _UNITS[-1])
        marks, body = ticks(0, self._end / scale, 5), ""
        for value, words in zip(marks, labels(marks), strict=True):
            x = self._x(value * scale)
            body += draw_words(x, self._height - 6, f"{words} {unit}", "middle" if value else "")
        return body


def _ring(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{INK}"/>'


def _part(about: str, body: str) -> str:
    words = f'<text class="about" display="none" x="{_LEFT}" y="30">{escape(about)}</text>'
    return f'<g class="part" tabindex="0"><title>{escape(about)}</title>{body}{words}</g>'


def _map(size: int, each: int, sent: Sequence[Any]) -> str:
    """Squares, darker where more bytes were sent; each stands for as many ranks as necessary."""
    most = max((nbytes for *_, nbytes, _ in sent), default=1) or 1
    side = _MAP / -(-size // each)
    lost = any(one[-1] for one in sent)
    body = (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_MAP}" height="{_MAP}" fill="none" stroke="{INK}"/>'
    )
    for row, column, nbytes, is_lost in sent:
        colour = WRONG if is_lost else _TRANSFER
        x, y = _LEFT + column * side, _TOP + row * side
        about = f"{_ranks(row, each, size)} to {_ranks(column, each, size)}: {nbytes:,} B"
        body += _part(
            about,
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}" '
            f'fill="{colour}" fill-opacity="{0.25 + 0.75 * nbytes / most:.2f}"/>',
        )
    if not sent:
        body += draw_words(_LEFT + _MAP / 2, _TOP + _MAP / 2, "no messages", "middle")
    last = size - 1
    body += draw_words(_LEFT - 6, _TOP + 10, "rank 0", "end")
    body += draw_words(_LEFT - 6, _TOP + _MAP, f"rank {last}", "end")
    body += draw_words(_LEFT, 16, "rank 0")
    body += draw_words(_LEFT + _MAP, 16, f"rank {last}", "end")
    if sent:
        body += draw_swatch(_LEFT, _TOP + _MAP + 8, _TRANSFER, f"up to {most:,} bytes")
    if lost:
        body += draw_swatch(_LEFT + 160, _TOP + _MAP + 8, WRONG, "with messages never received")
    return svg_page(_LEFT + _MAP + 24, _TOP + _MAP + 26, "", body, titled=False)


def _ranks(at: int, each: int, size: int) -> str:
    first, last = at * each, min(size, (at + 1) * each) - 1
    return f"rank {first}" if first == last else f"ranks {first}–{last}"
