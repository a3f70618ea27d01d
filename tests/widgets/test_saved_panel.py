"""What stays of a live view: a picture, and beside it what makes it alive where scripts run."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re

import pytest

from allranks.records.telemetry import Timings
from allranks.widgets.dashboard import saved_panel
from allranks.widgets.dashboard.cell_model import CellModel, Logs
from allranks.widgets.dashboard.plot import PlotStyle
from allranks.widgets.dashboard.saved_panel import bundle
from allranks.widgets.dashboard.view import Dashboard, LivePanel
from tests.widgets.test_still import figures, images
from tests.widgets.test_stores import hello, log


def ended(made: CellModel, settings=None, mode="auto") -> tuple[LivePanel, dict[str, str]]:
    """A view whose cell has ended, and the output that stays."""
    live = LivePanel(made, Logs([hello(rank) for rank in made.ranks]), mode)
    live.settings = settings or {}
    return live, live.saved(bundle(made, PlotStyle.of(live.settings)))


def noisy(ranks: int, names: int, count: int) -> CellModel:
    """Values of which no digit can be foreseen, as those of a real training."""
    made, numbers = CellModel([hello(rank) for rank in range(ranks)]), random.Random(0)
    for rank in range(ranks):
        for name in range(names):
            log(made, rank, f"metric {name}", [(i, numbers.random()) for i in range(count)])
    made.end()
    return made


def packed(html: str) -> list[str]:
    """What stands in the script: the state, the view's scripts, its styles."""
    found = re.search(r'\("\w+", \["([^"]+)", "([^"]+)", "([^"]+)"\]\);</script>', html)
    return [gzip.decompress(base64.b64decode(part)).decode() for part in found.groups()]


def test_without_scripts_the_picture_is_left():
    made = figures(2, ["loss"], 50)
    live, shown = ended(made)
    without = re.sub("<script>.*</script>", "", shown["text/html"], flags=re.DOTALL)
    picture = bundle(made, PlotStyle.of({}))
    assert without == f'<div data-allranks="{live.key}">{picture["text/html"]}</div>'
    assert shown["text/plain"] == picture["text/plain"]


def test_the_cause_that_is_found_after_the_end_stands_first_in_the_timings():
    view = Dashboard("full", [hello(0), hello(1)], "", True, None, {})
    shown: list[dict[str, str]] = []
    view.show_panel = shown.append
    row = ["allreduce", "In[3]:9", "f4", 8, 2, "shared", 300, 1.0, 1.0, 1.0, 0.1, []]
    view.telemetry(Timings(0, 1, (row,)), [])
    view.name_cause("too early: there is nothing that stays yet")
    assert shown == []
    view.finish()
    view.name_cause("rank 1 is the slow one")
    state = json.loads(packed(shown[-1]["text/html"])[0])
    assert state["timings"]["cause"] == "rank 1 is the slow one"
    assert "<p>rank 1 is the slow one</p>" in shown[-1]["text/html"]


@pytest.mark.parametrize(("ranks", "metrics"), [(4, 3), (16, 40), (64, 12)])
def test_ten_cells_of_a_notebook_stay_below_two_megabytes(ranks, metrics):
    _, shown = ended(noisy(ranks, metrics, 2500))
    assert "<script>" in shown["text/html"]
    assert 10 * sum(len(part.encode()) for part in shown.values()) < 2_000_000


def test_a_short_curve_is_kept_whole_with_what_was_chosen():
    made, chosen = figures(2, ["loss"], 300), {"axes": {"loss": {"y": True}}, "selected": 1}
    _, shown = ended(made, chosen)
    state, code, styles = packed(shown["text/html"])
    state = json.loads(state)
    assert state["settings"] == chosen
    first = state["curves"][0]
    assert first["steps"] == [*range(300), 299]
    assert first["values"] == pytest.approx([math.exp(-i / 99) + 1 for i in first["steps"]])
    assert "export { revive };" in code
    assert ".ar-dashboard" in styles


