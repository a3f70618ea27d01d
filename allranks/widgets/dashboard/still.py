"""The still picture that a live view leaves: a mime bundle without scripts or widgets.

Where a notebook is not trusted, ``<svg>`` and ``<style>`` are taken out; pictures as data and
``style=`` on an element stay.
"""

from __future__ import annotations

import base64
import re
from html import escape

from allranks.records.ranks import label
from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.curves import curve_table
from allranks.widgets.dashboard.sections import PanelSection
from allranks.widgets.dashboard.svg import DEFAULT_STYLE, PlotStyle
from allranks.widgets.dashboard.tables import Table, seconds
from allranks.widgets.dashboard.time_strips import draw_strips, strip_tables
from allranks.widgets.dashboard.timings import call_table, rank_table, straggler

#: All pictures of a cell together; with tables, text and what the live view needs a cell stays
#: below 200 kB.
_PICTURES_NBYTES = 50_000
_METRICS = 12
_MEMORY_POINTS = 60
_POINT_NBYTES = 12 * 4 / 3


def summary(figures: CellModel) -> str:
    """Returns one line: which ranks, how they are, for how long."""
    if figures.title:
        return figures.title
    return f"{label(figures.ranks)}: {figures.tiles.said()}, {seconds(figures.elapsed)}"


def tables(figures: CellModel) -> list[Table]:
    """Returns the tables that have something in them."""
    found = []
    if figures.curves:
        found.append(curve_table(figures.curves, figures.noun))
    found += time_tables(figures)
    if figures.timings:
        found.append(rank_table(figures.timings))
        found.append(call_table(figures.timings))
    return found


def time_tables(figures: CellModel) -> list[Table]:
    """Returns where the ranks' time and memory went."""
    times = strip_tables(figures.strips) if figures.strips else []
    return [*times, *figures.memory.tables()]


def text(figures: CellModel) -> str:
    """Returns all of it as text."""
    every = [*tables(figures), *(table for one in figures.sections for table in one.tables())]
    return "\n".join([summary(figures), *(table.text() for table in every)])


def bundle(figures: CellModel, look: PlotStyle = DEFAULT_STYLE) -> dict[str, str]:
    """Returns text/html and text/plain of what a cell has shown.

    Args:
        figures: what its ranks have told.
        look: how curves are drawn.
    """
    return {"text/html": page(figures, look), "text/plain": text(figures)}


def page(figures: CellModel, look: PlotStyle = DEFAULT_STYLE) -> str:
    """Returns the still picture as HTML."""
    body = f"<p><b>{escape(summary(figures))}</b></p>"
    body += images(figures, look)
    if figures.timings and straggler(figures.timings):
        body += f"<p>{escape(straggler(figures.timings))}</p>"
    found = tables(figures)
    if found:
        inside = "".join(table_html(table) for table in found)
        body += f"<details><summary>values and timings as tables</summary>{inside}</details>"
    for section in figures.sections:
        if inside := section_html(section):
            body += f"<details><summary>{escape(section.title)}</summary>{inside}</details>"
    return f'<div class="allranks-still">{body}</div>'


def section_html(section: PanelSection) -> str:
    """Returns a section that was added, as HTML; empty if it has nothing to show."""
    pictures = " ".join(image(*one, sized=True) for one in section.pictures())
    return pictures + "".join(map(table_html, section.tables()))


def images(figures: CellModel, look: PlotStyle) -> str:
    """Returns the curves and bars as pictures, and whose colour is which."""
    found = [image(picture, words) for picture, words in _pictures(figures, look)]
    return _legend(figures) + f"<div>{' '.join(found)}</div>" if found else ""


def _pictures(figures: CellModel, look: PlotStyle) -> list[tuple[str, str]]:
    curves = figures.curves
    names = curves.names[:_METRICS]
    lines = sum(min(svg.MANY, len(curves.of(name))) for name in names) or 1
    points = int(max(12, min(400, _PICTURES_NBYTES / _POINT_NBYTES / lines)))
    found = []
    for name in names:
        lasts = [f"{figures.noun} {key.rank} {s.last[1]:.4g}" for key, s in curves.of(name).items()]
        picture = svg.curve(curves, name, points, figures.noun, look)
        found.append((picture, f"{name}: {', '.join(lasts[: svg.MANY])}"))
    found += _time_pictures(figures)
    rows = figures.timings.by_rank()
    if rows and not figures.strips:
        found.append((svg.bars(rows), "what each rank waited and transferred: see the table"))
    return found


def _time_pictures(figures: CellModel) -> list[tuple[str, str]]:
    found = _memory_pictures(figures)
    if figures.strips:
        found.append((draw_strips(figures.strips.by_rank()), "each rank's time: see the table"))
    return found


def _memory_pictures(figures: CellModel) -> list[tuple[str, str]]:
    memory = figures.memory
    return [
        (
            svg.curve(memory.curves, name, _MEMORY_POINTS, look=PlotStyle(log=False)),
            f"{name}: see the table",
        )
        for name in memory.shown
    ]


def memory_page(figures: CellModel) -> str:
    """Returns what the ranks' memory was, as HTML; empty where that is not worth it."""
    pictures = " ".join(image(*one, sized=True) for one in _memory_pictures(figures))
    return pictures + "".join(map(table_html, figures.memory.tables()))


def _legend(figures: CellModel) -> str:
    """Returns which colour is whose; many ranks are drawn as one band and need none."""
    owners = figures.curves.numbers()
    if not 1 < len(owners) <= svg.MANY:
        return ""
    parts = []
    for (rank, member), index in owners.items():
        colour = svg.COLOURS[index % len(svg.COLOURS)]
        mark = "■" if index < len(svg.COLOURS) else "▤"
        name = escape(f"{figures.noun} {rank} {member}".strip())
        parts.append(f'<span style="color: {colour}">{mark}</span> {name}')
    return f"<p>{' &nbsp; '.join(parts)}</p>"


def image(picture: str, words: str, sized: bool = False) -> str:
    """Returns a picture as HTML that needs nothing else, with the words that stand for it.

    Args:
        picture: as SVG.
        words: what it shows.
        sized: whether its place is kept for it before it is drawn.
    """
    data = base64.b64encode(picture.encode()).decode()
    size = " ".join(re.findall(r'\b(?:width|height)="[\d.]+"', picture)[:2]) if sized else ""
    return (
        f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}" {size} '
        'style="display: inline-block; margin: 4px 12px 4px 0">'
    )


def table_html(table: Table) -> str:
    """Returns a table as HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    title = f"<p>{escape(table.title)}</p>" if table.title else ""
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{note}"
