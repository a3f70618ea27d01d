"""The output that stays when a cell has ended: its picture, and where scripts run the view itself.

The view's own scripts and what it shows stand packed beside the picture, in a script: what takes
scripts out, as GitHub and a notebook that is not trusted, leaves the picture.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import TYPE_CHECKING, Any

from allranks.widgets.dashboard.curves import Curves
from allranks.widgets.dashboard.logs import Logs
from allranks.widgets.dashboard.svg import thin

if TYPE_CHECKING:
    from allranks.widgets.dashboard.live import Live

#: What the view shows, packed; with its scripts and the picture a cell stays below 200 kB.
_STATE_NBYTES = 44_000
#: All curves together, at first; fewer where that is too much.
_POINTS = 12_000
#: Of all logs together; the files have the rest.
_LOGS_NBYTES = 40_000
_DIGITS = 7


def alive(picture: dict[str, str], live: Live) -> dict[str, str]:
    """Returns a picture's bundle with what makes it alive where scripts run.

    Args:
        picture: ``text/html`` and ``text/plain`` without scripts.
        live: the view of the cell, which has ended.
    """
    state = _fitting(live)
    if not state:
        return picture
    loader, code, styles = _front()
    script = f'{loader}("{live.key}", ["{state}", "{code}", "{styles}"]);'
    html = f"{picture['text/html']}<script>{script}</script>"
    # What is chosen later a page writes beside the key, where it can: see front/chosen.js.
    return {**picture, "text/html": f'<div data-allranks="{live.key}">{html}</div>'}


@cache
def _front() -> tuple[str, str, str]:
    """Returns what begins the script, and what it needs, packed: the view's scripts and styles."""
    from allranks.widgets.dashboard.widget import CSS, ESM, FRONT

    loader = (FRONT / "loader.js").read_text("utf-8").strip().removesuffix(";")
    return loader, _packed(ESM), _packed(CSS)


def _packed(text: str) -> str:
    # Without a time in it: the same is the same, and a notebook's versions differ by less.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _fitting(live: Live) -> str:
    """Returns the state packed, with the points that there is room for; empty if there is none."""
    state = {**live.snapshot(), "points": None, "paths": {}}
    # Who reads a notebook need not know on whose machine it ran.
    state["ranks"] = [{**tile, "host": "", "pid": 0} for tile in state["ranks"]]
    curves = live.figures.curves
    state["apart"] = [name for name in curves.names if not curves.coinciding(name)]
    state["logs"] = _logs(live.logs) if live.with_logs else []
    packed = _packed(_json({**state, "curves": []}))
    if len(packed) > _STATE_NBYTES:
        return ""
    most = _POINTS // max(1, len(curves.series))
    while most > 1:
        state["curves"] = _curves(curves, most)
        packed = _packed(_json(state))
        if len(packed) <= _STATE_NBYTES:
            return packed
        most = most * 3 // 4
    return ""


def _json(state: dict[str, Any]) -> str:
    """Returns what a page can read: JSON knows no NaN, which a member's metric may be."""
    finite = json.loads(json.dumps(state), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"))


def _curves(curves: Curves, most: int) -> list[dict[str, Any]]:
    heads, _ = curves.everything()
    told = []
    for head, series in zip(heads, curves.series.values(), strict=True):
        points = thin([*zip(series.steps, series.values, strict=True), series.last], most)
        steps, values = zip(*points, strict=True)
        numbers = [float(f"{value:.{_DIGITS}g}") for value in values]
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
