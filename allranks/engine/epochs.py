"""The epochs of a rank between its cells: all ranks of one host begin and end them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.world import World
from allranks.engine.wire import RankWire
from allranks.records.wire import EpochBegun, EpochEnded

BeginEpoch = Callable[[Callable[[], object]], object]


class RankEpochs:
    """Ends an epoch where code outside of cells has failed; the next cell begins another one.

    So may other such code, on one host. An idle rank then joins the ranks that begin one. On
    several hosts only the next cell does.

    ``call_soon`` calls a function in the rank's event loop, from any thread.

    Attributes:
        in_request: what runs here that is no cell: the id of its ``client``, and the ``notebook``
            of that, for people. None for nothing. The feature that runs it sets it.
    """

    def __init__(
        self, wire: RankWire, begin_epoch: BeginEpoch, call_soon: Callable[..., object]
    ) -> None:
        self._wire, self._begin_epoch, self._call_soon = wire, begin_epoch, call_soon
        self.in_request: dict[str, str] | None = None
        reporter = world.current().line_reporter
        if reporter is not None:
            reporter.also.append(self._look)
            reporter.is_idle = lambda: not self._is_busy()

    def note_use(self) -> None:
        """Publishes whether this rank has used MPI in this epoch."""
        this = world.current()
        if this.traffic:
            this.board.put(fields.USED, this.epoch + 1)

    def fail_request(self, number: int, why: str) -> None:
        """Publishes that a request has failed here; other ranks need not wait for this one."""
        this = world.current()
        if number:
            this.board.put(fields.REQUEST, number)
        if not this.shared_by_all:
            # Ranks of other hosts learn of it only in a wait, which may be after their next
            # request has begun: the next cell begins an epoch.
            self._wire.send(EpochEnded(this.rank, this.epoch))
            return
        used = this.epoch + 1 in this.board.column(fields.USED)
        awaited = any(this.board.get(rank, fields.TICKET) for rank in other_ranks(this))
        if used or awaited or this.unfinished:
            this.spoil(why)

    def enter(self) -> None:
        """Begins another epoch if a request has ended this one; all ranks take part."""
        this = world.current()
        # A new communicator needs all ranks.
        if this.epoch_ends and not this.died and this.shared_by_all:
            this.board.put(fields.BEGINS, this.epoch + 1)
            if this.wake_exchange is not None:
                this.wake_exchange()
            self._begin(this)

    def _look(self) -> None:
        """Joins ranks that begin an epoch, if this one is idle. In a thread of the rank."""
        # The current world may be that of some ranks, with a board of its own.
        with suppress(Exception):
            if self._is_called():
                self._call_soon(self._join)

    def _join(self) -> None:
        if self._is_called():
            with suppress(Exception):  # a rank has died: those that began it report it
                self._begin(world.current())

    def _is_called(self) -> bool:
        this = world.current()
        return not self._is_busy() and this.epoch + 1 in this.board.column(fields.BEGINS)

    def _is_busy(self) -> bool:
        return self.in_request is not None or self._wire.busy

    def _begin(self, this: World) -> None:
        self._begin_epoch(lambda: collectives.renew(this.epoch + 1))
        self._wire.send(EpochBegun(this.rank, this.epoch))


def other_ranks(this: World) -> Iterator[int]:
    return (rank for rank in this.board.ranks if rank != this.board.rank)
