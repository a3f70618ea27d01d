"""``runs.plot``: lines of members, and of groups of them."""

import base64
import re
from array import array
from xml.etree import ElementTree

import pytest

from allranks.errors import UsageError
from allranks.features.ensemble.member import Member
from allranks.features.ensemble.runs import Runs


@pytest.fixture
def runs():
    """Two seeds of two rates; what they log ends at 10 times the rate, and at one more."""
    members = []
    for number, (lr, seed) in enumerate((lr, seed) for lr in (0.3, 0.1) for seed in (0, 1)):
        member = Member(number, {"lr": lr, "seed": seed})
        member.log("loss", array("d", [0, 1]), array("d", [5, 10 * lr + seed]))
        members.append(member)
    return Runs(members)


def test_members_with_the_same_value_are_one_line_their_mean_as_far_as_they_came(runs):
    lines = [line.split() for line in repr(runs.plot("loss", by="lr")).splitlines()]
    assert lines == [
        ["loss", "members", "step", "last"],
        ["lr=0.1", "2", "1", "1.5"],
        ["lr=0.3", "2", "1", "3.5"],
    ]
    runs[0].log("loss", array("d", [2]), array("d", [100]))
    assert repr(runs.plot("loss", by="lr")).splitlines()[2].split() == ["lr=0.3", "2", "1", "3.5"]


def test_a_plot_has_a_line_a_member_and_shows_the_metric_where_nothing_else_is_said(runs):
    plot = runs.plot()
    assert [line.split()[:2] for line in repr(plot).splitlines()[1:]] == [
        ["member", str(number)] for number in range(4)
    ]
    assert "data:image/svg+xml;base64," in plot._repr_html_()


def test_a_line_leads_from_the_parameters_of_each_member_to_its_metric(runs):
    for member in runs:
        member.values["kind"] = "even" if member.values["seed"] == 0 else "odd"
        member.values["same"] = 1
    html = runs.parallel("loss")._repr_html_()
    (data,) = re.findall(r"base64,([^\"]+)", html)
    drawn = ElementTree.fromstring(base64.b64decode(data))
    tags = {tag: [one for one in drawn.iter() if one.tag.endswith(tag)] for tag in ("text", "line")}
    texts = [one.text for one in tags["text"]]
    for name in ("lr", "seed", "kind", "loss", "0.1", "0.3", "even", "odd"):
        assert name in texts
    assert "same" not in texts
    lines = [one.get("points", "").split() for one in tags["line"]]
    assert [len(points) for points in lines] == [4, 4, 4, 4]
    ends = [float(points[-1].partition(",")[2]) for points in lines]
    # The best is the last, above the others, and its loss is the lowest of all: at the foot.
    assert ends == sorted(ends)
    assert tags["line"][-1].get("stroke") == "#101010"
    with pytest.raises(UsageError, match="found none"):
        runs.parallel("accuracy")


def texts_of(picture):
    (data,) = re.findall(r"base64,([^\"]+)", picture._repr_html_())
    drawn = ElementTree.fromstring(base64.b64decode(data))
    return [one for one in drawn.iter() if one.tag.endswith("text")]


def test_the_labels_of_an_axis_are_short_and_have_their_exponents(runs):
    for member, number in zip(runs, (7.88860905221e-31, 1.46412936, 3.2e-14, 3e-14), strict=True):
        member.numbers["error"] = number
        member.values["kind"] = f"{member.number} a long word"
    texts = [one.text for one in texts_of(runs.parallel("error"))]
    assert {"7.889e-31", "1.464", "3e-14", "0 a long w…"} < set(texts)
    assert "3.2e-14" not in texts  # it would overlap


@pytest.mark.parametrize(
    ("arguments", "said"), [(("accuracy",), "they logged loss"), (("loss", "units"), "lr, seed")]
)
def test_what_is_not_there_is_said_with_what_is(runs, arguments, said):
    with pytest.raises(UsageError, match=said):
        runs.plot(*arguments)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, 3),
        (0.1, 0.1),
        (True, "True"),
        (float("nan"), "nan"),
        (2**60, str(2**60)),
        ((1,), "(1,)"),
    ],
)
def test_a_table_has_numbers_where_a_page_can_hold_them_and_words_elsewhere(value, shown):
    row = Runs([]).row(Member(0, {"x": value}), None)
    assert row.parameters == {"x": shown}
