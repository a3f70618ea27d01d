"""MPI.COMM_WORLD and its like, as mpi4py has them, are the guarded ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

from allranks.collectives.world.world import World
from allranks.errors import UsageError


def stand_in(world: World) -> None:
    """From now on mpi4py's own names mean the guarded communicators of ``world``.

    So does its `Finalize`, which in a notebook is refused.

    Whoever has taken the plain ones before has them still.
    """
    from mpi4py import MPI

    from allranks.collectives.ops.requests import Prequest, Request
    from allranks.collectives.ops.windows_and_files import File, Win

    assert world.mpi is not None
    names = {
        "COMM_WORLD": world.mpi.user,
        "COMM_SELF": world.mpi.alone,
        "Request": Request,
        "Prequest": Prequest,
        "Win": Win,
        "File": File,
        "Finalize": _finalize(world, inspect.unwrap(MPI.Finalize)),
    }
    for name, value in names.items():
        setattr(MPI, name, value)


def _finalize(world: World, plain: Callable[[], None]) -> Callable[[], None]:
    """MPI_Finalize, which a rank's own end finds beneath it (`exit.finish`)."""

    @wraps(plain)
    def finalize() -> None:
        if world.notebook:
            # The next call of MPI would end this rank, and with it all others.
            raise UsageError(
                "MPI.Finalize() needs a rank that ends: this one is a notebook's, and its next "
                "cell needs MPI. Leave the line out; MPI ends with the ranks, and these with "
                "%distributed stop."
            )
        plain()

    return finalize
