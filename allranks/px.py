"""``%load_ext allranks.px``: the magics of ipyparallel and nbdistributed, on allranks' ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds ``%%distributed`` and the rest, and ``%%px`` and its like."""
    from allranks.magics.extension import load

    load(shell, px=True)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Takes ``%%px`` and its like away again; the ranks stay."""
    from allranks.magics.extension import unload_px

    unload_px(shell)
