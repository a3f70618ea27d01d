"""Replaces dead ranks, and restores in the new ones the variables that the dead ones had kept.

If a host is lost, all ranks are started again, and each loads what it has saved before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from inspect import ismodule
from typing import Any

from allranks import own_files, port_filter
from allranks.collectives import world
from allranks.collectives.ops.keeping import VariableStore, pieces_of
from allranks.collectives.world import process_sets
from allranks.engine import namespace, saved_names
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.engine.host import stubs
from allranks.errors import UsageError
from allranks.features.heal import replacement, requests
from allranks.records import wire
from allranks.records.config import HostAgentConfig


class RankHeal(RankFeature):
    """Joins with replacements, and stores kept variables in memory that outlives the process."""

    requests = frozenset(
        {requests.HEAL, requests.SETTLE, requests.RESTORE, requests.SAVE, requests.LOAD}
    )

    records = (wire.RunCell, wire.RunMember)

    def __init__(self) -> None:
        #: The last request to join with new ranks that has succeeded.
        self._joined: dict[str, Any] = {}
        #: How often it has still to join, as two notebooks may ask for it, and the last request.
        self._joins, self._asked = 0, dict[str, Any]()

    @classmethod
    def spare(cls, config: HostAgentConfig, wake: int) -> replacement.Spare:
        return replacement.Spare(wake, config.size, len(config.seats))

    def join(self, config: HostAgentConfig, rank: int, dead: Sequence[int], spare: Any) -> bool:
        if spare is not None:
            spare.join(rank)
        elif config.spares:
            replacement.begin_beside_spares(rank, len(config.seats))
        elif dead:
            replacement.join(dead)
        return spare is not None or bool(config.spares or dead)

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._has_loaded = False
        self._stub = stubs.command("rank", os.path.join(rank.config.session_dir, "host-agent"))
        folders = tuple(filter(own_files.is_own_folder, rank.config.kept_dirs))
        several = rank.config.several_hosts
        if folders:
            # The host agent removes its files.
            world.current().variable_store = VariableStore(
                folders,
                rank.rank,
                rank.size,
                rank.shell.user_ns,
                here=(lambda: world.current().local_ranks) if several else None,
            )

    def message_received(self, record: wire.Record, payloads: list[bytes]) -> None:
        world.current().lacks_variables = False  # what is kept may now be older

    def request_received(self, name: str, arguments: dict[str, Any]) -> bool:
        if name == requests.HEAL:
            self._joins += 1  # until it is answered
            self._asked = arguments
        # The main thread may wait in MPI for a host that is lost, and no longer return.
        return name == requests.SAVE and self._joins > 0

    def handover_fields(self) -> dict[str, Any]:
        return {"healing": self._joins > 0, "heal": self._asked}

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        if name == requests.HEAL:
            try:
                return {"warning": self._heal(arguments)}, []
            finally:
                self._joins = max(0, self._joins - 1)
        if name == requests.RESTORE:
            return self._restore(**arguments), []
        if name == requests.SAVE:
            return self._save(), []
        if name == requests.LOAD:
            return self._load(**arguments), []
        return self._settle(), []

    def _heal(self, arguments: dict[str, Any]) -> str:
        # Two notebooks may have asked for the same: the ranks have joined then.
        if arguments == self._joined:
            return ""
        dead, epoch = arguments["dead"], arguments["epoch"]
        warning: str = self._rank.begin_epoch(lambda: self._join(dead, epoch))
        self._joined = arguments
        return warning

    def _join(self, dead: list[int], epoch: int) -> str:
        """Joins with the processes that replace dead ranks; returns a warning, or "".

        Collective over the survivors, which have left their collectives, and the replacements.
        """
        rank = self._rank
        if not rank.config.several_hosts:
            port_filter.restrict_own_ports(allow_this_host=True)
        replacement.replace_ranks(dead, self._stub, epoch)
        # The features restore their state before the next cell.
        return rank.rank_replaced(dead)

    def _settle(self) -> dict[str, Any]:
        this = world.current()
        kept: VariableStore | None = this.variable_store
        if kept is None:
            return {"goes_on": 0, "version": 0, "new": this.lacks_variables}
        if self._has_loaded:
            self._has_loaded = False
            kept.of_life.drop()
        goes_on = kept.settled()
        # The newest version may be one for which it has waited.
        newest = kept.of_cells.newest()
        return {"goes_on": goes_on, "version": newest, "new": this.lacks_variables}

    def _restore(self, version: int, saved: list[int]) -> dict[str, Any]:
        world.current().lacks_variables = False
        kept: VariableStore | None = world.current().variable_store
        try:
            found = kept.of_cells.load(version) if kept is not None else None
        except Exception as error:  # an object's own way to be unpickled may do anything
            raise UsageError(
                f"what rank {self._rank.rank} kept cannot be read: {type(error).__name__}: "
                f"{text_of(error)}"
            ) from None
        at, values = found or (time.time(), {})
        names = self._rank.shell.user_ns
        names.update(values)
        if self._rank.rank in saved:
            # Newer than what was kept: the rank ended after its cell.
            before = set(names)
            problem = self._load_saved()
            self._store().of_life.drop()
            if problem:
                self._rank.notice(f"its variables cannot be read: {problem}")
            else:
                new = (name for name in names.keys() - before if not ismodule(names[name]))
                values = dict.fromkeys([*values, *sorted(new)])
        return {"names": list(values), "seconds": time.time() - at if values else 0.0}

    def _store(self) -> VariableStore:
        kept: VariableStore | None = world.current().variable_store
        if kept is None:
            raise UsageError("it has no folder to save them in")
        return kept

    def _save(self) -> dict[str, Any]:
        kept, shell, this = self._store(), self._rank.shell, world.current()
        goes_on = kept.settled()
        own = saved_names.own_names(shell, namespace.names(self._rank.device))
        parts, left = saved_names.dump(own, shell.user_global_ns)
        kept.of_life.write(1, {self._rank.rank: pieces_of(parts)})
        if problem := kept.of_life.settle():
            raise UsageError(f"they could not be saved: {problem}")
        sets = {str(number): list(ranks) for number, ranks in this.sets.items()}
        return {"sets": sets, "goes_on": goes_on, "left": left, "new": this.lacks_variables}

    def _load(self, sets: dict[str, list[int]], saved: list[int]) -> dict[str, Any]:
        """Collective over all ranks if there are process sets."""
        world.current().lacks_variables = True
        process_sets.make_again({int(number): tuple(ranks) for number, ranks in sets.items()})
        # The file stays until all ranks have loaded theirs: else all start once more.
        self._has_loaded = True
        if self._rank.rank not in saved:
            return {"problem": ""}
        problem = self._load_saved()
        # If it cannot load them, it takes back what was kept.
        world.current().lacks_variables = bool(problem)
        return {"problem": problem}

    def _load_saved(self) -> str:
        """Reads the variables that this rank's former process has saved; returns the problem."""
        kept = self._store()
        try:
            data = kept.of_life.read(1)
            if data is None:
                raise FileNotFoundError("the file is gone")
            saved_names.load(wire.parts(data), self._rank.shell.user_global_ns)
        except Exception as error:  # an object's own way to be unpickled may do anything
            return f"{type(error).__name__}: {text_of(error)}"
        return ""


FEATURE = RankHeal
