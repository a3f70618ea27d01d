"""MPI.COMM_WORLD and its like, as mpi4py has them, are the guarded ones."""

from __future__ import annotations

from allranks.collectives.world.world import World


def stand_in(world: World) -> None:
    """From now on mpi4py's own names mean the guarded communicators of ``world``.

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
    }
    for name, value in names.items():
        setattr(MPI, name, value)
