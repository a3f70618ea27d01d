"""Has ``tqdm.auto`` and rich draw text bars, in place of widgets.

In the host agent: the ranks are forked from it, and modules may be preloaded before.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from allranks.engine.host.features import HostContext, HostFeature
from allranks.post_import import PostImportHook

_TQDM_CHOICE = "tqdm.autonotebook"


def _choose_text(tqdm: Any) -> None:
    # In place of the module in which tqdm decides whether it draws a widget.
    chosen: Any = ModuleType(_TQDM_CHOICE)
    sys.modules[_TQDM_CHOICE] = tqdm.autonotebook = chosen
    chosen.tqdm, chosen.trange = tqdm.std.tqdm, tqdm.std.trange


_tqdm = PostImportHook(["tqdm"], _choose_text)


def _draw_as_in_a_terminal(progress: Any) -> None:
    from rich.console import Console

    # TERM of the kernel's environment describes a terminal in which the bars are not drawn.
    console = Console(
        force_jupyter=False,
        force_terminal=True,
        color_system="standard",
        width=80,
        _environ={**os.environ, "TERM": "xterm"},
    )
    progress.get_console = lambda: console


_rich = PostImportHook(["rich.progress"], _draw_as_in_a_terminal)


class TextBars(HostFeature):
    """Has libraries draw text bars that are imported from now on.

    Equal lines of several ranks are folded, and text is saved with the notebook. ``tqdm.notebook``
    still is a widget on each rank.
    """

    def started(self, host: HostContext) -> None:
        _rich.install()
        _tqdm.install()


FEATURE = TextBars
