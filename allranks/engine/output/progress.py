"""``tqdm.auto`` and rich's bars are text: several ranks' are folded as lines are, and are saved.

``tqdm.notebook`` is what it is everywhere, a widget on each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from allranks.post_import import PostImportHook

_CHOOSES = "tqdm.autonotebook"


class _Text(MetaPathFinder, Loader):
    """Makes the module in which tqdm looks whether it can draw a widget."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds that module only."""
        return ModuleSpec(name, self) if name == _CHOOSES else None

    def exec_module(self, module: ModuleType) -> None:
        """Has it choose what tqdm itself chooses in a terminal."""
        import tqdm.std

        vars(module).update(tqdm=tqdm.std.tqdm, trange=tqdm.std.trange)


def _as_in_a_terminal(progress: Any) -> None:
    """Has the bars of rich that are given no console of their own drawn by one for a terminal."""
    from rich.console import Console

    # A kernel's own terminal, which its environment tells of, is not where they are drawn.
    console = Console(
        force_jupyter=False,
        force_terminal=True,
        color_system="standard",
        width=80,
        _environ={**os.environ, "TERM": "xterm"},
    )
    progress.get_console = lambda: console


_rich = PostImportHook(["rich.progress"], _as_in_a_terminal)


def install() -> None:
    """Holds for what is imported from now on."""
    _rich.install()
    if not any(isinstance(finder, _Text) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Text())
