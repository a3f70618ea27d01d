"""Passes a rank's hooks on to what looks after its waits in torch and in JAX."""

from __future__ import annotations

from allranks.engine.features import RankContext, RankFeature
from allranks.features.torch_jax import other_ranks
from allranks.features.torch_jax.jax_waits import JaxWaits
from allranks.features.torch_jax.torch_waits import TorchWaits
from allranks.records.wire import RunCell


class LibraryWaits(RankFeature):
    """Ends waits in a library's own collectives that can never complete."""

    def __init__(self) -> None:
        self._all = (TorchWaits(), JaxWaits())

    def started(self, rank: RankContext) -> None:
        """Begins to look at both libraries, several times a second."""
        self._mpi_ports = rank.mpi_ports
        for waits in self._all:
            waits.start()

    def cell_started(self, cell: RunCell) -> None:
        """Forgets the waits of the last cell."""
        other_ranks.show_mpi_ports(self._mpi_ports)
        for waits in self._all:
            waits.begin()

    def interrupted(self) -> None:
        """Lets a wait end that no signal reaches."""
        for waits in self._all:
            waits.press()

    def hidden_frames(self) -> tuple[str, ...]:
        """Returns the libraries' folders if a wait in them has been ended."""
        return tuple(part for waits in self._all for part in waits.not_to_blame)

    def error_raised(self, error: BaseException) -> BaseException:
        """Returns `RankLeft` for what a library raised because its wait was ended."""
        for waits in self._all:
            error = waits.instead_of(error)
        return error

    def cell_finished(self, error: BaseException | None) -> None:
        """Ends waits that other ranks still have for this one."""
        for waits in self._all:
            waits.leave(error)

    def epoch_ended(self, epoch: int) -> None:
        """Forgets connections that a rank closed in that epoch."""
        for waits in self._all:
            waits.renew(epoch)

    def rank_replaced(self, dead: list[int]) -> str:
        """Returns the libraries' advice on groups that had a dead rank in them."""
        return " ".join(filter(None, (waits.after_death() for waits in self._all)))


FEATURE = LibraryWaits
