"""What needs MPI itself: communicators, epochs, agreement between hosts. Runs in every rank."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from allranks.collectives.calls.wait import YIELD_SECONDS, Awaited, Steps
from allranks.collectives.mpi.letters import Messages
from allranks.collectives.mpi.transport import Mpi, complete
from allranks.collectives.ops.communicator import Comm
from allranks.records.deferred import deferred

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call
    from allranks.collectives.world.group import Group
    from allranks.collectives.world.world import World

_CREATE_TAG = 29
_STEP_SECONDS = 2e-4


class MpiSide:
    """The communicators of one rank.

    ``pristine`` is used for nothing but making the next epoch's communicator. A communicator
    that has been left in the middle of a call is never freed: freeing one makes MPICH return
    wrong results later.
    """

    def __init__(self, world: World, base: MPI.Intracomm) -> None:
        self.world = world
        self.pristine = base.Dup()
        self.user = Comm(base.Dup())
        self.user.bind(world, 0)
        self.messages = Messages(world, base.Dup()) if len(set(world.hosts)) > 1 else None
        self._renewing: tuple[int, Steps[MPI.Intracomm]] | None = None
        self._retired: list[MPI.Intracomm] = []
        if self.messages is not None:
            world.attend_messages = self.messages.receive

    def open(self, group: Group, *, now: bool = False) -> None:
        """Gives a group its way through MPI.

        ``now``: all members are here, and none can be interrupted. Members that share no memory
        could not wait for each other later on, before the communicator is there.
        """

        def make(awaited: Awaited) -> Steps[MPI.Intracomm]:
            return self._make(group, awaited)

        way = group.transports["mpi"] = Mpi(group, make)
        if now and group.channel is None and not self._is_world(group):
            way.use(self._create(group))

    def _make(self, group: Group, awaited: Awaited) -> Steps[MPI.Intracomm]:
        """A communicator of a group's members, who have all arrived."""
        if self._is_world(group):
            comm, request = self.user.Idup()
            while not request.Test():
                yield awaited
            return comm
        with deferred():
            return self._create(group)

    def _is_world(self, group: Group) -> bool:
        return group.ranks == tuple(range(self.world.size))

    def _create(self, group: Group) -> MPI.Intracomm:
        """There is no non-blocking call for this: it is made when all members are certain to."""
        members = self.user.Get_group().Incl(list(group.ranks))
        return self.user.Create_group(members, _CREATE_TAG + group.number)

    def renew(self, epoch: int) -> None:
        """Moves this rank to a fresh communicator. Collective over all ranks.

        An interrupt is heard between two steps; the next call goes on where this one was left.
        """
        with deferred() as held:
            if self._renewing is None or self._renewing[0] != epoch:
                self._renewing = epoch, self._renew_steps()
            steps = self._renewing[1]
            began = time.perf_counter()
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    fresh: MPI.Intracomm = end.value
                    break
                held.leave()
                if time.perf_counter() - began > YIELD_SECONDS:
                    time.sleep(_STEP_SECONDS)
            self._renewing = None
            self._retired.append(MPI.Intracomm(self.user))
            _rebind(self.user, fresh)
            self.world.renewed(epoch)

    def _renew_steps(self) -> Steps[MPI.Intracomm]:
        kept, awaited = self.world.kept, _Everyone(self.world)
        fresh, request = self.pristine.Idup()
        kept[id(request)] = [fresh, request]
        while not request.Test():
            yield awaited
        # Nobody may use, let alone revoke, the new one while somebody is still building it.
        yield from complete(kept, awaited, self.pristine.Ibarrier)
        return fresh

    def agree(self, group: Group, call: Call, extent: int) -> Steps[None]:
        """Agreement of ranks that share no memory."""
        assert self.messages is not None
        yield from self.messages.agree(group, call, extent)

    def missing(self, group: Group, call: Call) -> tuple[int, ...]:
        """The ranks that have not been heard of in this call."""
        assert self.messages is not None
        return self.messages.missing(group, call)

    def tell(self) -> None:
        """Lets ranks on other hosts know that this one has left."""
        if self.messages is not None:
            self.messages.tell()


class _Everyone:
    """What a renewal waits for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stage = 0

    def missing(self) -> tuple[int, ...]:
        return tuple(range(self.world.size))


def _rebind(comm: MPI.Intracomm, fresh: MPI.Intracomm) -> None:
    """Makes a communicator object stand for another communicator.

    The user's `comm` lives as long as the notebook and is named in many cells; what it stands
    for changes with the epoch.
    """
    kind = ctypes.c_uint64 if MPI._sizeof(MPI.Comm) == 8 else ctypes.c_uint32
    kind.from_address(MPI._addressof(comm)).value = kind.from_address(MPI._addressof(fresh)).value
