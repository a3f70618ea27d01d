"""A world within the world: some ranks in a row are all the ranks there are.

Inside it every function of this package, and whatever is built on them, means those ranks only:
``rank()``, ``size()``, ``allreduce``, process sets, ``comm``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from allranks.collectives import world
from allranks.collectives.start.stand_in import stand_in
from allranks.collectives.start.under_mpi import load_mpi, start
from allranks.collectives.world.world import ALONE, World


def divide(ranks_each: int) -> World:
    """Returns the world of this rank and its neighbours, ``ranks_each`` of them in a row.

    Collective over all ranks where ``ranks_each`` is more than 1.
    """
    whole = world.current()
    mpi = load_mpi()
    base = mpi.Intracomm(mpi.COMM_SELF)
    if ranks_each > 1:
        assert whole.mpi is not None
        base = whole.mpi.pristine.Split(whole.rank // ranks_each, whole.rank)
    part = start(base)
    part.checks, part.late_seconds, part.notice = whole.checks, whole.late_seconds, whole.notice
    part.journal = whole.journal
    return part


@contextmanager
def inside(part: World) -> Iterator[None]:
    """Within, ``part`` is the world of this process, in all of its threads."""
    whole = world.current()
    world.set_process(part)
    stand_in(part)
    try:
        with part.meeting.held() if part.meeting is not None else nullcontext():
            yield
    finally:
        # What was registered inside is gone with it. Its communicators of NCCL are not ended here:
        # neighbours may still be inside, and be served by this rank's end of them.
        part.sets.clear()
        for number in [*part.groups]:
            if number not in (0, ALONE):
                part.close(number)
        world.set_process(whole)
        stand_in(whole)
