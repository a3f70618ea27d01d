"""The displays of several ranks, and when they unfold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import IPython.display
import pytest

from allranks.widgets import displays
from allranks.widgets.text import Data

Outputs = dict[str, Data]


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """What stands in the notebook, by the name of its output."""
    found: Outputs = {}

    def show(data: Data, *, display_id: str, **_: Any) -> None:
        found[display_id] = data

    monkeypatch.setattr(IPython.display, "display", show)
    monkeypatch.setattr(IPython.display, "update_display", show)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which stands still."""
    now = [0.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: now[0])
    return now


def read(outputs: Outputs) -> list[str]:
    return [" ".join(data.values()) for data in outputs.values() if data]


def figure(said: str) -> Data:
    return {"text/html": said}


def gallery(ranks: int) -> displays.Gallery:
    made = displays.Gallery(fold=True, slots=[])
    for rank in range(ranks):
        made.add(rank, figure("start"), {}, "h")
    made.show(now=False)
    return made


def test_updates_of_all_ranks_a_moment_apart_do_not_unfold_a_display(
    outputs: Outputs, clock: list[float]
) -> None:
    made = gallery(2)
    made.update(0, figure("next"), {}, "h")
    assert made.show(now=False) == 0
    assert made.changed
    made.update(1, figure("next"), {}, "h")
    assert made.show(now=False) > 0
    assert read(outputs) == ["ranks 0–1:", "next"]
    assert not made.changed


def test_outputs_that_have_become_empty_are_used_again(outputs: Outputs) -> None:
    made = gallery(2)
    for step in range(10):
        made.update(0, figure(f"{step}"), {}, "h")
        made.show(now=True)
        made.update(1, figure(f"{step}"), {}, "h")
        made.show(now=True)
    assert read(outputs) == ["ranks 0–1:", "9"]
    assert len(outputs) == 4


def test_the_same_data_with_other_metadata_is_another_display(outputs: Outputs) -> None:
    made = displays.Gallery(fold=True, slots=[])
    made.add(0, figure("a"), {"width": 1}, "")
    made.add(1, figure("a"), {"width": 2}, "")
    made.show(now=True)
    assert read(outputs) == ["rank 0:", "a", "rank 1:", "a"]


def printed(said: str, plain: str) -> Data:
    style = "white-space:pre;overflow-x:auto;line-height:normal"
    return {"text/html": f'<pre style="{style}">{said}</pre>\n', "text/plain": plain}


def test_what_rich_prints_in_a_row_is_one_display(outputs: Outputs) -> None:
    made = displays.Gallery(fold=True, slots=[])
    for rank in (0, 1):
        made.add(rank, printed("<b>a</b>\n", "a\n"), {}, "")
        made.add(rank, printed("b\n", "b\n"), {}, "")
        made.add(rank, figure("a figure"), {}, "")
        made.add(rank, printed("c\n", "c\n"), {}, "h")
    made.show(now=True)
    shown = [data for data in outputs.values() if "ranks 0–1:" not in data.values()]
    both = printed("<b>a</b>\nb\n", "a\nb\n")
    assert shown == [both, figure("a figure"), printed("c\n", "c\n")]
