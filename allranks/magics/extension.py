"""Adds the magics, the completion and the toggle to an IPython shell, and takes them away."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from allranks.horovod import alias
from allranks.magics.distributed import DistributedMagics
from allranks.magics.ensemble import EnsembleMagics
from allranks.widgets.explainer.ranks import offer


def load(shell: InteractiveShell) -> None:
    """Adds ``%%distributed``, ``%distributed`` and ``%%ensemble``; nothing is started yet."""
    if _loaded(shell) is None:
        magics = DistributedMagics(shell)
        shell.register_magics(magics, EnsembleMagics(shell, magics.session))
        offer(magics.session)
        alias.install(in_notebook=True)


def unload(shell: InteractiveShell) -> None:
    """Ends the ranks and takes the magics away."""
    magics = _loaded(shell)
    if magics is None:
        return
    offer(None)
    magics.close()
    alias.uninstall()
    for kind in (DistributedMagics, EnsembleMagics):
        del shell.magics_manager.registry[kind.__name__]
    for where in ("line", "cell"):
        for name in ("distributed", "ensemble"):
            shell.magics_manager.magics[where].pop(name, None)


def _loaded(shell: InteractiveShell) -> DistributedMagics | None:
    found = shell.magics_manager.registry.get(DistributedMagics.__name__)
    return found if isinstance(found, DistributedMagics) else None
