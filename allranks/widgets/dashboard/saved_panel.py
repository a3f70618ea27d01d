"""The output that stays when a cell has ended: its picture, and where scripts run the view itself.

The view's own scripts and what it shows stand packed beside the picture, in a script: what takes
scripts out, as GitHub and a notebook that is not trusted, leaves the picture.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Set
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
#: Of an ensemble at most so many members, the best ones; fewer where that is too much.
_MEMBERS = 2000
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
    # What is chosen later a page writes beside the key, where it can: see front/data.js.
    return {**picture, "text/html": f'<div data-allranks="{live.key}">{html}</div>'}


@cache
def _front() -> tuple[str, str, str]:
    """Returns what begins the script, and what it needs, packed: the view's scripts and styles."""
    from allranks.widgets.page_widgets import CSS, ESM, FRONT

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
    if live.figures.members is None:
        return _with_curves(state, curves)
    members, count = state["members"], min(_MEMBERS, len(state["members"]["rows"]))
    best = sorted(map(_short, members["rows"]), key=_order(members["lower"]))
    while True:
        rows = sorted(best[:count], key=lambda row: row["number"])
        state["members"] = {**members, "rows": rows, "missing": len(best) - count}
        packed = _with_curves(state, curves, {row["number"] for row in rows})
        if packed or count <= 1:
            return packed
        count //= 2


def _with_curves(state: dict[str, Any], curves: Curves, whose: Set[int] | None = None) -> str:
    """Returns the state packed, with as many points as there is room for; empty if for none.

    Args:
        state: what stands beside the curves.
        curves: all curves.
        whose: the ranks or members whose curves are kept; None for all.
    """
    packed = _packed(_json({**state, "curves": []}))
    if len(packed) > _STATE_NBYTES:
        return ""
    most = _POINTS // max(1, len(curves.series if whose is None else whose))
    while most > 1:
        state["curves"] = _curves(curves, most, whose)
        packed = _packed(_json(state))
        if len(packed) <= _STATE_NBYTES:
            return packed
        most = most * 3 // 4
    return ""


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a member's row with fewer digits, and without what a page does not show."""
    parameters = {name: _rounded(value) for name, value in row["parameters"].items()}
    numbers = {name: _rounded(row[name]) for name in ("metric", "seconds")}
    return {**row, **numbers, "parameters": parameters, "values": ""}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _order(lower: bool) -> Callable[[dict[str, Any]], tuple[bool, float]]:
    """Returns by what members are sorted, the best first and those without a metric last."""

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        metric = row["metric"]
        if metric is None or not math.isfinite(metric):
            return True, 0.0
        return False, metric if lower else -metric

    return place


def _json(state: dict[str, Any]) -> str:
    """Returns what a page can read: JSON knows no NaN, which a member's metric may be."""
    finite = json.loads(json.dumps(state), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"))


def _curves(curves: Curves, most: int, whose: Set[int] | None) -> list[dict[str, Any]]:
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
