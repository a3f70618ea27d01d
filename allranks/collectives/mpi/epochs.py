"""The communicators of one rank: one for life, and a fresh one for each epoch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import mmap
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls.call import LONGEST_SLEEP, Members, Pause, Steps
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.mpi.agreement import Hosts, MultiHostAgreement
from allranks.collectives.mpi.multi_host import MultiHostTransport
from allranks.collectives.mpi.transport import MpiTransport, complete
from allranks.errors import RankLost
from allranks.records.deferred import deferred

_LOOKS = 20
"""Calls of MPI that a waiting rank makes every 20 ms, so that other ranks' transfers progress."""
_TOLD_SECONDS = 5.0
_DEATHS = {
    getattr(MPI, name, MPI.ERR_LASTCODE)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
}
NAME = "MPI_COMM_WORLD"
"""MPI's name of the communicator of all ranks, which `user` stands for."""


class Epochs:
    """The communicators of one rank, epoch by epoch. ``pristine`` is used for nothing but making
    the next epoch's communicator. ``user`` stands for each epoch's communicator in turn; ``alone``
    is the same for this rank alone. ``renewed`` is called with the epoch's number once it has
    begun.
    """

    def __init__(
        self,
        own: RankState,
        user: Any,
        alone: Any,
        pristine: MPI.Intracomm,
        renewed: Callable[[int], None],
    ) -> None:
        self.own, self.user, self.alone = own, user, alone
        self.pristine = pristine
        self._renewed = renewed
        self._renewing: tuple[int, Steps[MPI.Intracomm]] | None = None
        # Never freed: freeing one that was left in the middle of a call makes MPICH return wrong
        # results later.
        self._retired: list[MPI.Intracomm] = []

    def transport(self, members: Members, *, now: bool) -> MpiTransport:
        return MpiTransport(self.own, members, self.user, now=now)

    def bridge(
        self, members: Members, hosts: Hosts, memory: mmap, flat: MpiTransport
    ) -> tuple[MultiHostAgreement, MultiHostTransport]:
        agreement = MultiHostAgreement(self.own, members, hosts, memory, self.user)
        return agreement, MultiHostTransport(agreement, flat)

    def renew(self, epoch: int) -> None:
        """Moves this rank to a fresh communicator. Collective over all ranks."""
        with deferred() as held:
            if self._renewing is None or self._renewing[0] != epoch:
                self._renewing = epoch, self._renew_steps()
            steps = self._renewing[1]
            pause = Pause()
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    fresh: MPI.Intracomm = end.value
                    break
                # An interrupt is raised here; the next call continues where this one was left.
                held.leave()
                pause()
            self._renewing = None
            self._retired.append(MPI.Intracomm(self.user))
            fresh.Set_name(NAME)
            rebind(self.user, fresh)
            self._renewed(epoch)

    def take_over(self, pristine: MPI.Intracomm, fresh: MPI.Intracomm) -> None:
        """Replaces the communicators of all ranks, some of which are new; the old ones are kept."""
        self._retired += [self.pristine, MPI.Intracomm(self.user)]
        self._renewing = None
        self.pristine = pristine
        fresh.Set_name(NAME)
        rebind(self.user, fresh)

    def lost_by(self, error: Exception) -> RankLost | None:
        """The `RankLost` for an MPI error that reports a rank's death; None for other errors."""
        if not reports_death(error):
            return None
        pause, died = Pause(), self.own.died
        # MPI may report the death before the reason has arrived.
        while not died and pause() < _TOLD_SECONDS:
            pass
        how = "; ".join(f"rank {rank} {how}" for rank, how in sorted(died.items()))
        return RankLost(f"MPI cannot continue without a rank that has died: {how or error}")

    def nudge(self) -> None:
        """Lets MPI progress transfers between ranks."""
        try:
            for _ in range(_LOOKS):
                self.pristine.Iprobe()
        except MPI.Exception as error:
            if not reports_death(error):
                raise

    def _renew_steps(self) -> Steps[MPI.Intracomm]:
        kept, awaited = self.own.held_requests, _Renewal()
        fresh, request = self.pristine.Idup()
        kept[id(request)] = [fresh, request]
        while not request.Test():
            yield awaited
        # No rank may use, let alone revoke, the new one while another rank is still creating it.
        yield from complete(kept, awaited, self.pristine.Ibarrier)
        return fresh


def reports_death(error: BaseException) -> bool:
    return isinstance(error, MPI.Exception) and error.Get_error_class() in _DEATHS


class _Renewal:
    """The awaited object of a renewal."""

    stage = 0
    longest_sleep = LONGEST_SLEEP


def rebind(comm: MPI.Comm, fresh: MPI.Comm) -> None:
    """Makes a communicator object stand for another communicator."""
    kind = ctypes.c_uint64 if MPI._sizeof(MPI.Comm) == 8 else ctypes.c_uint32
    # In place: the user's `comm` lives as long as the notebook, and many cells refer to it, but
    # its communicator changes with the epoch.
    kind.from_address(MPI._addressof(comm)).value = kind.from_address(MPI._addressof(fresh)).value
