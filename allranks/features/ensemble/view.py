"""The views of an ensemble and of a map: the members' output, a live table, pictures, a bar."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any, TypeVar

from allranks.errors import UsageError
from allranks.features.ensemble.member import LoggedValues, Member, short
from allranks.records.wire import Hello, Output
from allranks.widgets.dashboard import saved_panel, svg
from allranks.widgets.dashboard.cell_model import CellModel, Logs, Tiles
from allranks.widgets.dashboard.curves import Curve, Curves, Key
from allranks.widgets.dashboard.plot import DEFAULT_STYLE, MANY, PlotStyle, group_dash
from allranks.widgets.dashboard.saved_panel import image, images
from allranks.widgets.dashboard.tables import Table, labels, number, seconds, seconds_like
from allranks.widgets.dashboard.view import Ask, ClickHandler, LivePanel
from allranks.widgets.displays import bar_data, bar_line, rewrite_line
from allranks.widgets.notebook import NotebookView
from allranks.widgets.palette import RANKS, WORST_TO_BEST
from allranks.widgets.text import NOTEBOOK, Data, TerminalView, front_end


@dataclass(frozen=True)
class MemberRow:
    """One member: its parameters, its state, and its value of the chosen metric.

    ``values`` has all parameters in one text; ``parameters`` has a number or a text for each.
    """

    number: int
    values: str
    state: str
    rank: int | None
    metric: float | None
    seconds: float | None
    error: str
    parameters: dict[str, float | int | str] = field(default_factory=dict)


class MemberTable:
    """The rows and the headline of a running ensemble.

    ``metric`` is the name of the numbers in the rows; ``lower`` is True if lower ones are better.
    ``order`` is a text about it, and how to choose; empty if a person has chosen.
    """

    def __init__(self) -> None:
        self.rows: dict[int, MemberRow] = {}
        self.metric = ""
        self.lower = False
        self.order = ""
        self.said = ""
        self._started: dict[int, float] = {}
        self._changed: set[int] = set()
        self._told: tuple[Any, ...] = ()

    def put(self, row: MemberRow) -> None:
        before = self.rows.get(row.number)
        if row == before:
            return
        if row.state == "running" and (before is None or before.state != "running"):
            self._started[row.number] = time.monotonic()
        self.rows[row.number] = row
        self._changed.add(row.number)

    def counts(self) -> Counter[str]:
        return Counter(row.state for row in self.rows.values())

    def news(self) -> dict[str, Any] | None:
        whole = self.metric, self.lower, self.order, self.said
        if not self._changed and whole == self._told:
            return None
        told = self._tell([self.rows[number] for number in sorted(self._changed)])
        self._changed.clear()
        self._told = whole
        return told

    def everything(self) -> dict[str, Any]:
        return self._tell(list(self.rows.values()))

    def _tell(self, rows: list[MemberRow]) -> dict[str, Any]:
        now = time.monotonic()
        told = []
        for row in rows:
            one = dict(vars(row))
            if row.state == "running":
                one["seconds"] = now - self._started[row.number]
            told.append(one)
        return {
            "rows": told,
            "metric": self.metric,
            "lower": self.lower,
            "order": self.order,
            "said": self.said,
        }


_FEW_VALUES = 8
_PARTS = 4


def groups(rows: Sequence[MemberRow]) -> dict[str, list[int]]:
    # By the first parameter that differs.
    names = dict.fromkeys(name for row in rows for name in row.parameters)
    for name in names:
        found = by(rows, name)
        if len(found) > 1:
            return found
    return {}


def by(rows: Sequence[MemberRow], name: str) -> dict[str, list[int]]:
    # Many different numbers are cut into parts with equally many values.
    values = list(dict.fromkeys(row.parameters[name] for row in rows if name in row.parameters))
    numbers = not any(isinstance(value, str) for value in values)
    if numbers:
        values.sort(key=float)
    count = len(values)
    if count > _FEW_VALUES:
        count = _PARTS if numbers else _FEW_VALUES
    cuts = [place * len(values) // count for place in range(count + 1)] if count else []
    found = {}
    for start, stop in pairwise(cuts):
        part = values[start:stop]
        ends = dict.fromkeys((_value_text(part[0]), _value_text(part[-1])))
        among = set(part)
        members = [row.number for row in rows if row.parameters.get(name) in among]
        found[f"{name}={' to '.join(ends)}"] = members
    return found


def _value_text(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_ROWS_HTML = 200
_ROWS_TEXT = 40
_ERROR = 120
_METRICS = 12
_DASHES = ("━━", "╍╍", "┅┅", "┉┉")
#: Of each band.
_COLUMNS = 60


def bundle(figures: CellModel, style: PlotStyle = DEFAULT_STYLE) -> dict[str, str]:
    members = figures.members
    assert isinstance(members, MemberTable)
    rows = sorted(members.rows.values(), key=lambda row: row.number)
    said = f"{members.said}, {seconds(figures.elapsed)}"
    html = f"<p><b>{escape(said)}</b></p>{_images(figures, members, rows, style)}"
    how = members.metric, members.lower, members.order
    html += table_html(ordered(rows, style), *how)
    return {
        "text/html": f'<div class="allranks-still">{html}</div>',
        "text/plain": f"{said}\n{table_text(rows, *how)}",
    }


def ordered(rows: Sequence[MemberRow], style: PlotStyle) -> list[MemberRow]:
    # In the order chosen on the page; members without a value come last.
    name = style.ordered
    found: list[tuple[Any, MemberRow]] = [
        (row.parameters.get(name[1:]) if name.startswith("=") else vars(row).get(name), row)
        for row in rows
    ]
    known = [pair for pair in found if pair[0] is not None]
    # Words and numbers of one column cannot be compared.
    known.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=style.down)
    return [row for _, row in known] + [row for value, row in found if value is None]


def _images(
    figures: CellModel, members: MemberTable, rows: Sequence[MemberRow], style: PlotStyle
) -> str:
    # Many members are drawn as a band for each value of a parameter.
    found = groups(rows) if len(rows) > MANY else {}
    if not found or not figures.curves:
        return images(figures, style)
    marks = "".join(
        f'<span style="color: {RANKS[index]}">'
        f"{_DASHES[group_dash(index)]}</span> {escape(name)} ({len(who)}) &nbsp; "
        for index, (name, who) in enumerate(found.items())
    )
    pictures = []
    for name in figures.curves.names[:_METRICS]:
        drawn = svg.curve(figures.curves, name, _COLUMNS, "member", style, found)
        pictures.append(image(drawn, f"{name} by {', '.join(found)}: see the table"))
    if drawn := parallel(rows, members.metric, members.lower):
        pictures.append(image(drawn, "each member from its parameters to its metric"))
    return f"<p>{marks}</p><div>{' '.join(pictures)}</div>"


def best_of(rows: Sequence[MemberRow], lower: bool) -> MemberRow | None:
    done = [row for row in rows if row.state == "finished" and row.metric == row.metric]
    known = [row for row in done if row.metric is not None]
    return (min if lower else max)(known, key=lambda row: row.metric or 0.0, default=None)


def direction(metric: str, lower: bool) -> str:
    return f"the {'lowest' if lower else 'highest'} {metric}"


def table_text(rows: Sequence[MemberRow], metric: str, lower: bool, order: str = "") -> str:
    # The best member is marked among all rows, not only among those that are shown.
    return _table(rows[:_ROWS_TEXT], rows, metric, lower, order).text()


def table_html(rows: Sequence[MemberRow], metric: str, lower: bool, order: str = "") -> str:
    shown, best = rows[:_ROWS_HTML], best_of(rows, lower)
    bold = next((at for at, row in enumerate(shown) if row is best), None)
    return saved_panel.table_html(
        _table(shown, rows, metric, lower, order), aligned=True, bold=bold
    )


def _table(
    shown: Sequence[MemberRow], rows: Sequence[MemberRow], metric: str, lower: bool, order: str
) -> Table:
    best = best_of(rows, lower)
    failed = any(row.error for row in shown)
    names = list(dict.fromkeys(name for row in rows for name in row.parameters))
    head = ["member", *names, "state", "rank", metric or "metric", "time"]
    longest = max((row.seconds or 0.0 for row in rows), default=0.0)
    lines = []
    for row in shown:
        value = "" if row.metric is None else number(row.metric)
        cells = [
            f"{row.number}",
            *(_parameter(row.parameters.get(name, "")) for name in names),
            row.state,
            "" if row.rank is None else f"{row.rank}",
            f"{value} ★" if row is best else value,
            "" if row.seconds is None else seconds_like(row.seconds, longest),
        ]
        lines.append(cells + ([_cut(row.error)] if failed else []))
    more = len(rows) - len(shown)
    notes = [f"{more:,} more members are not in this table: runs.rows() has them"] if more else []
    if best is not None:
        how = f", {order}" if order else f": {direction(metric, lower)}"
        notes.append(f"★ the best of those that have finished{how}")
    # Words stand to the left, numbers to the right.
    texts = [
        1 + at
        for at, name in enumerate(names)
        if any(isinstance(row.parameters.get(name), str) for row in rows)
    ]
    words = (*texts, 1 + len(names), len(head))
    return Table("", head + (["error"] if failed else []), lines, "; ".join(notes), words)


def _parameter(value: float | int | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= _ERROR else f"{first[: _ERROR - 1]}…"


_HEIGHT, _TOP, _BOTTOM, _SIDE = 240, 34, 16, 70
_BETWEEN, _MOST_WIDE = 150, 900
#: Numbers that span so much stand on a log scale.
_DECADES = 100
_FEW_MARKS = 8
_LABEL_LETTERS, _LABEL_HEIGHT = 11, 12
#: Lines of more members are left out, the worst first.
MOST_LINES = 400

Value = float | int | str
V = TypeVar("V", float, str)


def parallel(rows: Sequence[MemberRow], metric: str, lower: bool) -> str:
    # Empty if no parameter differs or no member has the metric.
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
    body = "".join(_member_line(row, names, axes, places, lower) for row in reversed(shown))
    for name, axis, x in zip([*names, metric], axes, places, strict=True):
        body += axis.drawn(name, x)
    left = len(known) - len(shown)
    note = f", without the {left:,} worst" if left else ""
    body += (
        f'<text x="4" y="13"><tspan fill="{_grey(1)}">best</tspan> to '
        f'<tspan fill="{_grey(0)}">worst</tspan>{note}</text>'
    )
    return svg.svg_page(width, _HEIGHT, "", body, titled=False)


def differing(rows: Sequence[MemberRow]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.parameters)
    return [name for name in names if len({row.parameters.get(name) for row in rows}) > 1]


class _Axis:
    # Numbers have places on a scale; words have equal distances.
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
        if self.words:
            return self.words.index(str(value)) / max(1, len(self.words) - 1)
        low, high, at = (self._scaled(float(one)) for one in (self.low, self.high, value))
        return 0.5 if low == high else (at - low) / (high - low)

    def y(self, value: Value) -> float:
        return _HEIGHT - _BOTTOM - self.share(value) * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self, name: str, x: float) -> str:
        body = f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{svg.INK}"/>'
        body += _label(x, _TOP - 8, name[:24], 'text-anchor="middle" font-weight="bold"')
        for value, said in self._marks():
            body += _label(x + 4, self.y(value) + 4, said, "")
        return body

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def _marks(self) -> list[tuple[Value, str]]:
        if self.words:
            words = self._apart(self.words)
            return [(word, _abbreviated(word)) for word in words]
        marks: list[float] = list(self.values)
        if len(marks) > _FEW_MARKS and self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            marks = [10.0**power for power in range(first, last + 1)]
        elif len(marks) > _FEW_MARKS:
            marks = svg.ticks(self.low, self.high, 5)
        marks = self._apart(marks)
        return list(zip(marks, _short_labels(marks), strict=True))

    def _apart(self, marks: Sequence[V]) -> list[V]:
        # Both ends, and what does not overlap them.
        kept = list(dict.fromkeys((marks[0], marks[-1])))
        for mark in marks[1:-1]:
            y = self.y(mark)
            if all(abs(y - self.y(other)) >= _LABEL_HEIGHT for other in kept):
                kept.append(mark)
        return kept


def _short_labels(values: Sequence[float]) -> list[str]:
    found = labels(values)
    if max(map(len, found)) > _LABEL_LETTERS:
        return [number(value) for value in values]
    return found


def _abbreviated(word: str) -> str:
    return word if len(word) <= _LABEL_LETTERS else f"{word[: _LABEL_LETTERS - 1]}…"


def _member_line(
    row: MemberRow,
    names: Sequence[str],
    axes: Sequence[_Axis],
    places: Sequence[float],
    lower: bool,
) -> str:
    assert row.metric is not None
    values = [*(row.parameters.get(name, "") for name in names), row.metric]
    points = " ".join(
        f"{x:.0f},{axis.y(value):.0f}" for x, axis, value in zip(places, axes, values, strict=True)
    )
    share = axes[-1].share(row.metric)
    share = 1 - share if lower else share
    return f'<polyline points="{points}" fill="none" stroke="{_grey(share)}" stroke-width="1.5"/>'


def _grey(share: float) -> str:
    worst, best = WORST_TO_BEST
    return "#" + 3 * f"{round(worst + share * (best - worst)):02x}"


def _label(x: float, y: float, said: str, how: str) -> str:
    paper = f'stroke="{svg.PAPER}" stroke-width="3" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {how} {paper}>{escape(said)}</text>'


_PLOT_POINTS = 400


class Picture:
    """A picture in a notebook, else its text."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


