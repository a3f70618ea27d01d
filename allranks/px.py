"""``%load_ext allranks.px``: the magics of ipyparallel and nbdistributed, on the same ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds the magics of allranks, and ``%%px`` and the other magics of `PxMagics`."""
    from allranks.features.ipyparallel import px_magics
    from allranks.notebook import load_features

    load_features()
    px_magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Removes the magics of `PxMagics`; the ranks stay."""
    from allranks.features.ipyparallel import px_magics

    px_magics.unload(shell)
