"""What an ensemble leaves in the notebook: its curves, its members, and why some failed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from allranks.widgets.dashboard import still, svg
from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.look import AS_IT_FALLS, Look
from allranks.widgets.dashboard.numbers import number, seconds, seconds_like
from allranks.widgets.dashboard.tables import Table
from allranks.widgets.ensemble.groups import groups
from allranks.widgets.ensemble.parallel import parallel
from allranks.widgets.ensemble.rows import Row

_ROWS_HTML = 200
_ROWS_TEXT = 40
_ERROR = 120
_METRICS = 12
_DASHES = ("━━", "╍╍", "┅┅", "┉┉")
#: Of each band.
_COLUMNS = 60


def bundle(figures: Figures, look: Look = AS_IT_FALLS) -> dict[str, str]:
    """Returns text/html and text/plain of an ensemble.

    Args:
        figures: what its members and ranks have told.
        look: how curves are drawn.
    """
    members = figures.members
    assert members is not None
    rows = sorted(members.rows.values(), key=lambda row: row.number)
    said = f"{members.said}, {seconds(figures.elapsed)}"
    html = (
        f'<div class="allranks-still"><p><b>{escape(said)}</b></p>{_images(figures, rows, look)}'
        f"{table_html(ordered(rows, look), members.metric, members.lower)}</div>"
    )
    return {
        "text/html": html,
        "text/plain": f"{said}\n{table_text(rows, members.metric, members.lower)}",
    }


def ordered(rows: Sequence[Row], look: Look) -> list[Row]:
    """Returns members in the order that was chosen on the page; what has no value stands last."""
    name = look.ordered
    found: list[tuple[Any, Row]] = [
        (row.parameters.get(name[1:]) if name.startswith("=") else vars(row).get(name), row)
        for row in rows
    ]
    known = [pair for pair in found if pair[0] is not None]
    # Words and numbers of one column cannot be compared.
    known.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=look.down)
    return [row for _, row in known] + [row for value, row in found if value is None]


def _images(figures: Figures, rows: Sequence[Row], look: Look) -> str:
    """Returns the curves as pictures; of many members a band for each value of a parameter."""
    found = groups(rows) if len(rows) > svg.MANY else {}
    if not found or not figures.curves:
        return still.images(figures, look)
    marks = "".join(
        f'<span style="color: {svg.COLOURS[index]}">'
        f"{_DASHES[svg.dashes(index)]}</span> {escape(name)} ({len(who)}) &nbsp; "
        for index, (name, who) in enumerate(found.items())
    )
    pictures = []
    for name in figures.curves.names[:_METRICS]:
        drawn = svg.curve(figures.curves, name, _COLUMNS, "member", look, list(found.values()))
        pictures.append(still.image(drawn, f"{name} by {', '.join(found)}: see the table"))
    assert figures.members is not None
    drawn = parallel(rows, figures.members.metric, figures.members.lower)
    if drawn:
        pictures.append(still.image(drawn, "each member from its parameters to its metric"))
    return f"<p>{marks}</p><div>{' '.join(pictures)}</div>"


def best_of(rows: Sequence[Row], lower: bool) -> Row | None:
    """Returns the finished member with the best value."""
    done = [row for row in rows if row.state == "finished" and row.metric == row.metric]
    known = [row for row in done if row.metric is not None]
    return (min if lower else max)(known, key=lambda row: row.metric or 0.0, default=None)


def table_text(rows: Sequence[Row], metric: str, lower: bool) -> str:
    """Returns members as lines of text, the best one marked."""
    return _table(rows[:_ROWS_TEXT], rows, metric, lower).text()


def table_html(rows: Sequence[Row], metric: str, lower: bool) -> str:
    """Returns members as a table in HTML, the best one bold."""
    table, best = _table(rows[:_ROWS_HTML], rows, metric, lower), best_of(rows, lower)
    sides = ["left" if column in table.words else "right" for column in range(len(table.head))]
    head = "".join(
        f'<th style="text-align: {side}">{escape(name)}</th>'
        for name, side in zip(table.head, sides, strict=True)
    )
    body = ""
    for row, cells in zip(rows, table.rows, strict=False):
        weight = "; font-weight: bold" if row is best else ""
        body += "<tr>" + "".join(
            f'<td style="text-align: {side}{weight}">{escape(cell)}</td>'
            for side, cell in zip(sides, cells, strict=True)
        )
        body += "</tr>"
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _table(shown: Sequence[Row], rows: Sequence[Row], metric: str, lower: bool) -> Table:
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
        which = "lowest" if lower else "highest"
        notes.append(f"★ the best of those that have finished: the {which} {metric}")
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