def plot_parallel(rows: Sequence[MemberRow], metric: str, lower: bool) -> Picture:
    picture, text = parallel(rows, metric, lower), table_text(rows, metric, lower)
    if not picture:
        raise UsageError(
            f"expected members with different parameters and a number named {metric!r}, found "
            "none. Type for example: runs.parallel('loss')"
        )
    return Picture(f"<div>{image(picture, text)}</div>", text)


def plot(members: Sequence[Member], name: str, by: str | None) -> Picture:
    logged = [member for member in members if name in member.series]
    if not logged:
        known = sorted({one for member in members for one in member.series})
        raise UsageError(
            f"expected a name that members have logged, found {name!r}: "
            f"{'they logged ' + ', '.join(known) if known else 'they logged nothing'}."
        )
    groups: dict[str, list[LoggedValues]] = {}
    if by is not None:
        logged = _sorted_by(logged, by)
    for member in logged:
        group = f"member {member.number}" if by is None else f"{by}={short(member.values[by])}"
        groups.setdefault(group, []).append(member.history[name])
    curves, rows = Curves(), []
    for place, (group, histories) in enumerate(groups.items()):
        steps, values = _mean(histories)
        series = curves.series[Key(name, place, "")] = Curve(place)
        series.add(array("d", steps), array("d", values), len(steps) + 1)
        rows.append([group, f"{len(histories)}", *map(number, series.last)])
    text = Table("", [name, "members", "step", "last"], rows).text()
    picture = svg.curve(curves, name, _PLOT_POINTS, "line")
    numbers = {name: at for at, name in enumerate(groups)}
    legend = svg.legend(numbers) if len(groups) <= MANY else ""
    return Picture(f"<div><p>{legend}</p>{image(picture, text)}</div>", text)


