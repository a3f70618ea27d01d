"""What an ensemble shows: its rows, and the table and curves that stay."""

from __future__ import annotations

import base64
import json
import random
import re

import pytest

from allranks.features.ensemble.view import (
    MemberRow,
    MemberTable,
    best_of,
    bundle,
    by,
    ordered,
    table_html,
)
from allranks.widgets.dashboard.cell_model import CellModel, Logs
from allranks.widgets.dashboard.plot import PlotStyle
from allranks.widgets.dashboard.tables import Table, seconds_like
from allranks.widgets.dashboard.view import LivePanel
from tests.widgets.test_saved_panel import ended, packed
from tests.widgets.test_stores import hello, log


def row(number, state="finished", metric=0.5, error="", **parameters):
    parameters = parameters or {"lr": number / 10, "how": "fast"}
    return MemberRow(number, "", state, 1, metric, 1.5, error, parameters)


def drawn(members: MemberTable, curves: int) -> dict[str, str]:
    """What stays of an ensemble of which as many members have logged a loss."""
    figures = CellModel([hello(0)], members)
    for number in range(curves):
        log(figures, number, "loss", [(0, 3.0), (1, float(number))])
    figures.end()
    return bundle(figures)


def test_news_hold_what_has_changed_and_no_more():
    members = MemberTable()
    members.put(row(0))
    members.put(row(1, "running", None))
    assert [one["number"] for one in members.news()["rows"]] == [0, 1]
    members.put(row(1, "running", None))
    assert members.news() is None
    members.put(row(1, "running", 0.3))
    (told,) = members.news()["rows"]
    assert (told["number"], told["metric"]) == (1, 0.3)
    assert told["seconds"] >= 0
    members.said = "1 of 2 finished"
    assert members.news()["rows"] == []
    assert len(members.everything()["rows"]) == 2


@pytest.mark.parametrize(("lower", "best"), [(True, 2), (False, 1)])
def test_the_best_is_a_finished_one_with_a_number(lower, best):
    metrics = (0.9, 0.2, None, float("nan"))
    rows = [row(0, "failed", 0.0), *(row(number, metric=m) for number, m in enumerate(metrics, 1))]
    assert best_of(rows, lower).number == best


def test_the_picture_that_stays_has_curves_rows_and_errors_and_no_script():
    members = MemberTable()
    members.metric, members.said = "loss", "1 of 2 finished, 1 failed"
    members.put(row(0))
    members.put(row(1, "failed", None, "ValueError: <b>no</b>\nmore"))
    made = drawn(members, 2)
    assert set(made) == {"text/html", "text/plain"}
    assert not re.search("<script|<style|<svg|<b>no", made["text/html"])
    assert "member 1" in made["text/html"]
    assert "data:image/svg+xml;base64," in made["text/html"]
    lines = made["text/plain"].splitlines()
    assert lines[0].startswith("1 of 2 finished, 1 failed, ")
    assert lines[1].split() == ["member", "lr", "how", "state", "rank", "loss", "time", "error"]
    assert re.search(r"0 +0 +fast +finished +1 +0.5 ★ +1.50 s$", lines[2])
    assert re.search(r"1 +0.1 +fast +failed .*ValueError: <b>no</b>$", lines[3])
    assert lines[4] == "  ★ the best of those that have finished: the highest loss"


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, [0, 1, 2]),
        ({"sorted": "metric"}, [2, 1, 0]),
        ({"sorted": "metric", "down": True}, [1, 2, 0]),
        ({"sorted": "=lr", "down": True}, [2, 1, 0]),
        ({"sorted": "no such column"}, [0, 1, 2]),
    ],
)
def test_the_picture_has_members_in_the_order_that_was_chosen(settings, order):
    rows = [row(0, metric=None), row(1, metric=0.9), row(2, metric=0.2)]
    assert [row.number for row in ordered(rows, PlotStyle.of(settings))] == order


def test_durations_of_a_column_have_one_unit():
    for longest, durations in {
        80: {0.4: "0 min 00 s", 59.7: "1 min 00 s", 80: "1 min 20 s"},
        12.5: {0.04: "0.0 s", 12.5: "12.5 s"},
        0.1: {0.001: "1 ms", 0.1: "100 ms"},
    }.items():
        assert {one: seconds_like(one, longest) for one in durations} == durations


