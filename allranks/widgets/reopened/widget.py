"""The one widget of a notebook by which its pages ask for what they have missed; it has no view."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

_FRONT = Path(__file__).parent / "front"


class ReopenedWidget(anywidget.AnyWidget):
    """A model that every page loads that is opened on this notebook.

    ``page`` tells the first page, which sees it being made, from those that come later.

    Args:
        heard: called with what a page says; may be called from another thread.
    """

    _esm = (_FRONT / "reopened.js").read_text("utf-8")
    page = traitlets.Dict().tag(sync=True, to_json=lambda _, widget: widget._told())

    def __init__(self, heard: Callable[[dict[str, Any]], None]) -> None:
        self._times = 0
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: heard(content))

    def _told(self) -> dict[str, Any]:
        self._times += 1
        return {"later": self._times > 1}