def _sorted_by(members: list[Member], by: str) -> list[Member]:
    parameters = sorted({name for member in members for name in member.values})
    if any(by not in member.values for member in members):
        raise UsageError(
            f"expected a parameter to plot by, found {by!r}. The members have: "
            f"{', '.join(parameters) or 'none'}"
        )
    try:
        return sorted(members, key=lambda member: member.values[by])
    except (TypeError, ValueError):
        return members  # values that cannot be compared stay in the order of the members


def _mean(histories: Sequence[LoggedValues]) -> tuple[Sequence[float], Sequence[float]]:
    import numpy as np

    if len(histories) == 1:
        return histories[0].steps.tolist(), histories[0].values.tolist()
    steps = np.unique(np.concatenate([one.steps for one in histories]))
    # Beyond the end of the shortest history the others alone would shift the mean.
    last = min(one.steps[-1] for one in histories)
    steps = steps[steps <= last]
    values = [np.interp(steps, one.steps, one.values) for one in histories]
    return steps.tolist(), np.mean(values, axis=0).tolist()


_SHOW_AFTER_SECONDS = 0.3
_PERIOD_SECONDS = 0.2


class TextEnsemble:
    """Shows the members' output, and a table at the end.

    ``lines`` adds a line for each member that ends.
    """

    def __init__(
        self, text: NotebookView | TerminalView, *, lines: bool = False, table: bool = True
    ) -> None:
        self.members = MemberTable()
        self.figures = CellModel([], self.members)
        self._text = text
        self._lines = lines
        self._table = table

    def ranks(self, hellos: Sequence[Hello]) -> None:
        # From now on these ranks run the members.
        self.figures.tiles = Tiles(hellos)
        self.figures.ranks = tuple(hello.rank for hello in hellos)

    def row(self, row: MemberRow) -> None:
        before = self.members.rows.get(row.number)
        self.members.put(row)
        ended = row.state not in ("waiting", "running")
        if self._lines and ended and before is not None and before.state != row.state:
            where = "" if row.rank is None else f" on rank {row.rank}"
            took = "" if row.seconds is None else f" in {seconds(row.seconds)}"
            value = f": {self.members.metric} {row.metric:.6g}" if row.metric is not None else ""
            value = f": {row.error}" if row.error else value
            self._text.say(f"member {row.number} ({row.values}) {row.state}{where}{took}{value}")

    def output(self, member: int, batch: Output, log: str) -> None:
        self._text.log_of[member] = log
        self._text.output(replace(batch, rank=member))

    def notice(self, text: str) -> None:
        self._text.say(text)

    def refresh(self) -> None:
        self._text.refresh()

    def finish(self) -> None:
        self.figures.end()
        self._text.finish()
        if self._table:
            self._text.show_text(bundle(self.figures)["text/plain"])


