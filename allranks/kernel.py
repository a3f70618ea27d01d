"""The kernel "allranks": every cell runs on the ranks, but those that begin with ``%%local``.

``allranks install-kernel`` puts it into Jupyter's launcher: IPython's kernel with this extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds what ``%load_ext allranks`` adds, and sends every cell to the ranks."""
    from allranks.magics.extension import load_kernel

    load_kernel(shell)
