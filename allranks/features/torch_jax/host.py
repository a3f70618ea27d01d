"""torch where it is imported before the ranks are forked: its log, and its generator's seed."""

from __future__ import annotations

import os
import sys
from typing import Any

from allranks.engine.host.features import HostContext, HostFeature
from allranks.post_import import PostImportHook


def _note_seed(torch: Any) -> None:
    global _seed
    _seed = torch.initial_seed()


_hook = PostImportHook(["torch"], _note_seed)
#: Drawn by torch as it was imported. A later seed is that of the program.
_seed: int | None = None


def _quiet() -> None:
    # torch warns of each connection that ends, with a stack of C++; ranks report the cause instead.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def prepare() -> None:
    _quiet()
    _hook.install()


def prepare_forked() -> None:
    """Seeds torch's generator, of which each forked process has a copy.

    One that a preloaded module has seeded stays, as if the rank had imported that module itself.
    """
    _quiet()
    _hook.uninstall()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() == _seed:
        torch.default_generator.seed()


class PreloadedTorch(HostFeature):
    """Prepares the host agent for ``--preload torch``."""

    def started(self, host: HostContext) -> None:
        prepare()


FEATURE = PreloadedTorch