class NotebookEnsemble(TextEnsemble):
    """Shows a live panel above the members' output; the panel stays at the end."""

    _text: NotebookView

    def __init__(self, mode: str, text: NotebookView, act: ClickHandler, ask: Ask) -> None:
        super().__init__(text, table=False)
        self._live = LivePanel(self.figures, Logs([]), mode)
        self._live.act, self._live.ask = act, ask
        self._show_at = time.monotonic() + _SHOW_AFTER_SECONDS

    def refresh(self) -> None:
        # An ensemble that is over in a moment needs no panel.
        if not self._live.shown and time.monotonic() >= self._show_at:
            self._text.show_panel(self._live.panel(self.members.said))
        self._text.refresh()
        self._live.refresh()

    def finish(self) -> None:
        self.figures.end()
        self._live.leave(self._text, partial(bundle, self.figures))
        self._text.finish()
        self._live.close()

    def outputs(self) -> list[tuple[Data, Data]]:
        return self._text.outputs()


def ensemble_view(mode: str, act: ClickHandler, ask: Ask, *, fold: bool = True) -> TextEnsemble:
    if front_end() != NOTEBOOK:
        return TextEnsemble(TerminalView([], fold=fold, noun="member"), lines=True)
    text = NotebookView([], fold=fold, noun="member")
    return TextEnsemble(text) if mode == "plain" else NotebookEnsemble(mode, text, act, ask)


