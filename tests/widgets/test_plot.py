"""A chart without scripts and the one on a page show the same: both follow one description."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from allranks.widgets.dashboard import plot, saved_panel
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.plot import PlotStyle, plot_of
from tests.node import node
from tests.widgets.test_stores import hello, log

#: As many as a page has.
COLUMNS = 240


def described(made: CellModel, style: PlotStyle, groups: dict[str, set[int]]) -> dict[str, Any]:
    """The description in Python, in the words of the one in JavaScript."""
    found = plot_of(made.curves, "loss", COLUMNS, "rank", style, groups)
    lines = [
        {
            **{name: getattr(line, name) for name in ("label", "rank", "index", "dash")},
            **{"faint": line.faint, "strong": line.strong, "last": line.points[-1][1]},
            "xs": [x for x, _ in line.points],
            "ys": [y for _, y in line.points],
        }
        for line in found.lines
    ]
    bands = [
        {
            **{name: getattr(band, name) for name in ("label", "index", "dash", "count")},
            "columns": [
                {"x": x, "low": low, "mean": mean, "high": high}
                for x, low, mean, high in band.columns
            ],
        }
        for band in found.bands
    ]
    log = {"x": found.log_x, "y": found.log_y}
    return {"xName": found.x_name, "log": log, "lines": lines, "bands": bands, "marks": found.marks}


def on_a_page(made: CellModel, style: PlotStyle, groups: dict[str, set[int]]) -> dict[str, Any]:
    curves = [
        {**head, "steps": [*series.steps], "values": [*series.values], "last": [*series.last]}
        for head, series in zip(
            made.curves.everything()[0], made.curves.series.values(), strict=True
        )
    ]
    owners = [[f"{r} {member}", at] for (r, member), at in made.curves.numbers().items()]
    counts = [len(who) for who in groups.values()]
    of = [[rank, at] for at, who in enumerate(groups.values()) for rank in who]
    given = {
        "owners": owners,
        "groups": {"labels": [*groups], "counts": counts, "of": of} if groups else None,
        "choice": {
            "noun": "rank",
            "mean": bool(style.mean),
            "smoothing": style.smoothing,
            "selected": style.selected,
            "log": dict(zip("xy", style.log_of("loss"), strict=True)),
            "range": None,
        },
    }
    address = (saved_panel.FRONT / "plot.js").as_uri()
    script = f"""
        const {{ plotOf }} = await import({json.dumps(address)});
        const {{ owners, groups, choice }} = {json.dumps(given)};
        const name = "by", of = groups ? {{ ...groups, name, of: new Map(groups.of) }} : null;
        const all = {{ ...choice, owners: new Map(owners), groups: of }};
        console.log(JSON.stringify(plotOf("loss", {json.dumps(curves)}, all)));
    """
    found = json.loads(node("--input-type=module", "--eval", script))
    for band in found["bands"]:
        band["label"] = band["label"].removeprefix("by=")
        del band["last"]  # which only a page writes
    return {name: found[name] for name in ("xName", "log", "lines", "bands", "marks")}


def rounded(value: Any) -> Any:
    # Both add up numbers in their own order.
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return value if isinstance(value, bool | str) else f"{value:.9g}"


@pytest.mark.parametrize(
    ("style", "groups"),
    [
        (PlotStyle(log=False, mean=False, selected=9), {}),
        (PlotStyle(log=False, mean=True, smoothing=0.6), {}),
        (PlotStyle(log=False, mean=True, selected=1), {"even": {0, 2, 4}, "odd": {1, 3, 5}}),
        (PlotStyle(log=True, mean=False, axes={"loss": {"x": False, "y": False}}), {}),
    ],
    ids=["curves", "a mean", "groups", "axes of one metric"],
)
def test_both_descriptions_of_a_chart_are_the_same(style, groups):
    made = CellModel([hello(rank) for rank in range(12)])
    for rank in range(12):
        log(made, rank, "loss", [(i, math.exp(-i / 9) + rank) for i in range(50)])
    assert rounded(described(made, style, groups)) == rounded(on_a_page(made, style, groups))
    assert plot.MANY == 16


def test_a_value_that_is_no_number_at_step_0_has_no_mark_on_a_log_scale():
    made = CellModel([hello(0)])
    log(made, 0, "loss", [(0, math.nan), *((i, 1 / i) for i in range(1, 50))])
    for log_x, marks in ((False, [0]), (True, [])):
        style = PlotStyle(axes={"loss": {"x": log_x}})
        assert plot_of(made.curves, "loss", COLUMNS, "rank", style, {}).marks == marks
        assert saved_panel.bundle(made, style)["text/html"]


def test_a_page_may_say_anything_about_axes_and_steps():
    for axes, steps in ((7, 7), ({"loss": 7}, [3]), ({"loss": {"x": "yes"}}, [5, 1])):
        style = PlotStyle.of({"axes": axes, "steps": steps})
        assert style.steps is None
        assert style.log_of("loss")[1] is False
    assert PlotStyle.of({"steps": [3, 9.5]}).steps == (3, 9.5)
    chosen = PlotStyle.of({"axes": {"loss": {"x": True}, "accuracy": {"y": True}}})
    assert chosen.log_of("loss") == (True, False)
    assert chosen.log_of("accuracy") == (False, True)
