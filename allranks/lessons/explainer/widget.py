"""The one widget of an explainer: the front end that plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from allranks.widgets.page_widgets import FRONT as SHARED_FRONT

_FRONT = Path(__file__).parent / "front"
_NAMES = ("circle.js", "quiz.js", "saving.js", "player.js")
_PARTS = (SHARED_FRONT / "format.js", *(_FRONT / name for name in _NAMES))
_STYLES = (SHARED_FRONT / "front.css", _FRONT / "front.css")


class ExplainerWidget(anywidget.AnyWidget):
    """The model of a player; a reloaded page finds its last state.

    ``clicked`` gets the page's messages, perhaps in another thread.
    """

    _esm = "\n".join(path.read_text("utf-8") for path in _PARTS)
    _css = "\n".join(path.read_text("utf-8") for path in _STYLES)
    state = traitlets.Dict().tag(sync=True)

    def __init__(self, state: dict[str, Any], clicked: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(state=state)
        self.on_msg(lambda _widget, content, _buffers: clicked(content))
