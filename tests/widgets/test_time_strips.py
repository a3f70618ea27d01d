"""Each rank's time: every second of a cell is counted once, whatever calls it made."""

from __future__ import annotations

import base64
import json
import re
from array import array
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.collectives.timings import BINS, Spans
from allranks.records.telemetry import Strip
from allranks.records.wire import decode, encode
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.saved_panel import bundle
from allranks.widgets.dashboard.tables import strip_tables
from allranks.widgets.dashboard.timings import START_UP, TRANSFER, WAITING, Strips
from tests.widgets.test_stores import hello

SECONDS = st.floats(0, 3)
#: One after the other: computing, waiting, transfer, and the rank that came last.
CALLS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.integers(-1, 3)), max_size=60)


def told(spans: Spans, seconds: float, steps=(), rank=0) -> tuple[Strip, list[bytes]]:
    """What a rank sends of its spans, after a way over the wire."""
    waits = tuple([whom, sum(row)] for whom, row in spans.waits.items())
    bins = spans.used(seconds)
    strip = Strip(rank, 1, seconds, spans.width, (), waits, sum(spans.transfer), tuple(steps))
    return decode(encode(strip, spans.shares(bins), spans.waited_for(bins)))


def made(calls, origin=100.0) -> tuple[Spans, float]:
    spans, now = Spans(origin), origin
    for computing, wait, transfer, whom in calls:
        now += computing + wait + transfer
        spans.call(now, wait, transfer, whom)
    return spans, now - origin


@given(CALLS)
def test_every_second_of_waiting_and_transfer_lies_in_a_bin(calls):
    spans, seconds = made(calls)
    assert sum(spans.transfer) == pytest.approx(sum(call[2] for call in calls), abs=1e-6)
    for whom in spans.waits:
        expected = sum(wait for _, wait, _, last in calls if last == whom)
        assert sum(spans.waits[whom]) == pytest.approx(expected, abs=1e-6)
    assert spans.used(seconds) <= BINS


@given(CALLS, st.floats(0, 5), st.floats(0.1, 1000))
def test_the_kinds_of_a_rank_sum_up_to_its_time(calls, first_step_at, rest):
    spans, seconds = made(calls)
    seconds += rest
    strips = Strips()
    strips.take(*told(spans, seconds, (0, first_step_at, 9, seconds)))
    (time,) = strips.by_rank()
    assert sum(time.sums) == pytest.approx(seconds, rel=0.01)
    # A share of a bin is told as one of 256.
    assert time.sums[WAITING] == pytest.approx(sum(c[1] for c in calls), abs=seconds / 128)
    assert time.sums[TRANSFER] == pytest.approx(sum(c[2] for c in calls), abs=seconds / 128)
    assert time.sums[START_UP] <= first_step_at + 1e-6


def test_calls_of_many_threads_at_once_take_no_more_time_than_there_is():
    spans = Spans(0.0)
    for _ in range(8):
        spans.call(1.0, 0.5, 0.5, 2)
    strips = Strips()
    strips.take(*told(spans, 1.0))
    assert sum(strips.by_rank()[0].sums) == pytest.approx(1.0, rel=0.01)


def test_a_wait_is_drawn_with_the_rank_that_was_waited_for():
    figures = CellModel([hello(rank) for rank in range(2)])
    for rank, last in ((0, 1), (1, 1)):
        spans = Spans(0.0)
        spans.call(2.0, 1.0 if rank != last else 0.0, 0.5, last)
        figures.take(*told(spans, 2.0, rank=rank))
    shown = bundle(figures)
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown["text/html"])
    drawn = ElementTree.fromstring(base64.b64decode(data))
    texts = [*drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text.text for text in texts].count("1") == 1
    assert "waits for rank 1 1 s" in shown["text/plain"]
    # Each part begins at its second of the axis, and is as wide as it is long.
    zero, one = (float(text.get("x")) for text in texts if text.text in ("0 s", "1 s"))
    boxes = re.findall(rb'd="M(\S+) \S+h([\d.]+)v', base64.b64decode(data))
    parts = [((float(x) - zero) / (one - zero), float(width) / (one - zero)) for x, width in boxes]
    assert parts == [(0, 0.5), (0.5, 1), (1.5, 0.5), (0, 1.5), (1.5, 0.5)]


