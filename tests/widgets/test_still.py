"""The still picture and the tables: what a reader without a kernel, a browser or eyes has."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.records.config import size_text
from allranks.records.telemetry import Timings
from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.saved_panel import bundle, text
from allranks.widgets.dashboard.tables import gbps, labels, number, seconds
from allranks.widgets.dashboard.timings import RankRow
from tests.widgets.test_stores import hello, log, totals


def figures(ranks: int, names: list[str], count: int) -> CellModel:
    made = CellModel([hello(rank) for rank in range(ranks)])
    for rank in range(ranks):
        for name in names:
            values = [(i, math.exp(-i / 99) + rank + 1) for i in range(count)]
            log(made, rank, name, values)
        made.take(Timings(rank, 1, (totals(50, 0.5 * rank, 0.1, {0: (50, 0.5 * rank)}),)), [])
        made.tiles.left(rank, "ok")
    made.end()
    return made


def images(html: str) -> list[ElementTree.Element]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    return [ElementTree.fromstring(base64.b64decode(data)) for data in found]


def test_a_still_picture_is_drawn_without_scripts_styles_or_widgets():
    made = bundle(figures(4, ["loss", "<b>"], 300))
    assert set(made) == {"text/html", "text/plain"}
    assert not re.search("<script|<style|<svg|widget", made["text/html"])
    drawn = images(made["text/html"])
    assert [len(image.findall("{*}polyline")) for image in drawn] == [4, 4, 0]
    assert len(drawn[2].findall("{*}rect")) == 1 + 2 + 2 * 4  # paper, key, bars


@pytest.mark.parametrize(("ranks", "metrics"), [(1, 1), (16, 40), (64, 12)])
def test_a_still_picture_stays_below_200_kilobytes(ranks, metrics):
    made = bundle(figures(ranks, [f"metric {i}" for i in range(metrics)], 2500))
    assert sum(len(part.encode()) for part in made.values()) < 200_000
    drawn = images(made["text/html"])
    assert len(drawn) == min(metrics, 12) + 1
    # Many ranks are one band.
    shapes = [len(drawn[0].findall(f"{{*}}{shape}")) for shape in ("polygon", "polyline")]
    assert shapes == ([1, 1] if ranks == 64 else [0, ranks])


@pytest.mark.parametrize(
    ("calls", "wait", "transfer", "worth"),
    [(19, 5.0, 5.0, False), (20, 0.4, 0.5, False), (20, 0.6, 0.5, True)],
)
def test_collectives_are_worth_a_panel_when_they_take_their_time(calls, wait, transfer, worth):
    made = CellModel([hello(0)])
    made.take(Timings(0, 1, (totals(calls, wait, transfer, {}),)), [])
    assert made.worth_showing() is worth


def test_the_bars_of_communication_are_parts_of_the_cells_time():
    short = [RankRow(0, 20, 0.1, 0.05)]
    widths = [
        [float(rect.get("width")) for rect in ElementTree.fromstring(drawn).findall("{*}rect")[-2:]]
        for drawn in (svg.bars(short, 30.0), svg.bars(short, 0.15), svg.bars(short, 0.1))
    ]
    room = sum(widths[1])
    assert widths[0] == pytest.approx([room / 300, room / 600], abs=0.1)
    # Calls of several threads may take longer than the cell.
    assert widths[2] == widths[1]
    assert ">of a cell of 30 s<" in svg.bars(short, 30.0)


def test_the_text_names_values_and_the_straggler():
    said = text(figures(2, ["loss"], 11))
    assert re.match(r"ranks 0–1: finished, \d", said)
    assert re.search(r"loss +10 +2\.404 +1\.904 +2\.904 +1\.904 +2\.904$", said, re.MULTILINE)
    assert "rank 0 came last in 50 of 50 calls: the others together waited 500 ms for it" in said
    # The seconds of a rank are its own, those of a call the mean of the ranks.
    assert re.search(r"^  rank 1 +50 +500 ms +100 ms$", said, re.MULTILINE)
    assert re.search(r" calls +total waiting +total transfer +busbw +best$", said, re.MULTILINE)
    assert re.search(r"allreduce g +50 × 1 kB +250 ms +100 ms +500 kB/s", said)


def test_tables_of_many_ranks_have_a_row_for_those_that_hardly_differ():
    made = CellModel([hello(rank) for rank in range(64)])
    for rank in range(64):
        wait = 0.1 if rank == 1 else 2 + rank / 10_000
        made.take(Timings(rank, 1, (totals(50, wait, 0.4, {1: (50, wait)}),)), [])
    made.end()
    said = text(made)
    assert re.search(r"^  ranks 0, 2–63, mean +50 +2 s +400 ms$", said, re.MULTILINE)
    assert re.search(r"^  rank 1 +50 +100 ms +400 ms$", said, re.MULTILINE)


def test_values_that_are_not_finite_are_left_out_of_the_picture():
    made = CellModel([hello(0)])
    log(made, 0, "loss", [(0, 1.0), (1, math.nan), (2, 3.0)])
    (loss,) = images(bundle(made)["text/html"])
    assert len(loss.find("{*}polyline").get("points").split()) == 3
    (mark,) = loss.findall("{*}path[@class='not-finite']")
    middle = loss.find("{*}polyline").get("points").split()[0].split(",")[0]
    assert float(mark.get("d").removeprefix("M").split()[0]) > float(middle)
    log(made, 0, "lost", [(0, math.nan)])
    assert ">rank 0: nan at step 0<" in svg.curve(made.curves, "lost", 100)


def test_a_single_value_is_a_point_and_equal_curves_are_counted():
    made = CellModel([hello(rank) for rank in range(3)])
    for rank in range(3):
        log(made, rank, "once", [(7, 2.5)])
        log(made, rank, "other", [(7, 2.5), (8, float(rank))])
    once = ElementTree.fromstring(svg.curve(made.curves, "once", 100))
    assert len(once.findall("{*}circle")) == 3
    assert "3 curves coincide" in [text.text for text in once.findall("{*}text")]
    assert "coincide" not in svg.curve(made.curves, "other", 100)


def test_ranks_whose_values_are_not_finite_are_named_with_the_first_step():
    made = CellModel([hello(rank) for rank in range(3)])
    for rank, bad in enumerate((math.nan, 1.0, math.nan)):
        log(made, rank, "loss", [(0, 1.0), (5, bad), (6, math.inf * bad)])
    said = "ranks 0, 2: nan at step 5; rank 1: inf at step 6"
    assert made.curves.broken("loss", "rank") == said
    assert f"loss: {said}" in text(made)


@given(low=st.floats(-1e6, 1e6), exponent=st.floats(-6, 6))
def test_the_labels_of_an_axis_are_a_few_that_differ(low, exponent):
    values = svg.ticks(low, low + 10**exponent, 3.5)
    assert len(set(labels(values))) == len(set(values))
    # Below a thousandth, floating-point numbers near a million have too few digits.
    assert exponent < -3 or 2 <= len(values) <= 6
    assert svg.ticks(0.13, 0.97, 4) == [0.2, 0.4, 0.6, 0.8]


def test_peaks_survive_thinning():
    made = CellModel([hello(0)])
    values = [(i, 100.0 if i == 777 else 1.0) for i in range(2000)]
    log(made, 0, "loss", values)
    picture = ElementTree.fromstring(svg.curve(made.curves, "loss", 50))
    line = [pair.split(",") for pair in picture.find("{*}polyline").get("points").split()]
    assert len(line) <= 60
    assert min(float(y) for _, y in line) == svg._TOP


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (number(0.000123456), "0.0001235"),
        (number(12345), "12,345"),
        (number(1.5e9), "1.5e9"),
        (number(123_456.7), "1.235e5"),
        (number(math.nan), "nan"),
        (seconds(75), "1 min 15 s"),
        (seconds(0.00123), "1.23 ms"),
        (seconds(0), "0 µs"),
        (size_text(4_000_000), "4 MB"),
        (size_text(2_160_000_000_000), "2.16 TB"),
        (size_text(999_800_000_000), "1 TB"),
        (gbps(None), "n/a"),
        (gbps(0.5), "500 MB/s"),
    ],
)
def test_numbers_are_as_people_read_them(said, expected):
    assert said == expected


def test_the_last_label_of_an_axis_is_inside_the_picture():
    made = CellModel([hello(0)])
    log(made, 0, "busbw", [(1_024, 0.1), (1_048_576, 0.9)])
    made.end()
    [drawn] = images(bundle(made)["text/html"])
    label = next(text for text in drawn.findall("{*}text") if text.text == "1,000,000")
    assert label.get("text-anchor") == "middle"
    assert float(label.get("x")) + 3.5 * len(label.text) <= float(drawn.get("width"))


def test_the_first_digit_of_a_long_label_is_inside_the_picture():
    made = CellModel([hello(0)])
    log(made, 0, "tokens", [(0, 1_000_000), (9, 1_900_000)])
    drawn = ElementTree.fromstring(svg.curve(made.curves, "tokens", 100))
    label = next(text for text in drawn.findall("{*}text") if text.text == "1,000,000")
    assert label.get("text-anchor") == "end"
    assert float(label.get("x")) >= 7 * len("1,000,000")
    first = drawn.find("{*}polyline").get("points").split(",")[0]
    assert float(first) == float(label.get("x")) + 6


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.9, 1100, [1, 10, 100, 1000]),
        (0.15, 12, [0.2, 0.5, 1, 2, 5, 10]),
        (3, 4, [3, 3.2, 3.4, 3.6, 3.8, 4]),
    ],
)
def test_a_log_axis_has_powers_of_ten_and_1_2_5_between_few_of_them(low, high, wanted):
    found = svg.log_ticks(math.log10(low), math.log10(high), 5)
    assert found == pytest.approx(wanted)
