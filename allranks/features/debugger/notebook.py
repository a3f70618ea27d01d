"""Gives the front end's debugger the ranks of the notebook."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster import cluster
from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.features.debugger.debug_session import DebuggedRanks, DebugSession
from allranks.features.debugger.records import DebugMessage
from allranks.records.wire import Record

#: Cells that begin with one of these run on ranks.
_FOR_RANKS = ("%%distributed", "%%rank", "%%px", "%%ensemble")


class NotebookDebugger(NotebookFeature):
    """Attaches the front end's debugger to the ranks, and passes messages on."""

    arriving = (DebugMessage,)
    in_cells = False  # until a front end debugs
    session: ClassVar[DebugSession | None] = None
    """The debugger of this process's kernel, if it has one."""

    def __init__(self) -> None:
        self.ranks: DebuggedRanks | None = None

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        kernel: Any = getattr(shell, "kernel", None)
        if cls.session is None and getattr(kernel, "debugger", None) is not None:
            attached = partial(setattr, cls, "in_cells")
            cls.session = DebugSession(kernel, _Cells(shell), _ranks, attached)

    def started(self, cluster: ClusterContext) -> None:
        self.ranks = DebuggedRanks(cluster.size, cluster.send)

    def cell_started(self) -> None:
        if self.session is None or self.ranks is None or self.ranks is not _ranks():
            return  # ranks of a Cluster in the notebook
        assert self.cell is not None
        self.ranks.pending = self.cell.pending
        self.session.cell_started(self.ranks, self.cell.number, self.cell.ranks)
        self.cell.poll(self._is_paused)

    def _is_paused(self) -> bool:
        assert self.session is not None
        assert self.ranks is not None
        if not self.ranks.paused:
            return False
        self.session.look()
        return True

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        if not isinstance(record, DebugMessage):
            return record
        if self.session is not None and self.ranks is not None:
            self.session.take(self.ranks, record)
        return None

    def cell_finished(self) -> None:
        self._end()

    def rank_died(self, rank: int) -> None:
        if self.ranks is not None:
            self.ranks.attached.discard(rank)
            if self.session is not None and self.ranks is _ranks():
                self.session.rank_died(rank)

    def stopped(self) -> None:
        self._end()
        self.ranks = None

    def _end(self) -> None:
        if self.ranks is not None:
            self.ranks.pending = tuple
            if self.session is not None and self.ranks is _ranks():
                self.session.cell_ended()


def _ranks() -> DebuggedRanks | None:
    session = cluster.session
    running = None if session is None else session.running
    found = () if running is None else running.cells.hooks.features
    return next((one.ranks for one in found if isinstance(one, NotebookDebugger)), None)


class _Cells:
    """Knows which cells run on the ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    @property
    def every(self) -> bool:
        return bool(getattr(self._toggle, "is_on", False))

    @property
    def _toggle(self) -> Any:
        # The setting of the magics, which import no feature.
        return getattr(self._shell.magics_manager.registry.get("DistributedMagics"), "toggle", None)

    def for_ranks(self, code: str) -> bool:
        first = code.lstrip()
        if first.startswith(_FOR_RANKS):
            return True
        local = ("%%local", *getattr(self._toggle, "commands", ()))
        return self.every and not first.startswith(local)


FEATURE = NotebookDebugger
