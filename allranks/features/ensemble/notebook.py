"""Does `Cluster.map`: a function on each of many items, as members of an ensemble."""

from __future__ import annotations

from typing import Any

from allranks.cluster.features import NotebookFeature


class EnsembleMap(NotebookFeature):
    """Runs the items of ``map`` on the ranks."""

    commands = frozenset({"map"})

    def command(self, name: str, *arguments: Any) -> Any:
        # Imported at the first use: loading the extension does not need ensembles.
        from allranks.ensemble.mapping import map_items

        return map_items(*arguments)


FEATURE = EnsembleMap
