"""The one widget of a dashboard: its front end, and a snapshot for a page that is loaded anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

FRONT = Path(__file__).parent / "front"
#: Read one after the other they are one module; nothing is built, nothing comes from the network.
_PARTS = (
    "format.js", "chosen.js", "data.js", "lines.js", "chart.js", "ranks.js", "members.js",
    "curves.js", "groups.js", "parallel.js", "timings.js", "strips.js", "strip_chart.js",
    "time.js", "logs.js", "download.js", "controls.js", "after.js", "main.js",
)  # fmt: skip
ESM = "\n".join((FRONT / name).read_text("utf-8") for name in _PARTS)
CSS = (FRONT / "front.css").read_text("utf-8")


class DashboardWidget(anywidget.AnyWidget):
    """The model behind a live view.

    Its news go as messages, numbered from 1. ``state`` is made when a page asks for it, and only
    then: it holds all that the messages up to its number have told, in as few bytes.

    Args:
        snapshot: returns the state; may be called from another thread.
        clicked: called with what the page says; may be called from another thread.
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
