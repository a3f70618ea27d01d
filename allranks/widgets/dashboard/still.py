"""The still picture that a live view leaves: a mime bundle without scripts or widgets.

Where a notebook is not trusted, ``<svg>`` and ``<style>`` are taken out; pictures as data and
``style=`` on an element stay.
"""

from __future__ import annotations

import base64
import re
from html import escape

from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.look import AS_IT_FALLS, Look
from allranks.widgets.dashboard.strip_svg import strips
from allranks.widgets.dashboard.tables import Table, straggler, summary, tables, text

#: All pictures of a cell together; with tables, text and what the live view needs a cell stays
#: below 200 kB.
_PICTURES_NBYTES = 50_000
_METRICS = 12
_MEMORY_POINTS = 60
_POINT_NBYTES = 12 * 4 / 3


def bundle(figures: Figures, look: Look = AS_IT_FALLS) -> dict[str, str]:
    """Returns text/html and text/plain of what a cell has shown.

    Args:
        figures: what its ranks have told.
        look: how curves are drawn.
    """
    return {"text/html": page(figures, look), "text/plain": text(figures)}


def page(figures: Figures, look: Look = AS_IT_FALLS) -> str:
    """Returns the still picture as HTML."""
    body = f"<p><b>{escape(summary(figures))}</b></p>"
    body += images(figures, look)
    if figures.timings and straggler(figures.timings):
        body += f"<p>{escape(straggler(figures.timings))}</p>"
    found = tables(figures)
    if found:
        inside = "".join(table_html(table) for table in found)
        body += f"<details><summary>values and timings as tables</summary>{inside}</details>"
    return f'<div class="allranks-still">{body}</div>'


def images(figures: Figures, look: Look) -> str:
    """Returns the curves and bars as pictures, and whose colour is which."""
    found = [image(picture, words) for picture, words in _pictures(figures, look)]
    return _legend(figures) + f"<div>{' '.join(found)}</div>" if found else ""


def _pictures(figures: Figures, look: Look) -> list[tuple[str, str]]:
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


def _time_pictures(figures: Figures) -> list[tuple[str, str]]:
    found = _memory_pictures(figures)
    if figures.strips:
        found.append((strips(figures.strips.by_rank()), "each rank's time: see the table"))
    return found


def _memory_pictures(figures: Figures) -> list[tuple[str, str]]:
    memory = figures.memory
    return [
        (
            svg.curve(memory.curves, name, _MEMORY_POINTS, look=Look(log=False)),
            f"{name}: see the table",
        )
        for name in memory.shown
    ]


def memory_page(figures: Figures) -> str:
    """Returns what the ranks' memory was, as HTML; empty where that is not worth it."""
    pictures = " ".join(image(*one, sized=True) for one in _memory_pictures(figures))
    return pictures + "".join(map(table_html, figures.memory.tables()))


def _legend(figures: Figures) -> str:
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