def test_a_steps_time_is_that_between_the_first_and_the_last_that_were_logged():
    spans = Spans(0.0)
    for step in range(11):  # a second before the first one, then 0.2 s each, half of it waiting
        spans.call(1.0 + 0.2 * step, 0.1, 0.0, 1)
    strips = Strips()
    strips.take(*told(spans, 3.0, (0, 1.0, 10, 3.0)))
    (step,) = strips.steps()
    assert sum(step.each) == pytest.approx(0.2, rel=0.02)
    assert step.each[WAITING] == pytest.approx(0.1, rel=0.02)
    (_, table) = strip_tables(strips)
    assert table.rows == [["rank 0", "200 ms", "100 ms", "100 ms"]]


@pytest.mark.parametrize("ranks", [1, 16, 64, 300])
def test_the_strips_of_many_ranks_stay_small_for_a_page_and_in_a_notebook(ranks):
    figures = CellModel([hello(rank) for rank in range(ranks)])
    for different in range(min(ranks, 10)):
        spans = Spans(0.0)
        for step in range(400):
            share = (step * 7 + different * 3) % 10 / 100
            spans.call(0.1 * (step + 1), share, 0.09 - share, step % 5)
        for rank in range(different, ranks, 10):
            record, payloads = told(spans, 40.0, rank=rank)
            figures.take(record, payloads)
            assert sum(map(len, payloads)) <= 5 * BINS
    assert len(bundle(figures)["text/html"]) < 200_000
    page = figures.strips.news()
    assert len(page["rows"]) == min(ranks, 128)
    assert len(page["bins"]) <= 4096 * 5 * 4 / 3 + 4
    assert figures.strips.bins * min(ranks, 128) <= 4096
    assert len(json.dumps(page)) < 60_000


def live(spans: Spans, seconds: float, each: int, since: list[float]) -> tuple[Strip, list[bytes]]:
    """What a rank tells while it runs: the bins that have changed."""
    bins, first = spans.used(seconds), 0
    if spans.width == since[0]:
        first = int(max(0.0, spans.changed_at - spans.origin) / spans.width) // each
    since[0] = spans.width
    spans.changed_at = spans.origin + seconds
    strip = Strip(0, 1, seconds, spans.width * each, (), (), 0.0, (), first)
    place = bins, first * each, each
    return decode(encode(strip, spans.shares(*place), spans.waited_for(*place)))


@given(CALLS, st.sampled_from((1, 4)))
def test_what_is_told_piece_by_piece_is_the_same_as_all_of_it_at_the_end(calls, each):
    spans, now, piecewise, since = Spans(100.0), 100.0, Strips(), [0.0]
    for computing, wait, transfer, whom in calls:
        now += computing + wait + transfer
        spans.call(now, wait, transfer, whom)
        piecewise.take(*live(spans, now - 100.0, each, since))
    now += 1.0
    piecewise.take(*live(spans, now - 100.0, each, since))
    whole = Strips()
    spans.changed_at = 100.0
    whole.take(*live(spans, now - 100.0, each, [0.0]))
    assert piecewise.by_rank() == whole.by_rank()
    assert piecewise.everything() == whole.everything()
    # A page that has been told once is told what is new.
    assert piecewise.news()["rows"][0][1] == 0
    assert not piecewise.changed


def test_a_wait_that_goes_on_is_counted_while_it_does():
    spans = Spans(0.0)
    spans.call(1.0, 0.0, 0.0, 1)
    with spans.waiting(1.0, 3.0, 2):
        bins = spans.used(3.0)
        assert sum(spans.shares(bins)[bins : 2 * bins]) / 255 * spans.width == pytest.approx(
            2, 0.02
        )
        assert array("h", spans.waited_for(bins))[bins - 2] == 2
    assert spans.changed_at <= 1.0
    assert not any(spans.shares(bins))


def test_whom_a_rank_waited_for_most_stands_in_each_bin():
    spans = Spans(0.0)
    spans.call(0.5, 0.5, 0.0, 3)
    spans.call(1.0, 0.4, 0.0, 1)
    whom = array("h", spans.waited_for(spans.used(1.0)))
    assert [whom[0], whom[spans.used(0.55) - 1], whom[spans.used(0.9) - 1]] == [3, -1, 1]
