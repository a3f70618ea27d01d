"""Runs the cells of simulated ranks in the process of one rank."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import replace
from time import monotonic
from typing import Any

from allranks.engine.exceptions import report
from allranks.engine.features import RankContext, RankFeature, Replies
from allranks.features.simulate.records import RunSimulated
from allranks.records.wire import Record, Reply, RunCell

_NEWS_SECONDS = 1.0
"""Output of a cell that takes longer is sent so often, so that equal lines meet in one message."""


class RankSimulation(RankFeature):
    """Runs simulated ranks; those of each size keep their variables."""

    dormant = True
    records = (RunSimulated,)

    def __init__(self) -> None:
        self._ranks: dict[int, Any] = {}
        self._kinds: tuple[Any, Any] | None = None
        self._cell: Any = None
        self._news_at = 0.0

    def started(self, rank: RankContext) -> None:
        self._context = rank

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, RunSimulated):
            self._context.activate(self)
            cell = RunCell(
                cell=record.cell,
                source="",
                number=record.number,
                ranks=(),
                label=record.label,
                want_value=False,
                limit_nbytes=record.limit_nbytes,
            )
            self._context.submit(cell, lambda: self._run(record, cell))

    def output_sending(self, final: bool) -> None:
        cell = self._cell
        if cell is not None and not final and monotonic() >= self._news_at:
            self._news_at = monotonic() + _NEWS_SECONDS
            for message, payloads in cell.news():
                self._context.wire.send(message, *payloads)

    async def _run(self, record: RunSimulated, cell: RunCell) -> Replies:
        # Not at the top of the file: this import starts MPI, and the file is loaded before ranks
        # are forked.
        global _running
        self._context.epochs.enter()
        try:
            # Once: a cell may empty sys.modules.
            if self._kinds is None:
                from allranks.features.simulate.cell import SimulatedCell
                from allranks.features.simulate.exploration import ExploredCell

                self._kinds = SimulatedCell, ExploredCell
        except Exception as error:  # such as a greenlet for another Python
            lines = traceback.format_exception(error)
            said = report(error, lines, 0, "simulated", "")
            return tuple(
                (
                    Reply(rank=rank, cell=record.cell, status="error", seconds=0.0, dirty=False,
                          has_value=False, value_problem="", report=replace(said, rank=rank)),
                    [],
                )
                for rank in range(record.size)
            )  # fmt: skip
        self._news_at = monotonic() + _NEWS_SECONDS
        kind = self._kinds["explore" in record.options]
        _running = running = kind(self._context, record, self._ranks)
        self._cell = running
        try:
            # As a call, it is run in the main thread, which accepts interrupts.
            call = pickle.dumps((_run_here, (), {}))
            ((reply, _),) = await self._context.execute(cell, [call], lambda: None)
        finally:
            self._cell = None
        return running.replies(reply)


_running: Any = None


def _run_here() -> None:
    _running.run()


FEATURE = RankSimulation
