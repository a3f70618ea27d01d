"""Displays of ranks: when they unfold, and what a page may draw between two messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import IPython.display
import pytest

from allranks.records.wire import Output
from allranks.widgets import displays, extensions
from allranks.widgets.displays import DisplaySlot, put_above
from allranks.widgets.extensions import DisplayFolder, DisplayObserver, LineFolder
from allranks.widgets.notebook import NotebookView
from allranks.widgets.text import Data


class Page:
    """Keeps what stands in the notebook by the name of its output, and what was sent and drawn."""

    def __init__(self) -> None:
        self.outputs: dict[str, Data] = {}
        self.sent: list[Data] = []
        self.drawn: list[list[str]] = []

    def show(self, data: Data, *, display_id: str, **_: Any) -> None:
        self.outputs[display_id] = data
        self.sent.append(data)
        self.drawn.append(self.read())

    def update(self, data: Data, *, display_id: str, **_: Any) -> None:
        assert display_id in self.outputs
        self.show(data, display_id=display_id)

    def read(self) -> list[str]:
        return [" ".join(map(str, data.values())) for data in self.outputs.values() if data]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    monkeypatch.setattr(IPython.display, "display", made.show)
    monkeypatch.setattr(IPython.display, "update_display", made.update)
    return made


@pytest.mark.parametrize("count", range(4))
def test_what_comes_above_others_is_never_shown_twice_and_hides_none(
    count: int, page: Page
) -> None:
    slots: list[DisplaySlot] = []
    lines = [f"line {number}" for number in range(count)]
    for line in lines:
        DisplaySlot(slots).show({"text/plain": line})
    page.drawn.clear()

    panel = DisplaySlot(slots)
    put_above(panel, {"text/plain": "panel"}, slots)

    assert page.drawn[-1] == ["panel", *lines]
    assert all(shown.count("panel") <= 1 and set(lines) <= set(shown) for shown in page.drawn)
    assert [shown.content[0]["text/plain"] for shown in slots] == ["panel", *lines]
    panel.show({"text/plain": "changed"})
    assert page.drawn[-1] == ["changed", *lines]


def test_a_figure_that_replaces_another_one_is_drawn_anew(page: Page) -> None:
    first, second = ({"application/vnd.plotly.v1+json": {"data": [rank]}} for rank in (1, 0))
    shown = DisplaySlot([])
    shown.show(first)
    shown.show(second)
    assert page.sent == [first, {}, second]


def figure(said: str) -> Data:
    return {"text/html": said}


def gallery(*added: tuple[int, Data, dict[str, Any], str]) -> displays.Gallery:
    made = displays.Gallery(fold=True, slots=[])
    for one in added:
        made.add(*one)
    made.show(now=False)
    return made


STARTED = [(rank, figure("start"), {}, "h") for rank in range(2)]


def test_updates_of_all_ranks_a_moment_apart_do_not_unfold_and_empty_outputs_are_used_again(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displays.time, "monotonic", lambda: 0.0)
    made = gallery(*STARTED)
    made.update(0, figure("next"), {}, "h")
    assert made.show(now=False) == 0
    assert made.changed
    made.update(1, figure("next"), {}, "h")
    assert made.show(now=False) > 0
    assert page.read() == ["ranks 0–1:", "next"]
    assert not made.changed
    for step in range(10):
        for rank in range(2):
            made.update(rank, figure(f"{step}"), {}, "h")
            made.show(now=True)
    assert page.read() == ["ranks 0–1:", "9"]
    assert len(page.outputs) == 4


def printed(said: str, plain: str) -> Data:
    style = "white-space:pre;overflow-x:auto;line-height:normal"
    return {"text/html": f'<pre style="{style}">{said}</pre>\n', "text/plain": plain}


def test_what_rich_prints_in_a_row_is_one_display_and_other_metadata_another(page: Page) -> None:
    shown = [printed("<b>a</b>\n", "a\n"), printed("b\n", "b\n"), figure("a figure")]
    made = gallery(*((rank, data, {}, "") for rank in (0, 1) for data in shown))
    for rank in (0, 1):
        made.add(rank, printed("c\n", "c\n"), {}, "h")
        made.add(rank, figure("wide"), {"width": rank}, "")
    made.show(now=True)
    both = printed("<b>a</b>\nb\n", "a\nb\n")
    labels = {"ranks 0–1:", "rank 0:", "rank 1:"}
    found = [data for data in page.outputs.values() if labels.isdisjoint(data.values())]
    wide = figure("wide")
    assert found == [both, figure("a figure"), printed("c\n", "c\n"), wide, wide]


def test_a_second_line_about_a_cell_is_shown_although_the_first_one_was_shown_just_now(
    page: Page,
) -> None:
    # As before a cell, when nothing refreshes the view after it.
    view = NotebookView([0, 1])
    for line in ("ranks 0–1 have not answered", "rank 1 is at f.py:3"):
        view.notice(line)
        view.refresh()
    assert page.read() == [
        "ranks 0–1 · ranks 0–1 have not answered\n          · rank 1 is at f.py:3"
    ]


class Fails(DisplayFolder, DisplayObserver, LineFolder):
    """A part of a view that fails in all that it does."""

    marks = ("text",)

    def fold(self, rank, data):
        raise ValueError("no fold")

    def shown(self, name, data, metadata):
        raise ValueError("no display")

    def refresh(self):
        raise ValueError("no refresh")

    def name_of(self, text):
        raise ValueError("no text")


class WrongMarks(LineFolder):
    """Its marks are no texts."""

    marks = None  # type: ignore[assignment]


@pytest.fixture(
    params=[
        ("LINE_FOLDERS", Fails()),
        ("LINE_FOLDERS", WrongMarks()),
        ("DISPLAY_FOLDERS", Fails),
        ("DISPLAY_OBSERVERS", Fails()),
    ],
    ids=["lines", "marks", "displays", "observers"],
)
def _failing_part(request: pytest.FixtureRequest) -> Iterator[None]:
    name, part = request.param
    parts = getattr(extensions, name)
    kept = [*parts]
    parts[:] = [part]
    yield
    parts[:] = kept


@pytest.mark.usefixtures("_failing_part")
def test_a_part_of_views_that_fails_is_left_out_and_all_output_is_shown(page: Page) -> None:
    def show() -> None:
        view = NotebookView((0, 1))
        for rank in (0, 1):
            entries = ["out", "text\n"], ["display", {"image/png": "c"}, {}, None]
            view.output(Output(rank, 1, entries, 0, 0, 0))
        view.refresh()
        view.finish()

    with pytest.warns(UserWarning, match="expected the feature .*test_displays to return from"):
        show()
    assert page.read() == ["ranks 0–1 │ text", "ranks 0–1:", "c"]


def test_the_bytes_of_a_line_that_has_no_end_yet_are_counted(page: Page) -> None:
    view = NotebookView((0,))
    view.output(Output(0, 1, (["out", "xx"],), 0, 5_000_000, 0))
    view.finish()
    assert page.read() == ["rank 0 │ xx\n       · … 5.0 MB of long lines are not shown"]
