"""A rank's waits in the collectives of other libraries, whichever they are."""

from __future__ import annotations

from allranks.engine.libraries.jax_waits import JaxWaits
from allranks.engine.libraries.torch_waits import TorchWaits


class Waits:
    """Looks after them all."""

    def __init__(self) -> None:
        self._jax = JaxWaits()
        self._all = (TorchWaits(), self._jax)

    def start(self) -> None:
        """From now on they are looked at, several times a second."""
        for waits in self._all:
            waits.start()

    def begin(self) -> None:
        """A cell begins."""
        for waits in self._all:
            waits.begin()

    def press(self) -> None:
        """The cell has been interrupted."""
        for waits in self._all:
            waits.press()

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        """Parts of the names of files whose frames say nothing: a wait in them has been ended."""
        return tuple(part for waits in self._all for part in waits.not_to_blame)

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns what a cell has ended with: `RankLeft` for what one of them has raised."""
        for waits in self._all:
            error = waits.instead_of(error)
        return error

    def leave(self, error: BaseException | None) -> None:
        """Takes in that the cell has ended."""
        for waits in self._all:
            waits.leave(error)

    def after_death(self) -> str:
        """What is to be known where another rank has died and this one goes on; "" for nothing."""
        return self._jax.after_death()

    def renew(self, epoch: int) -> None:
        """Between two cells: forgets connections that a rank has closed in the epoch before."""
        for waits in self._all:
            waits.renew(epoch)
