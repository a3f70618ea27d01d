"""``runs.plot("loss", by="lr")`` and ``runs.parallel()``: what members brought, as one picture."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from allranks.ensemble.member import History, Member, short
from allranks.errors import UsageError
from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.curves import Curves, Key, Series
from allranks.widgets.dashboard.saved_panel import image
from allranks.widgets.dashboard.tables import Table, number
from allranks.widgets.ensemble.members import MemberRow
from allranks.widgets.ensemble.still import parallel, table_text

_POINTS = 400


class Plot:
    """One line for each group of members: the mean of what they logged.

    Args:
        name: what they logged.
        groups: their histories, by what the group is called.
    """

    def __init__(self, name: str, groups: Mapping[str, Sequence[History]]) -> None:
        self._name = name
        self._counts = {group: len(histories) for group, histories in groups.items()}
        self._curves = Curves()
        for place, histories in enumerate(groups.values()):
            steps, values = _mean(histories)
            series = self._curves.series[Key(name, place, "")] = Series(place)
            series.add(array("d", steps), array("d", values), len(steps) + 1)

    def _table(self) -> Table:
        rows = [
            [group, f"{count}", number(series.last[0]), number(series.last[1])]
            for (group, count), series in zip(
                self._counts.items(), self._curves.series.values(), strict=True
            )
        ]
        return Table("", [self._name, "members", "step", "last"], rows)

    def _repr_html_(self) -> str:
        picture = svg.curve(self._curves, self._name, _POINTS, "line")
        legend = ""
        if len(self._counts) <= svg.MANY:
            legend = " &nbsp; ".join(
                f'<span style="color: {svg.COLOURS[place % len(svg.COLOURS)]}">'
                f"{'■' if place < len(svg.COLOURS) else '▤'}</span> {escape(group)}"
                for place, group in enumerate(self._counts)
            )
        return f"<div><p>{legend}</p>{image(picture, self._table().text())}</div>"

    def __repr__(self) -> str:
        return self._table().text()


class Parallel:
    """Lines of members through their parameters to a metric.

    Args:
        rows: the members.
        metric: the name of the numbers in the rows.
        lower: whether lower ones are better.

    Raises:
        UsageError: no member has such a number, or no parameter differs.
    """

    def __init__(self, rows: Sequence[MemberRow], metric: str, lower: bool) -> None:
        self._picture = parallel(rows, metric, lower)
        self._text = table_text(rows, metric, lower)
        if not self._picture:
            raise UsageError(
                f"expected members with different parameters and a number named {metric!r}, found "
                "none. Type for example: runs.parallel('loss')"
            )

    def _repr_html_(self) -> str:
        return f"<div>{image(self._picture, self._text)}</div>"

    def __repr__(self) -> str:
        return self._text


def plot(members: Sequence[Member], name: str, by: str | None) -> Plot:
    """Returns what members logged under a name, grouped by the values of a parameter.

    Raises:
        UsageError: none of them has logged it, or there is no such parameter.
    """
    logged = [member for member in members if name in member.series]
    if not logged:
        known = sorted({one for member in members for one in member.series})
        raise UsageError(
            f"expected a name that members have logged, found {name!r}: "
            f"{'they logged ' + ', '.join(known) if known else 'they logged nothing'}."
        )
    groups: dict[str, list[History]] = {}
    if by is not None:
        logged = _sorted_by(logged, by)
    for member in logged:
        group = f"member {member.number}" if by is None else f"{by}={short(member.values[by])}"
        groups.setdefault(group, []).append(member.history[name])
    return Plot(name, groups)


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


def _mean(histories: Sequence[History]) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean of several histories, as far as all of them go."""
    if len(histories) == 1:
        return histories[0].steps.tolist(), histories[0].values.tolist()
    steps = np.unique(np.concatenate([one.steps for one in histories]))
    last = min(one.steps[-1] for one in histories)
    steps = steps[steps <= last]
    values = [np.interp(steps, one.steps, one.values) for one in histories]
    return steps.tolist(), np.mean(values, axis=0).tolist()
