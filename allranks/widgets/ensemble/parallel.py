"""Parallel coordinates: an axis a parameter and one for the metric, a line a member."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.numbers import labels
from allranks.widgets.ensemble.rows import Row

_HEIGHT, _TOP, _BOTTOM, _SIDE = 240, 34, 16, 50
_BETWEEN, _MOST_WIDE = 150, 900
#: Numbers that span so much stand on a log scale.
_DECADES = 100
_FEW = 8
#: Lines of more members are left out, the poorest first.
MOST_LINES = 400
_POOR, _BEST = (179, 92, 0), (26, 111, 174)

Value = float | int | str


def parallel(rows: Sequence[Row], metric: str, lower: bool) -> str:
    """Returns the picture as SVG; empty where no parameter differs or no member has the metric."""
    known = [row for row in rows if row.metric is not None and math.isfinite(row.metric)]
    known.sort(key=lambda row: row.metric or 0.0, reverse=not lower)
    names = differing(known)
    if not names:
        return ""
    shown = known[:MOST_LINES]
    columns: list[list[Value]] = [[row.parameters.get(name, "") for row in shown] for name in names]
    columns.append([row.metric or 0.0 for row in shown])
    axes = [_Axis(column) for column in columns]
    width = min(_MOST_WIDE, 2 * _SIDE + _BETWEEN * len(names))
    places = [_SIDE + index * (width - 2 * _SIDE) / len(names) for index in range(len(axes))]
    # The best are drawn last, above the others.
    body = "".join(_line(row, names, axes, places, lower) for row in reversed(shown))
    for name, axis, x in zip([*names, metric], axes, places, strict=True):
        body += axis.drawn(name, x)
    left = len(known) - len(shown)
    note = f", without the {left:,} poorest" if left else ""
    body += (
        f'<text x="4" y="13"><tspan fill="rgb{_BEST}">best</tspan> to '
        f'<tspan fill="rgb{_POOR}">poorest</tspan>{note}</text>'
    )
    return svg.page(width, _HEIGHT, "", body, titled=False)


def differing(rows: Sequence[Row]) -> list[str]:
    """Returns the parameters of which members have different values."""
    names = dict.fromkeys(name for row in rows for name in row.parameters)
    return [name for name in names if len({row.parameters.get(name) for row in rows}) > 1]


class _Axis:
    """Where values stand: numbers on a scale, words one by one."""

    def __init__(self, values: Sequence[Value]) -> None:
        numbers = [value for value in values if not isinstance(value, str)]
        self.words: list[str] = []
        if len(numbers) < len(values):
            self.words = list(dict.fromkeys(map(str, values)))
            return
        self.values = sorted(set(numbers))
        self.low, self.high = self.values[0], self.values[-1]
        self.log = self.low > 0 and self.high / self.low >= _DECADES

    def share(self, value: Value) -> float:
        """Returns 0 at the foot, 1 at the head."""
        if self.words:
            return self.words.index(str(value)) / max(1, len(self.words) - 1)
        low, high, at = (self._scaled(float(one)) for one in (self.low, self.high, value))
        return 0.5 if low == high else (at - low) / (high - low)

    def y(self, value: Value) -> float:
        return _HEIGHT - _BOTTOM - self.share(value) * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self, name: str, x: float) -> str:
        """Returns the axis with its name and its labels, on paper of their own."""
        body = f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{svg.INK}"/>'
        body += _words(x, _TOP - 8, name[:24], 'text-anchor="middle" font-weight="bold"')
        for value, said in self._marks():
            body += _words(x + 4, self.y(value) + 4, said[:12], "")
        return body

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def _marks(self) -> list[tuple[Value, str]]:
        if self.words:
            return [(word, word) for word in self.words[:_FEW]]
        marks: list[float] = list(self.values)
        if len(marks) > _FEW and self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            marks = [10.0**power for power in range(first, last + 1)]
        elif len(marks) > _FEW:
            marks = svg.ticks(self.low, self.high, 5)
        return list(zip(marks, labels(marks), strict=True))


def _line(
    row: Row, names: Sequence[str], axes: Sequence[_Axis], places: Sequence[float], lower: bool
) -> str:
    assert row.metric is not None
    values = [*(row.parameters.get(name, "") for name in names), row.metric]
    points = " ".join(
        f"{x:.0f},{axis.y(value):.0f}" for x, axis, value in zip(places, axes, values, strict=True)
    )
    share = axes[-1].share(row.metric)
    share = 1 - share if lower else share
    colour = tuple(round(a + share * (b - a)) for a, b in zip(_POOR, _BEST, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="rgb{colour}" stroke-width="1.5"/>'


def _words(x: float, y: float, said: str, how: str) -> str:
    paper = f'stroke="{svg.PAPER}" stroke-width="3" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {how} {paper}>{escape(said)}</text>'
