"""Adds the magics, the completion and the toggle to an IPython shell, and takes them away."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from allranks.cluster import cluster, features
from allranks.magics.distributed import DistributedMagics
from allranks.magics.options import parse_command
from allranks.magics.session import RANKS, RanksProxy, Session
from allranks.records.config import START_WITH

#: `Session.last_size` of the shells that have unloaded the extension, as a reload does.
_sizes: WeakKeyDictionary[InteractiveShell, int | None] = WeakKeyDictionary()
#: The sessions of the shells that have loaded the extension.
_sessions: list[Session] = []


def load(shell: InteractiveShell) -> None:
    """Adds ``%%distributed``, ``%distributed``, ``ranks`` and features' magics; starts nothing."""
    if loaded(shell) is not None:
        return
    magics = DistributedMagics(shell)
    shell.register_magics(magics)
    magics.session.last_size = _sizes.get(shell)
    _sessions.append(magics.session)
    cluster.session = magics.session
    features.loaded(shell, magics.undo)
    # A variable of that name is the user's: keep it.
    shell.user_ns.setdefault(RANKS, RanksProxy(magics.session))


def load_kernel(shell: InteractiveShell) -> None:
    # For the kernel "allranks".
    load(shell)
    magics = loaded(shell)
    assert magics is not None
    _, options = parse_command(f"start {os.environ.get(START_WITH, '')}")
    magics.session.start_with(options.cluster)
    magics.toggle.every_cell()


def unload(shell: InteractiveShell) -> None:
    magics = loaded(shell)
    if magics is None:
        return
    _sessions.remove(magics.session)
    cluster.session = _sessions[-1] if _sessions else None
    if said := magics.close():
        print(said)
    _sizes[shell] = magics.session.last_size
    if isinstance(shell.user_ns.get(RANKS), RanksProxy):
        del shell.user_ns[RANKS]
    take_away(shell, DistributedMagics)


def take_away(shell: InteractiveShell, kind: type[Magics]) -> None:
    # IPython itself cannot unregister magics.
    added = shell.magics_manager.registry.pop(kind.__name__)
    for where, magics in added.magics.items():
        registered = shell.magics_manager.magics[where]
        for name, magic in magics.items():
            if registered.get(name) == magic:  # else another extension has replaced it since
                del registered[name]


def loaded(shell: InteractiveShell) -> DistributedMagics | None:
    found = shell.magics_manager.registry.get(DistributedMagics.__name__)
    return found if isinstance(found, DistributedMagics) else None
