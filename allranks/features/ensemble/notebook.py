"""``%%ensemble``, and `Cluster.map`: a function on each of many items, as an ensemble's members."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.features import NotebookFeature


class Ensembles(NotebookFeature):
    """Adds the magic to a notebook, and runs the items of ``map`` on the ranks."""

    commands = frozenset({"map"})

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        # Here: scripts need no magic.
        from allranks.features.ensemble import magics

        magics.load(shell, undo)

    def command(self, name: str, *arguments: Any) -> Any:
        # Imported at the first use: a script may not need it.
        from allranks.features.ensemble.mapping import map_items

        return map_items(*arguments)


FEATURE = Ensembles
