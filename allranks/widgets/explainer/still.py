"""What an explainer leaves in the notebook: a picture, the messages as a table, and text."""

from __future__ import annotations

from html import escape

from allranks.records.explained import Explained
from allranks.widgets.dashboard.still import image, table_html
from allranks.widgets.explainer.frames import Frame
from allranks.widgets.explainer.picture import film, legend
from allranks.widgets.explainer.text import cost, steps, text, title


def bundle(told: Explained, frames: list[Frame], place: str) -> dict[str, str]:
    """Returns text/html, without scripts or widgets, and text/plain.

    Args:
        told: what was run.
        frames: its frames.
        place: the class of the element that a live player takes the place of.
    """
    words = f"{title(told)}, round by round: see the table"
    body = f"<p><b>{escape(title(told))}</b><br>{escape(cost(told))}</p>"
    body += f"<div>{image(film(frames), words)}</div>{legend()}"
    table = table_html(steps(frames))
    body += f"<details><summary>every message as a table</summary>{table}</details>"
    html = f'<div class="allranks-still {place}">{body}</div>'
    return {"text/html": html, "text/plain": text(told, frames)}
