"""The output that a cell with a panel leaves in the notebook.

Its pictures and tables need neither scripts nor widgets. Where a notebook is not trusted, ``<svg>``
and ``<style>`` are removed; pictures as data and ``style=`` on an element stay. Beside them, in a
script, is the panel itself: its scripts and its data, packed.

The pictures are drawn here and not by the panel's scripts: a notebook may run without a browser or
with its page closed, and the panel's canvases, as pictures, would be many times as large.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence, Set
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from allranks.records.ranks import label
from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.cell_model import CellModel, Logs, PanelSection
from allranks.widgets.dashboard.curves import Curves
from allranks.widgets.dashboard.plot import DEFAULT_STYLE, MANY, PlotStyle, thin
from allranks.widgets.dashboard.tables import (
    Table,
    call_table,
    curve_table,
    rank_table,
    seconds,
    straggler,
    strip_tables,
)
from allranks.widgets.scripts import joined

#: All pictures of a cell together; with tables, text and what the live view needs a cell stays
#: below 200 kB.
_PICTURES_NBYTES = 50_000
_PICTURES = 12
_MEMORY_POINTS = 60
_POINT_NBYTES = 12 * 4 / 3


def summary(figures: CellModel) -> str:
    """Returns one line: the ranks, their states, and the time."""
    if figures.title:
        return figures.title
    return f"{label(figures.ranks)}: {figures.tiles.said()}, {seconds(figures.elapsed)}"


def tables(figures: CellModel) -> list[Table]:
    found = []
    if figures.curves:
        found.append(curve_table(figures.curves, figures.noun))
    if figures.strips:
        found += strip_tables(figures.strips)
    found += figures.memory.tables()
    if figures.timings:
        found += [rank_table(figures.timings), call_table(figures.timings)]
    return found


def text(figures: CellModel) -> str:
    every = [*tables(figures), *(table for one in figures.sections for table in one.tables())]
    return "\n".join([summary(figures), *(table.text() for table in every)])


def bundle(figures: CellModel, style: PlotStyle = DEFAULT_STYLE) -> dict[str, str]:
    return {"text/html": page(figures, style), "text/plain": text(figures)}


def page(figures: CellModel, style: PlotStyle = DEFAULT_STYLE) -> str:
    body = f"<p><b>{escape(summary(figures))}</b></p>"
    body += images(figures, style)
    if figures.timings.cause:
        body += f"<p>{escape(figures.timings.cause)}</p>"
    if figures.timings and (last := straggler(figures.timings)):
        body += f"<p>{escape(last)}</p>"
    folded = {"values and times as tables": "".join(map(table_html, tables(figures)))}
    folded |= {escape(section.title): section_html(section) for section in figures.sections}
    for title, inside in folded.items():
        if inside:
            body += f"<details><summary>{title}</summary>{inside}</details>"
    return f'<div class="allranks-still">{body}</div>'


def section_html(section: PanelSection) -> str:
    return _as_html(section.pictures(), section.tables())


def _as_html(pictures: Sequence[tuple[str, str]], tables: Sequence[Table]) -> str:
    # Empty if there are none.
    drawn = " ".join(image(*one, sized=True) for one in pictures)
    return drawn + "".join(map(table_html, tables))


def images(figures: CellModel, style: PlotStyle) -> str:
    """Returns the curves and bars as pictures, and whose colour is which."""
    found = [image(picture, words) for picture, words in _pictures(figures, style)]
    if not found:
        return ""
    owners = {
        f"{figures.noun} {rank} {member}".strip(): number
        for (rank, member), number in figures.curves.numbers().items()
    }
    # Many ranks are drawn as one band, which needs no legend.
    legend = f"<p>{svg.legend(owners)}</p>" if 1 < len(owners) <= MANY else ""
    return f"{legend}<div>{' '.join(found)}</div>"


def _pictures(figures: CellModel, style: PlotStyle) -> list[tuple[str, str]]:
    curves = figures.curves
    names = curves.names[:_PICTURES]
    lines = sum(min(MANY, len(curves.of(name))) for name in names) or 1
    points = int(max(12, min(400, _PICTURES_NBYTES / _POINT_NBYTES / lines)))
    found = []
    for name in names:
        lasts = [f"{figures.noun} {key.rank} {s.last[1]:.4g}" for key, s in curves.of(name).items()]
        picture = svg.curve(curves, name, points, figures.noun, style)
        found.append((picture, f"{name}: {', '.join(lasts[:MANY])}"))
    found += _memory_pictures(figures)
    rows = figures.timings.by_rank()
    if figures.strips:
        times = svg.draw_strips(figures.strips.by_rank())
        found.append((times, "each rank's time: see the table"))
    elif rows:
        found.append(
            (
                svg.bars(rows, figures.elapsed),
                "what each rank waited and transferred: see the table",
            )
        )
    return found


def _memory_pictures(figures: CellModel) -> list[tuple[str, str]]:
    curves, style = figures.memory.curves, PlotStyle(log=False)
    return [
        (svg.curve(curves, name, _MEMORY_POINTS, style=style, x_name="s"), f"{name}: see the table")
        for name in figures.memory.shown
    ]


def memory_page(figures: CellModel) -> str:
    # Empty if it has hardly changed.
    return _as_html(_memory_pictures(figures), figures.memory.tables())


def image(picture: str, words: str, sized: bool = False) -> str:
    """Returns an SVG picture as HTML, with the words that replace it.

    ``sized`` reserves its place before it is drawn.
    """
    data = base64.b64encode(picture.encode()).decode()
    size = " ".join(re.findall(r'\b(?:width|height)="[\d.]+"', picture)[:2]) if sized else ""
    return (
        f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}" {size} '
        'style="display: inline-block; margin: 4px 12px 4px 0">'
    )


def table_html(table: Table, aligned: bool = False, bold: int | None = None) -> str:
    """Returns a table as HTML.

    ``aligned`` columns have the sides that they have as text; one row may be ``bold``.
    """

    def line(tag: str, cells: list[str], weight: str = "") -> str:
        sides = ["left" if column in table.words else "right" for column in range(len(cells))]
        styles = [f' style="text-align: {side}{weight}"' if aligned else "" for side in sides]
        # A cell without words heads nothing.
        tags = [tag if cell else "td" for cell in cells]
        parts = (
            f"<{tag}{style}>{escape(cell)}</{tag}>"
            for tag, style, cell in zip(tags, styles, cells, strict=True)
        )
        return f"<tr>{''.join(parts)}</tr>"

    rows = "".join(
        line("td", row, "; font-weight: bold" if at == bold else "")
        for at, row in enumerate(table.rows)
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    title = f"<p>{escape(table.title)}</p>" if table.title else ""
    head = line("th", table.head)
    return f"{title}<table><thead>{head}</thead><tbody>{rows}</tbody></table>{note}"


#: What the view shows, packed; with its scripts and the picture a cell stays below 200 kB.
_STATE_NBYTES = 44_000
#: All curves together, at first; fewer where that is too much.
_SAVED_POINTS = 12_000
#: Of all logs together; the files have the rest.
_LOGS_NBYTES = 40_000
#: Of members, at most this many of the best, fewer if they need too much room.
_MEMBERS = 2000
_DIGITS = 7

FRONT = Path(__file__).parents[1] / "front"


@cache
def panel_files() -> tuple[str, str]:
    return joined(FRONT / "main.js"), (FRONT / "front.css").read_text("utf-8")


def with_panel(
    picture: dict[str, str], state: dict[str, Any], figures: CellModel, logs: Logs | None
) -> dict[str, str]:
    """Returns a picture's bundle with the panel packed beside it; where scripts run it is shown.

    Args:
        picture: ``text/html`` and ``text/plain`` without scripts.
        state: the panel's last state, as a page gets it.
        figures: the data of the cell.
        logs: the output of its ranks, if the panel shows it.
    """
    packed = _fitting(state, figures, logs)
    if not packed:
        return picture
    key, parts = state["key"], '", "'.join((packed, *_packed_files()))
    loader = (FRONT / "loader.js").read_text("utf-8").strip().removesuffix(";")
    html = f'{picture["text/html"]}<script>{loader}("{key}", ["{parts}"]);</script>'
    # For a page that has seen the cell, and has not heard of this.
    cause = f' data-cause="{quote(figures.timings.cause)}"' if figures.timings.cause else ""
    # Pages write later choices of the reader beside the key: see front/chosen.js.
    return {**picture, "text/html": f'<div data-allranks="{key}"{cause}>{html}</div>'}


@cache
def _packed_files() -> tuple[str, ...]:
    return tuple(map(_packed, panel_files()))


def _packed(text: str) -> str:
    # Without a time in it: the same is the same, and a notebook's versions differ by less.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _fitting(state: dict[str, Any], figures: CellModel, logs: Logs | None) -> str:
    # The state packed, with the points that there is room for; empty if there is none.
    state = {**state, "points": None, "paths": {}}
    # A saved notebook does not contain names of machines.
    state["ranks"] = [{**tile, "host": "", "pid": 0} for tile in state["ranks"]]
    curves = figures.curves
    state["apart"] = [name for name in curves.names if not curves.coinciding(name)]
    state["logs"] = _logs(logs) if logs is not None else []
    if figures.members is None:
        return _with_curves(state, curves)
    members, count = state["members"], min(_MEMBERS, len(state["members"]["rows"]))

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        metric = row["metric"]
        if metric is None or not math.isfinite(metric):
            return True, 0.0
        return False, metric if members["lower"] else -metric

    best = sorted(map(_short, members["rows"]), key=place)
    while True:
        rows = sorted(best[:count], key=lambda row: row["number"])
        state["members"] = {**members, "rows": rows, "missing": len(best) - count}
        packed = _with_curves(state, curves, {row["number"] for row in rows})
        if packed or count <= 1:
            return packed
        count //= 2


def _with_curves(state: dict[str, Any], curves: Curves, whose: Set[int] | None = None) -> str:
    # The state packed, with the curves thinned until it fits; empty if it never does.
    packed = _packed(_finite_json({**state, "curves": []}))
    if len(packed) > _STATE_NBYTES:
        return ""
    most = _SAVED_POINTS // max(1, len(curves.series if whose is None else whose))
    while most > 1:
        state["curves"] = _thin_curves(curves, most, whose)
        packed = _packed(_finite_json(state))
        if len(packed) <= _STATE_NBYTES:
            return packed
        most = most * 3 // 4
    return ""


def _short(row: dict[str, Any]) -> dict[str, Any]:
    # A member's row with fewer digits, and without the text that a page does not show.
    parameters = {name: _rounded(value) for name, value in row["parameters"].items()}
    numbers = {name: _rounded(row[name]) for name in ("metric", "seconds")}
    return {**row, **numbers, "parameters": parameters, "values": ""}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _finite_json(state: dict[str, Any]) -> str:
    # JSON has no NaN, which the metric of a member may be.
    finite = json.loads(json.dumps(state), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"))


def _thin_curves(curves: Curves, most: int, whose: Set[int] | None) -> list[dict[str, Any]]:
    heads, _ = curves.everything()
    told = []
    for head, series in zip(heads, curves.series.values(), strict=True):
        if whose is not None and head["rank"] not in whose:
            continue
        points = thin([*zip(series.steps, series.values, strict=True), series.last], most)
        steps, values = zip(*points, strict=True)
        numbers = [_rounded(value) for value in values]
        whole = [int(step) if step.is_integer() else step for step in steps]
        told.append({**head, "steps": whole, "values": numbers})
    return told


def _logs(logs: Logs) -> list[dict[str, Any]]:
    told = []
    for piece in logs.ends(_LOGS_NBYTES):
        at, pieces = 0, []
        for start, end in [*piece.err_spans, [len(piece.text)] * 2]:
            for stop, is_error in ((start, False), (end, True)):
                text = piece.text[at : max(at, stop)].decode("utf-8", "replace")
                at = max(at, stop)
                if text:
                    pieces.append((text, is_error))
        told.append({"rank": piece.rank, "skipped": piece.skipped, "pieces": pieces})
    return told
