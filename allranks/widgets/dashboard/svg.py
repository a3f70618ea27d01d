"""Pictures of curves, bars and times as SVG: without scripts, readable on light and dark paper."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import Any

from allranks.widgets.dashboard.curves import Curve, Curves
from allranks.widgets.dashboard.tables import labels, seconds
from allranks.widgets.dashboard.timings import TRANSFER, WAITING, RankRow, RankTime
from allranks.widgets.palette import KINDS, RANKS, TIME

_MOST_SMOOTHING = 0.99


@dataclass(frozen=True)
class PlotStyle:
    """How curves are drawn.

    ``log`` None: on a log scale where they fall steeply; ``mean`` None: as one band where there
    are many. ``smoothing`` is the weight of what was before. One may be ``selected``. Members of
    an ensemble are ``ordered`` by a column, a parameter's name behind ``=``, perhaps ``down``.
    """

    log: bool | None = None
    mean: bool | None = None
    smoothing: float = 0.0
    selected: int | None = None
    ordered: str = "number"
    down: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> PlotStyle:
        # On a page an axis is linear until it is clicked.
        mean, selected = settings.get("mean"), settings.get("selected")
        smoothing = settings.get("smoothing")
        smoothing = smoothing if isinstance(smoothing, int | float) else 0.0
        return cls(
            log=bool(settings.get("log")),
            mean=None if mean is None else bool(mean),
            smoothing=max(0.0, min(smoothing, _MOST_SMOOTHING)),
            selected=selected if isinstance(selected, int) else None,
            ordered=str(settings.get("sorted", "number")),
            down=bool(settings.get("down")),
        )


#: Where there is no page on which anybody could choose.
DEFAULT_STYLE = PlotStyle()


def smoothed(points: list[tuple[float, float]], amount: float) -> list[tuple[float, float]]:
    """Returns an exponential mean of finite values that does not start at 0, as on the page."""
    if not amount:
        return points
    mean = weight = 0.0
    found = []
    for x, y in points:
        mean = amount * mean + (1 - amount) * y
        weight = amount * weight + (1 - amount)
        found.append((x, mean / weight))
    return found


#: A picture has paper of its own: no grey can be read on white and on black.
PAPER, INK = "#ffffff", "#616161"
WRONG = "#b3261e"
_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 24, 24
#: How wide a letter of a label is, at most.
_LETTER = 7
#: The room beside the labels of an axis.
_BESIDE = 10
#: More ranks than this are drawn as their mean, between the least and the greatest.
MANY = 16

#: Values that have fallen so far, at half of the points, are drawn on a log scale.
_FALLS = 10

#: At most this many steps with infinite values or NaN are marked.
_MARKS = 20
_STEPS = ((1, math.sqrt(2)), (2, math.sqrt(10)), (5, math.sqrt(50)), (10, math.inf))

_Point = tuple[float, float]
#: Step, least, mean and greatest.
_Column = tuple[float, float, float, float]


def curve(
    curves: Curves,
    name: str,
    points: int,
    noun: str = "rank",
    style: PlotStyle = DEFAULT_STYLE,
    groups: Sequence[Collection[int]] = (),
) -> str:
    """Returns the picture of one metric.

    Each of ``groups`` of ranks or members is drawn as one band, in its own colour.
    """
    lines = {
        key: thin(smoothed(_points(series), style.smoothing), points)
        for key, series in curves.of(name).items()
    }
    if style.log:
        # A log scale has no place for the others, on the page neither.
        lines = {key: [point for point in line if point[1] > 0] for key, line in lines.items()}
    count = len(lines)
    bands: dict[int, list[_Column]] = {}
    if groups:
        for index, who in enumerate(groups):
            bands[index] = spread([line for key, line in lines.items() if key.rank in who], points)
    elif style.mean if style.mean is not None else len(lines) > MANY:
        bands[0] = spread(lines.values(), points)
    if bands:
        lines = {}
    every = [point for line in lines.values() for point in line]
    every += [(x, y) for band in bands.values() for x, low, _, high in band for y in (low, high)]
    broken = curves.broken(name, noun)
    wrong = draw_words(_LEFT + 6, _TOP + 12, broken, colour=WRONG) if broken else ""
    marked = sorted({series.broken[0] for series in curves.of(name).values() if series.broken})
    if not every:
        return svg_page(_WIDTH, _HEIGHT, name, wrong)
    frame = _Frame([*(x for x, _ in every), *marked], [y for _, y in every], style.log)
    body = frame.axes()
    body += "".join(_mark(frame.x(step)) for step in marked[:_MARKS])
    body += "".join(
        _band(frame, band, index, 0.15 if groups else 0.25) for index, band in bands.items()
    )
    if bands:
        what = f"{count} curves" if len(bands) == 1 else f"{len(bands)} groups of curves"
        body += draw_words(_WIDTH - _RIGHT, 14, f"mean, minimum and maximum of {what}", "end")
    elif same := curves.coinciding(name):
        body += draw_words(_WIDTH - _RIGHT, 14, f"{same} curves coincide", "end")
    numbers = curves.numbers()
    for key, line in lines.items():
        faint = style.selected not in (None, key.rank)
        index = numbers[key.rank, key.member]
        colour = RANKS[index % len(RANKS)]
        if len(set(line)) == 1:
            # A line through a single point would be invisible.
            (x, y) = line[0]
            body += f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>'
        else:
            body += _line(frame.path(line), colour, index // len(RANKS), 0.2 if faint else 1)
    return svg_page(_WIDTH, _HEIGHT, name, body + wrong)


def _band(frame: _Frame, band: Sequence[_Column], index: int, opacity: float) -> str:
    edge = [(x, high) for x, _, _, high in band] + [(x, low) for x, low, *_ in band[::-1]]
    colour = RANKS[index % len(RANKS)]
    return (
        f'<polygon points="{frame.path(edge)}" fill="{colour}" fill-opacity="{opacity}"/>'
        + _line(frame.path([(x, mean) for x, _, mean, _ in band]), colour, dashes(index))
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


def dashes(index: int) -> int:
    # One of four: the fifth colour resembles the first.
    return (index + index // 4) % 4


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


def spread(lines: Iterable[Sequence[_Point]], columns: int) -> list[_Column]:
    """Returns ``(step, least, mean, greatest)`` over lines, in at most ``columns`` columns."""
    every = sorted(point for line in lines for point in line)
    if not every:
        return []
    first, width = every[0][0], (every[-1][0] - every[0][0]) or 1.0
    found: dict[int, list[_Point]] = {}
    for x, y in every:
        found.setdefault(min(columns - 1, int((x - first) / width * columns)), []).append((x, y))
    band = []
    for column in sorted(found):
        values = [y for _, y in found[column]]
        x = sum(x for x, _ in found[column]) / len(values)
        band.append((x, min(values), sum(values) / len(values), max(values)))
    return band


class _Frame:
    """The axes of one picture; ``log`` None: a log scale where values fall steeply."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log: bool | None) -> None:
        self.x0, self.x1 = min(xs), max(xs)
        self.y0, self.y1 = min(ys), max(ys)
        middle = sorted(ys)[len(ys) // 2]
        falls = self.y0 > 0 and self.y1 > _FALLS * middle
        self.log = falls if log is None else log
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

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0)
        return self.left + share * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        share = (height - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Iterable[_Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self) -> str:
        body = ""
        for height, words in zip(self.heights, self.beside, strict=True):
            y, end = self.y(height), _WIDTH - _RIGHT
            body += f'<path d="M{self.left} {y:.1f}H{end}" stroke="{INK}" opacity="0.35"/>'
            body += draw_words(self.left - 6, y + 4, words, "end")
        steps = ticks(self.x0, self.x1, 3.5)
        for value, words in zip(steps, labels(steps), strict=True):
            middle = min(self.x(value), _WIDTH - len(words) * _LETTER / 2)
            body += draw_words(middle, _HEIGHT - 8, words, "middle")
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


def _points(series: Curve) -> list[_Point]:
    pairs = [*zip(series.steps, series.values, strict=True), series.last]
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def thin(points: list[_Point], most: int) -> list[_Point]:
    """Returns the points with the least and greatest of each stretch kept, so that peaks stay."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[_Point] = []
    for start in range(0, len(points), size):
        part = list(enumerate(points[start : start + size]))
        ends = {min(part, key=lambda one: one[1][1]), max(part, key=lambda one: one[1][1])}
        kept += [point for _, point in sorted(ends)]
    return [*kept, points[-1]]


def _line(path: str, colour: str, dash: int, opacity: float = 1) -> str:
    dashed = f' stroke-dasharray="{6 // dash},3"' if dash else ""
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
_MOST_RANKS = 128
#: A wait that is as wide as this has room for the rank that was waited for.
_NUMBER_WIDTH = 16


def draw_strips(times: Sequence[RankTime]) -> str:
    times = times[:_MOST_RANKS]
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
