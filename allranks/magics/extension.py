"""Adds the magics, the completion and the toggle to an IPython shell, and takes them away."""

from __future__ import annotations

import os

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from allranks.cluster.notebook_session import set_session
from allranks.horovod import alias
from allranks.magics.distributed import DistributedMagics
from allranks.magics.ensemble import EnsembleMagics
from allranks.magics.options import parse_command
from allranks.magics.px import PxMagics
from allranks.magics.session import RANKS, RanksProxy
from allranks.records.config import START_WITH

#: The cell magics of `PxMagics`.
_PX_CELLS = ("px", "rank")
_PX_COMMANDS = ("%autopx", "%px", "%dist_", "%sync", "%unload_ext")


def load(shell: InteractiveShell, *, px: bool = False) -> None:
    """Adds ``%%distributed``, ``%distributed``, ``%%ensemble`` and ``ranks``; nothing is started.

    With ``px`` it also adds the magics of ipyparallel and nbdistributed.
    """
    magics = _loaded(shell)
    if magics is None:
        magics = DistributedMagics(shell)
        shell.register_magics(magics, EnsembleMagics(shell, magics.session))
        set_session(magics.session)
        alias.install(in_notebook=True)
        # A variable of that name is the user's: keep it.
        shell.user_ns.setdefault(RANKS, RanksProxy(magics.session))
    if px and PxMagics.__name__ not in shell.magics_manager.registry:
        shell.register_magics(PxMagics(shell, magics))
        magics.toggle.commands += _PX_COMMANDS
        for name in _PX_CELLS:
            magics.awaiting.add(name)


def load_kernel(shell: InteractiveShell) -> None:
    """Adds the magics to the kernel "allranks", and sends every cell to the ranks."""
    load(shell)
    magics = _loaded(shell)
    assert magics is not None
    _, options = parse_command(f"start {os.environ.get(START_WITH, '')}")
    magics.session.start_with(options.cluster)
    magics.toggle.every_cell()


def unload(shell: InteractiveShell) -> None:
    magics = _loaded(shell)
    if magics is None:
        return
    unload_px(shell)
    set_session(None)
    magics.close()
    alias.uninstall()
    if isinstance(shell.user_ns.get(RANKS), RanksProxy):
        del shell.user_ns[RANKS]
    for kind in (DistributedMagics, EnsembleMagics):
        _take_away(shell, kind)


def unload_px(shell: InteractiveShell) -> None:
    magics = _loaded(shell)
    if magics is not None and PxMagics.__name__ in shell.magics_manager.registry:
        for name in _PX_CELLS:
            magics.awaiting.drop(name)
        for command in _PX_COMMANDS:
            magics.toggle.commands.remove(command)
        _take_away(shell, PxMagics)


def _take_away(shell: InteractiveShell, kind: type[Magics]) -> None:
    added = shell.magics_manager.registry.pop(kind.__name__)
    for where, magics in added.magics.items():
        for name in magics:
            shell.magics_manager.magics[where].pop(name, None)


def _loaded(shell: InteractiveShell) -> DistributedMagics | None:
    found = shell.magics_manager.registry.get(DistributedMagics.__name__)
    return found if isinstance(found, DistributedMagics) else None
