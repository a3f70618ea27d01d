"""Replaces dead ranks, and restores in the new ones the variables that the dead ones had kept."""

from __future__ import annotations

import os
import time
from typing import Any

from allranks import port_filter
from allranks.collectives import world
from allranks.collectives.ops.keeping import VariableStore
from allranks.collectives.start import healing
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.engine.host import stubs
from allranks.errors import UsageError
from allranks.records import requests


class RankHeal(RankFeature):
    """Joins with replacements, and stores kept variables in memory that outlives the process."""

    requests = frozenset({requests.HEAL, requests.SETTLE, requests.RESTORE})

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._stub = stubs.command("rank", os.path.join(rank.config.session_dir, "host-agent"))
        folders = tuple(filter(os.path.isdir, rank.config.kept_dirs))
        several = rank.config.several_hosts
        # On several hosts it ends with the ranks, which are replaced where none has a GPU.
        if folders and (not several or rank.device == "cpu"):
            # The host agent removes its files.
            world.current().variable_store = VariableStore(
                folders,
                rank.rank,
                rank.size,
                rank.shell.user_ns,
                here=(lambda: world.current().local_ranks) if several else None,
            )

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        if name == requests.HEAL:
            dead, epoch = arguments["dead"], arguments["epoch"]
            return {"warning": self._rank.begin_epoch(lambda: self._join(dead, epoch))}, []
        if name == requests.RESTORE:
            return self._restore(arguments["version"]), []
        kept: VariableStore | None = world.current().variable_store
        if kept is None:
            return {"goes_on": 0, "version": 0}, []
        return {"goes_on": kept.settled(), "version": kept.of_cells.newest()}, []

    def _join(self, dead: list[int], epoch: int) -> str:
        """Joins with the processes that replace dead ranks; returns a warning, or "".

        Collective over the survivors, which have left their collectives, and the replacements.
        """
        rank = self._rank
        if not rank.config.several_hosts:
            port_filter.restrict_own_ports(allow_this_host=True)
        healing.heal(dead, self._stub, epoch)
        # The features restore their state before the next cell.
        return rank.rank_replaced(dead)

    def _restore(self, version: int) -> dict[str, Any]:
        kept: VariableStore | None = world.current().variable_store
        try:
            found = kept.of_cells.load(version) if kept is not None else None
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