class BarView(TextEnsemble):
    """Shows the items' output, and a progress bar above it."""

    def __init__(self, text: NotebookView | TerminalView, count: int, name: str) -> None:
        super().__init__(text, table=False)
        self._count, self._name = count, name
        self._began = time.monotonic()
        self._next = self._began + _PERIOD_SECONDS
        self._shown = ""

    def refresh(self) -> None:
        super().refresh()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PERIOD_SECONDS
            self._show(self.members.said.partition("; ")[2])

    def finish(self) -> None:
        self._show(f"in {seconds(time.monotonic() - self._began)}")
        super().finish()

    def _show(self, said: str) -> None:
        counts = self.members.counts()
        failed = counts["failed"]
        done = counts["finished"] + failed
        head = f"{self._name}: {done:,} of {self._count:,}"
        tail = f"{f', {failed:,} failed' if failed else ''}{f', {said}' if said else ''}"
        line = bar_line(head, done, self._count, tail)
        if line == self._shown:
            return
        self._shown = line
        if isinstance(self._text, NotebookView):
            self._text.show_panel(bar_data(head, done, self._count, tail))
        else:
            rewrite_line(line, end="\n" if said.startswith("in ") else "")


def bar_view(count: int, name: str) -> BarView:
    kind = NotebookView if front_end() == NOTEBOOK else TerminalView
    return BarView(kind([], noun="item"), count, name)
