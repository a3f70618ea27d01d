"""What one chart shows; ``front/plot.js`` describes the chart of a page in the same way."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.widgets.dashboard.curves import Curve, Curves
from allranks.widgets.palette import DASHES, RANKS

_MOST_SMOOTHING = 0.99
#: More curves than this are drawn as their mean, between the least and the greatest.
MANY = 16
#: At most this many steps with infinite values or NaN are marked.
_MARKS = 20

Point = tuple[float, float]
#: Step, least, mean and greatest.
Column = tuple[float, float, float, float]


@dataclass(frozen=True)
class PlotStyle:
    """How curves are drawn.

    ``log`` None: on a log scale where they fall steeply; ``mean`` None: as one band where there
    are many. ``axes`` has the choices for single metrics, ``steps`` the part that is drawn.
    ``smoothing`` is the weight of what was before. One may be ``selected``. Members are
    ``ordered`` by a column, a parameter's name behind ``=``, perhaps ``down``.
    """

    log: bool | None = None
    mean: bool | None = None
    smoothing: float = 0.0
    selected: int | None = None
    ordered: str = "number"
    down: bool = False
    axes: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    steps: tuple[float, float] | None = None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> PlotStyle:
        # A page may say anything. On a page an axis is linear until it is clicked.
        mean, selected = settings.get("mean"), settings.get("selected")
        smoothing, axes, steps = (settings.get(name) for name in ("smoothing", "axes", "steps"))
        smoothing = smoothing if isinstance(smoothing, int | float) else 0.0
        pairs = axes.items() if isinstance(axes, dict) else ()
        part: tuple[float, float] | None = None
        match steps:
            case [int() | float() as first, int() | float() as last] if first < last:
                part = first, last
        return cls(
            log=False,
            mean=None if mean is None else bool(mean),
            smoothing=max(0.0, min(smoothing, _MOST_SMOOTHING)),
            selected=selected if isinstance(selected, int) else None,
            ordered=str(settings.get("sorted", "number")),
            down=bool(settings.get("down")),
            axes={name: own for name, own in pairs if isinstance(own, dict)},
            steps=part,
        )

    def log_of(self, name: str) -> tuple[bool, bool | None]:
        """Returns whether the axes of a metric are logarithmic, x and y."""
        own = self.axes.get(name, {})
        return bool(own.get("x")), bool(own["y"]) if "y" in own else self.log


#: Where there is no page on which anybody could choose.
DEFAULT_STYLE = PlotStyle()


@dataclass(frozen=True)
class PlotLine:
    """One curve; ``index`` is that of its colour, ``dash`` that of its dashes."""

    label: str
    rank: int
    index: int
    dash: int
    faint: bool
    strong: bool
    points: list[Point]


@dataclass(frozen=True)
class PlotBand:
    """The mean of ``count`` curves, between the least and the greatest."""

    label: str
    index: int
    dash: int
    count: int
    columns: list[Column]


@dataclass(frozen=True)
class Plot:
    """What one chart shows. ``log_y`` None: on a log scale where values fall steeply."""

    name: str
    x_name: str
    log_x: bool
    log_y: bool | None
    lines: list[PlotLine]
    bands: list[PlotBand]
    marks: list[float]


def plot_of(
    curves: Curves,
    name: str,
    points: int,
    noun: str = "rank",
    style: PlotStyle = DEFAULT_STYLE,
    groups: Mapping[str, Collection[int]] | None = None,
    x_name: str = "step",
) -> Plot:
    """Describes the chart of one metric, with at most about this number of ``points`` a curve.

    Each of ``groups`` of ranks or members is drawn as one band, in its own colour.
    """
    log_x, log_y = style.log_of(name)
    numbers, lines = curves.numbers(), []
    first, last = style.steps or (-math.inf, math.inf)
    for key, series in curves.of(name).items():
        found = smoothed(_points(series), style.smoothing)
        # A log scale has no place for the others, on the page neither.
        found = [(x, y) for x, y in found if (x > 0 or not log_x) and (y > 0 or not log_y)]
        index = numbers[key.rank, key.member]
        line = PlotLine(
            f"{noun} {key.rank} {key.member}".strip(),
            key.rank,
            index,
            index // len(RANKS) % len(DASHES),
            style.selected not in (None, key.rank),
            style.selected == key.rank,
            thin([(x, y) for x, y in found if first <= x <= last], points),
        )
        lines.append(line)
    bands = []
    if groups:
        for index, (label, who) in enumerate(groups.items()):
            columns = spread((line.points for line in lines if line.rank in who), points)
            bands.append(PlotBand(label, index, group_dash(index), len(who), columns))
    elif style.mean if style.mean is not None else len(lines) > MANY:
        columns = spread((line.points for line in lines), points)
        bands.append(PlotBand("mean", 0, 0, len(lines), columns))
    marked = {series.broken[0] for series in curves.of(name).values() if series.broken}
    shown = (step for step in marked if first <= step <= last and (step > 0 or not log_x))
    marks = sorted(shown)[:_MARKS]
    drawn = [line for line in lines if line.strong] if bands else lines
    return Plot(name, x_name, log_x, log_y, drawn, bands, marks)


def group_dash(index: int) -> int:
    # The fifth colour resembles the first, so groups differ in their dashes too.
    return (index + index // len(DASHES)) % len(DASHES)


def smoothed(points: list[Point], amount: float) -> list[Point]:
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


def spread(lines: Iterable[Sequence[Point]], columns: int) -> list[Column]:
    """Returns ``(step, least, mean, greatest)`` over lines, in at most ``columns`` columns."""
    every = sorted(point for line in lines for point in line)
    if not every:
        return []
    first, width = every[0][0], (every[-1][0] - every[0][0]) or 1.0
    found: dict[int, list[Point]] = {}
    for x, y in every:
        found.setdefault(min(columns - 1, int((x - first) / width * columns)), []).append((x, y))
    band = []
    for column in sorted(found):
        values = [y for _, y in found[column]]
        x = sum(x for x, _ in found[column]) / len(values)
        band.append((x, min(values), sum(values) / len(values), max(values)))
    return band


def _points(series: Curve) -> list[Point]:
    pairs = [*zip(series.steps, series.values, strict=True), series.last]
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def thin(points: list[Point], most: int) -> list[Point]:
    """Returns the points with the least and greatest of each stretch kept, so that peaks stay."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = list(enumerate(points[start : start + size]))
        ends = {min(part, key=lambda one: one[1][1]), max(part, key=lambda one: one[1][1])}
        kept += [point for _, point in sorted(ends)]
    return [*kept, points[-1]]