def test_many_members_stay_below_200_kilobytes_and_are_counted():
    members = MemberTable()
    figures = CellModel([hello(0)], members)
    for number in range(1000):
        members.put(row(number))
        log(figures, number, "loss", [(i, float(i)) for i in range(50)])
    figures.end()
    made = LivePanel(figures, Logs([]), "auto").saved(bundle(figures))
    assert sum(len(part.encode()) for part in made.values()) < 200_000
    assert "800 more members are not in this table" in made["text/html"]
    assert "960 more members are not in this table" in made["text/plain"]


def test_a_member_that_begins_anew_begins_its_curve_anew():
    figures = CellModel([hello(0)], MemberTable())
    log(figures, 3, "loss", [(0, 5.0), (1, 5.0)])
    figures.curves.news()
    figures.curves.forget(3)
    log(figures, 3, "loss", [(0, 6.0), (1, 6.0)])
    (series,) = figures.curves.series.values()
    assert list(series.values) == [6.0, 6.0]


def test_numbers_stand_to_the_right_and_words_to_the_left():
    html = table_html([row(0)], "error", True)
    left = {
        name for side, name in re.findall(r"text-align: (\w+)\">(\w+)</th>", html) if side == "left"
    }
    assert left == {"how", "state"}
    text = Table("", ["n", "word"], [["1", "a"], ["20", "bb"]], words=(1,)).text()
    assert text.splitlines() == ["   n  word", "   1  a", "  20  bb"]


def test_many_members_leave_a_band_for_each_value_of_a_parameter():
    members = MemberTable()
    for number in range(24):
        members.put(row(number, same=1, lr=(0.1, 0.3, 1.0)[number % 3], seed=number // 3))
        if number == 15:
            assert "lr=" not in drawn(members, 16)["text/html"]
    html = drawn(members, 24)["text/html"]
    groups = re.findall(r"</span> (lr=[0-9.]+ \(\d+\))", html)
    assert groups == ["lr=0.1 (8)", "lr=0.3 (8)", "lr=1 (8)"]
    found = re.findall(r"base64,([^\"]+)", html)
    picture, lines = (base64.b64decode(data).decode() for data in found)
    assert lines.count("<polyline") == 24
    assert picture.count("<polygon") == picture.count("<polyline") == 3
    assert "mean, minimum and maximum of 3 groups of curves" in picture


def test_many_different_numbers_are_cut_into_parts_and_words_stay_in_their_order():
    rows = [row(n, x=0.5 * n, w="ba"[n % 2]) for n in range(12)]
    assert by(rows, "x") == {
        "x=0 to 1": [0, 1, 2],
        "x=1.5 to 2.5": [3, 4, 5],
        "x=3 to 4": [6, 7, 8],
        "x=4.5 to 5.5": [9, 10, 11],
    }
    assert list(by(rows, "w")) == ["w=b", "w=a"]
    assert by(rows, "none") == {}


def test_as_many_members_as_there_may_be_are_compared_once_each():
    class Counted(float):
        compared = 0
        __hash__ = float.__hash__

        def __eq__(self, other):
            Counted.compared += 1
            return float.__eq__(self, other)

    rows = [row(n, x=Counted(0.5 * n)) for n in range(2000)]
    assert sum(map(len, by(rows, "x").values())) == 2000
    assert Counted.compared < 10 * 2000


@pytest.mark.parametrize("count", [500, 2000])
def test_of_many_members_the_best_stay_with_their_curves(count):
    numbers, members = random.Random(0), MemberTable()
    members.metric, members.lower = "loss", True
    made = CellModel([hello(0)], members)
    losses = [numbers.random() for _ in range(count)]
    for number, loss in enumerate(losses):
        rate = {"rate": numbers.random()}
        members.put(MemberRow(number, "", "finished", 0, loss, numbers.random(), "", rate))
        log(made, number, "loss", [(0, 1.0), (1, loss)])
    members.put(MemberRow(count, "", "failed", 0, None, 0.1, "no", {"rate": 0.5}))
    state = json.loads(packed(ended(made)[1]["text/html"])[0])
    rows = state["members"]["rows"]
    assert len(rows) + state["members"]["missing"] == count + 1
    assert len(rows) > 200
    numbers_of_rows = {row["number"] for row in rows}
    assert numbers_of_rows >= {losses.index(loss) for loss in sorted(losses)[:200]}
    assert {curve["rank"] for curve in state["curves"]} <= numbers_of_rows
    assert len(state["curves"]) > 200
