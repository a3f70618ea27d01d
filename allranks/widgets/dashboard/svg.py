"""Pictures of curves, bars and times as SVG: without scripts, readable on light and dark paper."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate, groupby, pairwise

from allranks.widgets.dashboard.curves import Curves
from allranks.widgets.dashboard.plot import (
    DEFAULT_STYLE,
    MANY,
    Plot,
    PlotBand,
    PlotLine,
    PlotStyle,
    Point,
    plot_of,
)
from allranks.widgets.dashboard.tables import labels, seconds
from allranks.widgets.dashboard.timings import MOST_RANKS, TRANSFER, WAITING, RankRow, RankTime
from allranks.widgets.palette import DASHES, KINDS, RANKS, TIME

#: A picture has paper of its own: no grey can be read on white and on black.
PAPER, INK = "#ffffff", "#616161"
WRONG = "#b3261e"
_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 24, 24
#: How wide a letter of a label is, at most.
_LETTER = 7
#: The room beside the labels of an axis.
_BESIDE = 10
#: Values that have fallen so far, at half of the points, are drawn on a log scale.
_FALLS = 10

_STEPS = ((1, math.sqrt(2)), (2, math.sqrt(10)), (5, math.sqrt(50)), (10, math.inf))


def curve(
    curves: Curves,
    name: str,
    points: int,
    noun: str = "rank",
    style: PlotStyle = DEFAULT_STYLE,
    groups: Mapping[str, Collection[int]] | None = None,
    x_name: str = "step",
) -> str:
    """Returns the picture of one metric; see `plot_of` for the arguments."""
    plot = plot_of(curves, name, points, noun, style, groups, x_name)
    every = [point for line in plot.lines for point in line.points]
    every += [
        (x, y) for band in plot.bands for x, low, _, high in band.columns for y in (low, high)
    ]
    broken = curves.broken(name, noun)
    wrong = draw_words(_LEFT + 6, _TOP + 12, broken, colour=WRONG) if broken else ""
    if not every:
        return svg_page(_WIDTH, _HEIGHT, name, wrong)
    frame = _Frame([*(x for x, _ in every), *plot.marks], [y for _, y in every], plot)
    body = frame.axes()
    body += "".join(_mark(frame.x(step)) for step in plot.marks)
    body += "".join(_band(frame, band, 0.15 if groups else 0.25) for band in plot.bands)
    if bands := plot.bands:
        count = bands[0].count
        what = f"{count} curves" if not groups else f"{len(bands)} groups of curves"
        body += draw_words(_WIDTH - _RIGHT, 14, f"mean, minimum and maximum of {what}", "end")
    elif same := curves.coinciding(name):
        body += draw_words(_WIDTH - _RIGHT, 14, f"{same} curves coincide", "end")
    body += "".join(_curve(frame, line) for line in plot.lines if line.points)
    return svg_page(_WIDTH, _HEIGHT, name, body + wrong)


def _curve(frame: _Frame, line: PlotLine) -> str:
    colour = INK if frame.plot.bands else RANKS[line.index % len(RANKS)]
    if len(set(line.points)) > 1:
        return _line(frame.path(line.points), colour, line.dash, 0.2 if line.faint else 1)
    # A line through a single point would be invisible.
    x, y = line.points[0]
    return f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>'


def _band(frame: _Frame, band: PlotBand, opacity: float) -> str:
    edge = [(x, high) for x, _, _, high in band.columns]
    edge += [(x, low) for x, low, *_ in band.columns[::-1]]
    colour = RANKS[band.index % len(RANKS)]
    return (
        f'<polygon points="{frame.path(edge)}" fill="{colour}" fill-opacity="{opacity}"/>'
        + _line(frame.path([(x, mean) for x, _, mean, _ in band.columns]), colour, band.dash)
    )


def _mark(x: float) -> str:
    line = f'd="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke-dasharray="4 3"'
    return f'<path {line} stroke="{WRONG}" class="not-finite"/>'


def legend(names: Mapping[str, int]) -> str:
    """Returns the colours of the curves with these names, by their numbers, as HTML."""
    parts = []
    for name, index in names.items():
        mark = "■" if index < len(RANKS) else "▤"
        colour = RANKS[index % len(RANKS)]
        words = escape(name).replace(" ", "&nbsp;")  # a line ends between names only
        parts.append(f'<span style="color: {colour}">{mark}</span>&nbsp;{words}')
    return " &nbsp; ".join(parts)


def bars(rows: Sequence[RankRow], elapsed: float) -> str:
    # What each rank waited and transferred, of the seconds of the cell.
    step = 18 if len(rows) <= MANY else 7
    height = _TOP + step * len(rows) + 8
    most = max(elapsed, *(row.wait_seconds + row.transfer_seconds for row in rows)) or 1.0
    scale = (_WIDTH - _LEFT - 70) / most
    body = draw_swatch(_LEFT, 6, TIME[WAITING], "waiting for other ranks")
    body += draw_swatch(_LEFT + 160, 6, TIME[TRANSFER], "transfer")
    body += draw_words(_WIDTH - 4, 14.5, f"of a cell of {seconds(most)}", "end")
    for index, row in enumerate(rows):
        y = _TOP + step * index
        wait, transfer = row.wait_seconds * scale, row.transfer_seconds * scale
        body += draw_box(_LEFT, y, wait, step - 4, TIME[WAITING])
        body += draw_box(_LEFT + wait, y, transfer, step - 4, TIME[TRANSFER])
        if step >= 12 or index % 8 == 0:
            body += draw_words(_LEFT - 6, y + 10, f"rank {row.rank}", "end")
            total = seconds(row.wait_seconds + row.transfer_seconds)
            body += draw_words(_LEFT + wait + transfer + 6, y + 10, total)
    return svg_page(_WIDTH, height, "collectives", body, titled=False)


class _Frame:
    """The axes of one picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], plot: Plot) -> None:
        self.plot = plot
        self.x0, self.x1 = self._across(min(xs)), self._across(max(xs))
        self.y0, self.y1 = min(ys), max(ys)
        middle = sorted(ys)[len(ys) // 2]
        falls = self.y0 > 0 and self.y1 > _FALLS * middle
        self.log = falls if plot.log_y is None else plot.log_y
        if self.log:
            self.y0, self.y1 = math.log10(self.y0), math.log10(self.y1)
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        if self.y0 == self.y1:
            margin = abs(self.y0) * 0.1 or 0.5
            self.y0, self.y1 = self.y0 - margin, self.y1 + margin
        self.heights = (log_ticks if self.log else ticks)(self.y0, self.y1, 5)
        self.beside = labels(self.heights)
        longest = max(map(len, self.beside), default=0)
        self.left = max(_LEFT, longest * _LETTER + _BESIDE)

    def _across(self, value: float) -> float:
        return math.log10(value) if self.plot.log_x else value

    def x(self, value: float) -> float:
        share = (self._across(value) - self.x0) / (self.x1 - self.x0)
        return self.left + share * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        share = (height - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self) -> str:
        body = ""
        for height, words in zip(self.heights, self.beside, strict=True):
            y, end = self.y(height), _WIDTH - _RIGHT
            body += f'<path d="M{self.left} {y:.1f}H{end}" stroke="{INK}" opacity="0.35"/>'
            body += draw_words(self.left - 6, y + 4, words, "end")
        steps = (log_ticks if self.plot.log_x else ticks)(self.x0, self.x1, 3.5)
        begin = self.left - 14.0
        for value, words in zip(steps, labels(steps), strict=True):
            middle = min(self.x(value), _WIDTH - len(words) * _LETTER / 2)
            begin = min(begin, middle - len(words) * _LETTER / 2 - 6)
            body += draw_words(middle, _HEIGHT - 8, words, "middle")
        # The name of the axis stands before its numbers.
        body += draw_words(begin, _HEIGHT - 8, self.plot.x_name, "end")
        return body


def log_ticks(low: float, high: float, count: float) -> list[float]:
    """Returns powers of ten, or 1, 2 and 5 times these, between two others whose log10 is given."""
    if high - low > count / 2:
        return [10.0**power for power in ticks(low, high, count) if power == round(power)]
    powers = range(math.floor(low), math.floor(high) + 1)
    found = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    found = [value for value in found if low <= math.log10(value) <= high]
    return found if len(found) > 1 else ticks(10.0**low, 10.0**high, count)


def ticks(low: float, high: float, count: float) -> list[float]:
    """Returns about ``count`` round numbers between two others; two or more from a count of 3.2."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    # The round step whose ratio to the wanted one is least.
    step = size * next(m for m, bound in _STEPS if rough < bound * size)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _line(path: str, colour: str, dash: int, opacity: float = 1) -> str:
    dashed = f' stroke-dasharray="{",".join(map(str, DASHES[dash]))}"' if dash else ""
    dashed += f' opacity="{opacity}"' if opacity < 1 else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed} '
        'stroke-linejoin="round"/>'
    )


def draw_swatch(x: float, y: float, colour: str, words: str) -> str:
    return draw_box(x, y, 9, 9, colour) + draw_words(x + 12, y + 8.5, words)


def draw_box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def draw_words(x: float, y: float, words: str, anchor: str = "start", colour: str = "") -> str:
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(words)}</text>'


def svg_page(width: int, height: int, title: str, body: str, titled: bool = True) -> str:
    head = f'<text x="4" y="15" font-weight="bold">{escape(title[:40])}</text>' if titled else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="{INK}">'
        f'<rect width="{width}" height="{height}" rx="4" fill="{PAPER}"/>{head}{body}</svg>'
    )


_STRIP, _GAP, _BAR, _STRIP_RIGHT, _STRIP_BOTTOM = 560, 16, 170, 56, 18
_STEP, _LOW_STEP = 20, 7
#: Columns of a strip, and of a strip among very many ranks.
_COLUMNS, _FEW_COLUMNS = 140, 48
#: A wait that is as wide as this has room for the rank that was waited for.
_NUMBER_WIDTH = 16


def draw_strips(times: Sequence[RankTime]) -> str:
    times = times[:MOST_RANKS]
    step = _STEP if len(times) <= MANY else _LOW_STEP
    height = _TOP + step * len(times) + _STRIP_BOTTOM
    longest = max((time.seconds for time in times), default=0.0) or 1.0
    body = _kinds(times)
    for row, time in enumerate(times):
        y = _TOP + step * row
        body += _strip(time, y, step - 3, longest) + _whole_bar(time, y, step - 3, longest)
        if step == _STEP or row % 8 == 0:
            body += draw_words(_LEFT - 6, y + 11, f"rank {time.rank}", "end")
            end = _LEFT + _STRIP + _GAP + time.seconds / longest * _BAR
            body += draw_words(end + 6, y + 11, seconds(time.seconds))
    marks = ticks(0, longest, 5)
    for value, said in zip(marks, labels(marks), strict=True):
        x = _LEFT + value / longest * _STRIP
        body += draw_words(x, height - 4, f"{said} s", "middle" if value else "start")
    body += draw_words(_LEFT + _STRIP + _GAP, height - 4, "all together")
    width = _LEFT + _STRIP + _GAP + _BAR + _STRIP_RIGHT
    return svg_page(width, height, "", body, titled=False)


def _kinds(times: Sequence[RankTime]) -> str:
    x, body = float(_LEFT), ""
    for kind, name in enumerate(KINDS):
        if any(time.sums[kind] for time in times):
            said = "waiting for the rank of that number" if kind == WAITING else name
            body += draw_swatch(x, 6, TIME[kind], said)
            x += 28 + 6.2 * len(said)
    return body


def _strip(time: RankTime, y: float, height: int, longest: float) -> str:
    count = _COLUMNS if height > _LOW_STEP else _FEW_COLUMNS
    paths: dict[int, list[str]] = {}
    end = 0
    for heights, run in groupby(_columns(time, longest, count, height)):
        start, end = end, end + len(list(run))
        x, width = _LEFT + start * _STRIP / count, (end - start) * _STRIP / count
        top = y
        for kind, tall in enumerate(heights):
            if tall:
                box = f"M{x:.4g} {top:g}h{width:.3g}v{tall}h-{width:.3g}z"
                paths.setdefault(kind, []).append(box)
                top += tall
    body = "".join(
        f'<path d="{"".join(parts)}" fill="{TIME[kind]}"/>' for kind, parts in paths.items()
    )
    return body + (_numbers(time, y, longest) if height > _LOW_STEP else "")


def _columns(time: RankTime, longest: float, count: int, height: int) -> list[tuple[int, ...]]:
    # The height of each kind in each column; none where the strip of this rank has ended.
    width = longest / count
    found = []
    for at in range(count):
        has_ended = (at + 0.5) * width > time.seconds
        sums = () if has_ended else time.between(at * width, (at + 1) * width)
        whole = sum(sums) or 1.0
        # Rounding the edges, not the heights, keeps their sum at ``height``.
        edges = [round(upto * height) for upto in accumulate(value / whole for value in sums)]
        found.append(tuple(b - a for a, b in pairwise([0, *edges])))
    return found


def _numbers(time: RankTime, y: float, longest: float) -> str:
    # The rank that was waited for, where a rank did little else for long enough.
    body, end = "", 0
    scale = time.width * _STRIP / longest
    mostly = [
        whom if shares[WAITING] > sum(shares) / 2 else -1
        for shares, whom in zip(time.bins, time.whom, strict=True)
    ]
    for rank, run in groupby(mostly):
        start, end = end, end + len(list(run))
        if rank >= 0 and (end - start) * scale >= _NUMBER_WIDTH:
            middle = _LEFT + (start + end) / 2 * scale
            body += draw_words(middle, y + 12.5, str(rank), "middle", "#000000")
    return body


def _whole_bar(time: RankTime, y: float, height: int, longest: float) -> str:
    x, body = float(_LEFT + _STRIP + _GAP), ""
    for kind, value in enumerate(time.sums):
        width = value / longest * _BAR
        if width >= 0.1:
            body += draw_box(x, y, width, height, TIME[kind])
        x += width
    return body