def test_a_notebook_does_not_name_the_machine_that_it_ran_on(tmp_path):
    who = hello(0, str(tmp_path / "rank-0.log"), "somebodys-machine")
    made, logs = CellModel([who]), Logs([who])
    made.end()
    shown = LivePanel(made, logs, "full").saved(bundle(made, PlotStyle.of({})))
    state, *_ = packed(shown["text/html"])
    assert "somebodys-machine" not in state
    assert str(tmp_path) not in state


def state_of(*curves: list[tuple[float, float]]) -> dict:
    """What is kept of a loss, one curve a rank."""
    made = CellModel([hello(rank) for rank in range(len(curves))])
    for rank, pairs in enumerate(curves):
        log(made, rank, "loss", pairs)
    return json.loads(packed(ended(made)[1]["text/html"])[0])


def test_what_json_does_not_know_is_a_gap_and_curves_apart_in_the_last_digit_do_not_coincide():
    (curve,) = state_of([(0, 1.0), (math.nan, math.nan), (2, math.inf)])["curves"]
    assert curve["values"] == [1.0, None, None, None]
    state = state_of([(0, 1.0), (1, 1.0)], [(0, 1.0), (1, 1 + 1e-12)])
    assert state["curves"][0]["values"] == state["curves"][1]["values"]
    assert state["apart"] == ["loss"]


def test_the_end_of_the_logs_is_kept_with_what_is_standard_error(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("")
    made = CellModel([hello(0)])
    logs = Logs([hello(0, str(log))])
    log.write_text("x" * 50_000 + "\nout\nerr\n")
    nbytes = log.stat().st_size
    logs._ranks[0].known, logs._ranks[0].spans = nbytes, [[nbytes - 4, nbytes]]
    made.end()
    (kept,) = saved_panel._logs(logs)
    assert [is_error for _, is_error in kept["pieces"]] == [False, True]
    assert kept["pieces"][0][0].endswith("x\nout\n")
    assert kept["pieces"][1][0] == "err\n"
    assert kept["skipped"] + sum(len(text) for text, _ in kept["pieces"]) == nbytes


def test_an_axis_is_logarithmic_where_it_was_chosen_and_nowhere_else():
    made = CellModel([hello(0)])
    log(made, 0, "loss", [(i, 10.0**-i) for i in range(5)])
    # What has no page, as a script's report, shows what falls as it falls.
    chosen = PlotStyle.of({"axes": {"loss": {"y": True}}})
    for arguments, label in (((PlotStyle.of({}),), "0.6"), ((chosen,), "0.001"), ((), "0.001")):
        (loss,) = images(bundle(made, *arguments)["text/html"])
        assert label in [text.text for text in loss.findall("{*}text")]


@pytest.mark.parametrize("settings", [{"smoothing": "much"}, {"smoothing": 7}, {"selected": []}])
def test_a_picture_is_drawn_whatever_a_page_tells(settings):
    assert images(bundle(figures(2, ["loss"], 20), PlotStyle.of(settings))["text/html"])


def test_smoothing_and_a_selected_rank_are_in_the_picture():
    made = figures(2, ["loss"], 20)
    loss, _ = images(bundle(made, PlotStyle.of({"smoothing": 0.9, "selected": 1}))["text/html"])
    rough, _ = images(bundle(made, PlotStyle.of({}))["text/html"])
    faint, plain = loss.findall("{*}polyline")
    assert (faint.get("opacity"), plain.get("opacity")) == ("0.2", None)
    assert faint.get("points") != rough.findall("{*}polyline")[0].get("points")


def test_a_view_that_has_no_room_without_its_curves_is_not_packed_again_and_again(monkeypatch):
    made, packings = figures(2, ["loss"], 50), []
    pack = saved_panel._packed

    def counted(text):
        packings.append(text)
        return pack(text)

    monkeypatch.setattr(saved_panel, "_packed", counted)
    monkeypatch.setattr(saved_panel, "_STATE_NBYTES", 10)
    ended(made)
    assert len([text for text in packings if '"curves":' in text]) == 1
