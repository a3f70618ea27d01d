"""Displays that change places: what a page may draw between two messages is never odd."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest

from allranks.widgets.displays import DisplaySlot, put_above
from allranks.widgets.text import Data


@pytest.mark.parametrize("count", range(4))
def test_what_comes_above_others_is_never_shown_twice_and_hides_none(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: dict[str, str] = {}
    drawn: list[list[str]] = []

    def show(data: Data, *, display_id: str, **_: Any) -> None:
        outputs[display_id] = data["text/plain"]
        drawn.append([*outputs.values()])

    def update(data: Data, *, display_id: str, **_: Any) -> None:
        assert display_id in outputs
        show(data, display_id=display_id)

    monkeypatch.setattr(IPython.display, "display", show)
    monkeypatch.setattr(IPython.display, "update_display", update)
    slots: list[DisplaySlot] = []
    lines = [f"line {number}" for number in range(count)]
    for line in lines:
        DisplaySlot(slots).show({"text/plain": line})
    drawn.clear()

    panel = DisplaySlot(slots)
    put_above(panel, {"text/plain": "panel"}, slots)

    assert drawn[-1] == ["panel", *lines]
    assert all(shown.count("panel") <= 1 and set(lines) <= set(shown) for shown in drawn)
    assert [shown.content[0]["text/plain"] for shown in slots] == ["panel", *lines]
    panel.show({"text/plain": "changed"})
    assert drawn[-1] == ["changed", *lines]


def test_a_figure_that_replaces_another_one_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Data] = []
    for name in ("display", "update_display"):
        monkeypatch.setattr(IPython.display, name, lambda data, **_: sent.append(data))
    first, second = ({"application/vnd.plotly.v1+json": {"data": [rank]}} for rank in (1, 0))
    shown = DisplaySlot([])
    shown.show(first)
    shown.show(second)
    assert sent == [first, {}, second]
