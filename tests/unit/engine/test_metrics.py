"""What ``log()`` takes, what the wire is given, and what is said of values that are no numbers."""

import re
from array import array

import numpy as np
import pytest

from allranks.engine.telemetry import Metrics
from allranks.errors import UsageError


def taken(metrics: Metrics) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The points of each name and member."""
    series, payload = metrics.take()
    pairs, at, found = array("d", payload), 0, {}
    for name, member, count in series:
        part = pairs[at : at + 2 * count]
        found[name, member] = list(zip(part[::2], part[1::2], strict=True))
        at += 2 * count
    assert at == len(pairs)
    return found


def test_values_are_taken_once_by_name_and_member_and_steps_count_themselves():
    metrics = Metrics()
    metrics.log(step=3, loss=0.5, accuracy=1)
    metrics.log({"val/loss": 2.0}, step=4, loss=0.25)
    assert taken(metrics) == {
        ("loss", ""): [(3, 0.5), (4, 0.25)],
        ("accuracy", ""): [(3, 1)],
        ("val/loss", ""): [(4, 2)],
    }
    assert taken(metrics) == {}
    metrics = Metrics()
    metrics.log(a=1)
    metrics.log(a=2, b=3)
    metrics.log(step=10, a=4)
    metrics.log(a=5)
    assert taken(metrics) == {("a", ""): [(0, 1), (1, 2), (10, 4), (11, 5)], ("b", ""): [(0, 3)]}
    metrics = Metrics()
    for member in (0, "wide"):
        metrics.log(member=member, loss=1.0)
    assert taken(metrics) == {("loss", "0"): [(0, 1)], ("loss", "wide"): [(0, 1)]}


@pytest.mark.parametrize(
    "value", [np.float32(2), np.ones((1, 1)) * 2, np.int64(2), "2", 2, True + 1]
)
def test_whatever_is_one_number_is_taken(value):
    metrics = Metrics()
    metrics.log(x=value)
    assert taken(metrics) == {("x", ""): [(0, 2)]}


def test_no_number_is_refused_with_what_it_is():
    with pytest.raises(UsageError, match=r"log\(loss=…\) expected one number, found ndarray of sh"):
        Metrics().log(loss=np.ones(3))
    with pytest.raises(UsageError, match="found 'much'"):
        Metrics().log(loss="much")
    with pytest.raises(UsageError, match=r"log\(step=…\) expected one number, found 'a'"):
        Metrics().log(step="a", loss=0.5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("loss", 3), "found 'loss', 3. Type for example: log(loss=3)"),
        (("val/loss", 0.5), "log({'val/loss': 0.5})"),
        (("loss", np.ones(3)), "Type for example: log(loss=value)"),
        ((0.5,), "found 0.5. Type for example: log(loss=0.5), or log({'val/loss': 0.5})"),
        ((1, 2, 3), "found 1, 2, 3. Type for example: log(loss=0.5)"),
    ],
)
def test_numbers_without_names_are_refused_with_the_call_that_was_meant(values, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Metrics().log(*values)


def test_what_comes_too_fast_is_counted():
    metrics = Metrics()
    for _ in range(60_000):
        metrics.log(x=1.0)
    kept = len(taken(metrics)["x", ""])
    assert (kept, metrics.dropped) == (50_000, 10_000)
    metrics.begin()
    assert metrics.dropped == 0


@pytest.mark.parametrize("step", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_step_is_finite_because_it_is_a_place_on_an_axis(step):
    with pytest.raises(UsageError, match="log expected a finite step, found"):
        Metrics().log(step=step, loss=1.0)


def test_a_number_that_no_float_can_hold_is_refused():
    with pytest.raises(UsageError, match="expected one number, found 1000"):
        Metrics().log(loss=10**400)
