"""Buttons that features add to the panel of a cell that runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.ranks import RUNNING, WAITS, Activity
from allranks.records.wire import Answer
from allranks.widgets.dashboard import view
from allranks.widgets.dashboard.cell_model import CellModel, Logs
from allranks.widgets.dashboard.view import LivePanel, PanelButton
from tests.widgets.test_stores import hello

DRAW = PanelButton("Draw", "draw a picture of the cell", "draw")


class Page:
    """What a panel sends to its page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, panel: LivePanel) -> None:
        self.messages: list[dict[str, Any]] = []

        def make_widget(*arguments: Any) -> SimpleNamespace:
            self.click: Callable[[dict[str, Any]], None] = arguments[-1]
            return SimpleNamespace(model_id="1", send=lambda one, _: self.messages.append(one))

        monkeypatch.setattr(view, "make_widget", make_widget)
        panel.panel("")

    @property
    def noted(self) -> list[str]:
        return [message["noted"] for message in self.messages if "noted" in message]


def test_a_button_of_a_feature_notes_a_line_and_shows_a_display_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panel, shown, later = LivePanel(CellModel([hello(0)]), Logs([hello(0)]), "auto"), [], []

    def press(show: Callable[[Any, str], object]) -> str:
        later.append(show)
        return "drawing"

    panel.add_buttons({DRAW: press}, shown.append)
    page = Page(monkeypatch, panel)
    assert panel.snapshot()["buttons"] == [{"text": "Draw", "title": DRAW.title}]
    page.click({"kind": "press", "what": "Draw"})
    page.click({"kind": "press", "what": "Erase"})
    panel.refresh()
    assert (page.noted, shown) == (["drawing"], [])
    later[0]({"text/plain": "a picture"}, "the picture is below")
    later[0](None, "there is no picture")
    assert page.noted == ["drawing", "the picture is below", "there is no picture"]
    assert shown == [{"text/plain": "a picture"}]
    panel.end()
    assert panel.snapshot()["buttons"] == []


def test_the_error_of_a_button_is_noted_in_the_panel_and_the_cell_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panel = LivePanel(CellModel([hello(0)]), Logs([hello(0)]), "auto")

    def press(show: Callable[[Any, str], object]) -> str:
        raise UsageError("expected a cell with samples, found none")

    panel.add_buttons({DRAW: press}, lambda display: None)
    page = Page(monkeypatch, panel)
    page.click({"kind": "press", "what": "Draw"})
    panel.refresh()
    assert page.noted == ["expected a cell with samples, found none"]


@pytest.mark.parametrize(
    ("doing", "shown"),
    [(Activity(WAITS, "recv", "rank 1"), "waiting in recv for rank 1"), (RUNNING, "")],
)
def test_a_page_that_asks_where_ranks_are_gets_their_lines_and_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, doing: Activity, shown: str
) -> None:
    panel = LivePanel(CellModel([hello(0)]), Logs([hello(0)]), "auto")
    answers = {
        requests.STATUS: {"pid": 1, "rss_nbytes": 1, "doing": [*doing], "line": "In[1]:2"},
        requests.STACK: {"text": "thread 1"},
    }
    panel.ask = lambda name, _, deliver, ranks: deliver(Answer(1, 0, answers[name], ""))
    page = Page(monkeypatch, panel)
    page.click({"kind": "where"})
    panel.refresh()
    assert [message["where"] for message in page.messages if "where" in message] == [
        {"rank": 0, "what": requests.STATUS, "line": "In[1]:2", "activity": shown},
        {"rank": 0, "what": requests.STACK, "text": "thread 1"},
    ]
