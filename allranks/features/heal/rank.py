"""Gives a rank folders for the variables that it keeps, and restores them in its successor."""

from __future__ import annotations

import os
import time
from typing import Any

from allranks.collectives import world
from allranks.collectives.world.variable_store import VariableStore
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.errors import UsageError
from allranks.records import requests


class RankHeal(RankFeature):
    """Stores what a rank keeps outside its process, in memory that its host's agent removes."""

    requests = frozenset({requests.SETTLE, requests.RESTORE})

    def started(self, rank: RankContext) -> None:
        """Makes the store if the host has a folder for it."""
        self._rank = rank
        folders = tuple(filter(os.path.isdir, rank.config.kept_dirs))
        if folders:
            namespace = rank.shell.user_ns
            world.current().variable_store = VariableStore(folders, rank.rank, rank.size, namespace)

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        """Completes what is being stored, or restores what a dead rank had stored."""
        if name == requests.RESTORE:
            return self._restore(), []
        kept = world.current().variable_store
        return {"goes_on": kept.settled() if kept is not None else 0}, []

    def _restore(self) -> dict[str, Any]:
        kept = world.current().variable_store
        try:
            found = kept.of_cells.load() if kept is not None else None
        except Exception as error:  # an object's own way to be unpickled may do anything
            raise UsageError(
                f"what rank {self._rank.rank} kept cannot be read: {type(error).__name__}: "
                f"{text_of(error)}"
            ) from None
        if found is None:
            return {"names": [], "seconds": 0.0}
        at, values = found
        self._rank.shell.user_ns.update(values)
        return {"names": list(values), "seconds": time.time() - at}


FEATURE = RankHeal
