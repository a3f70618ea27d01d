"""``tqdm.auto`` on a rank writes text: several ranks' bars are folded as lines are, and are saved.

``tqdm.notebook`` is what it is everywhere, a widget on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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


def install() -> None:
    """Holds for what is imported from now on."""
    if not any(isinstance(finder, _Text) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Text())
