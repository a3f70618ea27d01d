"""The kernel "allranks": cells run on the ranks, unless they begin with ``%%local``.

It is IPython's kernel with this extension. ``allranks install-kernel`` adds it to the launcher of
JupyterLab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Loads the extension allranks, and sends every cell to the ranks."""
    from allranks.magics.extension import load_kernel
    from allranks.notebook import load_features

    load_features()
    load_kernel(shell)
