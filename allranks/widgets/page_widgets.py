"""The widgets behind a live panel and behind the output replay, and their JavaScript.

Import this module only where a widget is made: anywidget loads ipywidgets, which takes longer than
a short cell.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

FRONT = Path(__file__).parent / "front"
#: Joined in this order they are one module. There is no build step, and nothing is downloaded.
_PARTS = (
    "format.js", "data.js", "chart.js", "ranks.js", "members.js", "curves.js", "parallel.js",
    "timings.js", "time_strips.js", "logs.js", "main.js",
)  # fmt: skip
ESM = "\n".join((FRONT / name).read_text("utf-8") for name in _PARTS)
CSS = (FRONT / "front.css").read_text("utf-8")


class DashboardWidget(anywidget.AnyWidget):
    """The model behind a live panel.

    News are messages, numbered from 1. ``state`` is made when a page asks for it: it holds the
    content of all messages up to its number, in as few bytes as possible.

    Args:
        snapshot: returns the state; may be called from another thread.
        clicked: called with each message of a page; may be called from another thread.
    """

    _esm = ESM
    _css = CSS
    state = traitlets.Dict().tag(sync=True, to_json=lambda _, widget: widget._snapshot())

    def __init__(
        self, snapshot: Callable[[], dict[str, Any]], clicked: Callable[[dict[str, Any]], None]
    ) -> None:
        self._snapshot = snapshot
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: clicked(content))


class ReplayWidget(anywidget.AnyWidget):
    """A model without a view, by which every page of a notebook asks for outputs it has missed.

    ``page`` distinguishes the first page, which sees the model being made, from later pages.

    Args:
        heard: called with each message of a page; may be called from another thread.
    """

    _esm = (FRONT / "output_replay.js").read_text("utf-8")
    page = traitlets.Dict().tag(sync=True, to_json=lambda _, widget: widget._page_state())

    def __init__(self, heard: Callable[[dict[str, Any]], None]) -> None:
        self._times = 0
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: heard(content))

    def _page_state(self) -> dict[str, Any]:
        self._times += 1
        return {"later": self._times > 1}
