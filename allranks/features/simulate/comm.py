"""mpi4py's communicators for simulated ranks.

Data is packed and reduced by MPI itself, in this process. A method stands for the rank that runs:
all ranks share the object MPI.COMM_WORLD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.calls.call import Call, Offer, Steps, nbytes_of
from allranks.collectives.calls.specs import Spec
from allranks.collectives.ops import operations
from allranks.collectives.ops.buffers import name_of_op
from allranks.collectives.ops.communicator import Comm as RealComm
from allranks.collectives.world.world import ALONE, Group
from allranks.errors import UsageError
from allranks.features.simulate.buffer_collectives import PLANS
from allranks.features.simulate.messaging import Messaging
from allranks.features.simulate.requests import (
    CollectiveRequest,
    SimulatedRequest,
    refuse_missing,
    running_world,
    time_by_network,
)
from allranks.features.simulate.world import SimulatedWorld, open_group


class SimulatedComm(Messaging):
    """A communicator of simulated ranks, with mpi4py's methods."""

    def __init__(self, number: int | SimulatedComm, name: str = "", lasting: bool = False) -> None:
        # MPI.Intracomm(comm) is another name of it.
        self._number: int = number._number if isinstance(number, SimulatedComm) else number
        self.name, self._lasting = name, lasting

    # Its ranks.

    def _group(self) -> Group:
        found = running_world().groups.get(self._number)
        if found is None:
            raise UsageError(
                "a communicator from Split(), Dup() or Create_…() lasts until an error or an "
                "interrupt ends its epoch, or Free(). Make it again, as in the cell that made it."
            )
        return found

    def Get_rank(self) -> int:
        """This rank's number in it."""
        return self._group().me

    def Get_size(self) -> int:
        """The number of its ranks."""
        return self._group().size

    @property
    def rank(self) -> int:
        """This rank's number in it."""
        return self._group().me

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return self._group().size

    @property
    def _world(self) -> SimulatedWorld:
        return running_world()

    def Get_name(self) -> str:
        """Its name."""
        return self.name

    def Set_name(self, name: str) -> None:
        """Names it."""
        self.name = name

    def Is_inter(self) -> bool:
        """False: there are no intercommunicators."""
        return False

    def Is_intra(self) -> bool:
        """True."""
        return True

    is_inter, is_intra = False, True

    def Get_topology(self) -> int:
        """No topology."""
        return int(MPI.UNDEFINED)

    def Set_errhandler(self, errhandler: Any) -> None:
        """Does nothing: errors are exceptions."""

    def Get_attr(self, keyval: int) -> Any:
        """Those of real communicators."""
        return MPI.COMM_WORLD.Get_attr(keyval)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedComm) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        if not self._lasting:
            raise ValueError("a communicator that the program has made cannot be pickled")
        return _lasting, (self._number == ALONE,)

    def __getattr__(self, name: str) -> Any:
        refuse_missing(self, name, MPI.Cartcomm, "comm")

    # Collectives of objects: those of real communicators, whose methods call `_group` and `_world`.

    bcast = RealComm.bcast
    gather = RealComm.gather
    allgather = RealComm.allgather
    scatter = RealComm.scatter
    alltoall = RealComm.alltoall
    reduce = RealComm.reduce
    scan = RealComm.scan
    exscan = RealComm.exscan
    _rooted: Any = RealComm._rooted
    _objects = RealComm._objects
    _one_a_rank = RealComm._one_a_rank

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces picklable objects to every rank, in the order of the ranks."""
        # Reduced once, and not on each of the ranks, which would unpickle all objects.
        data = operations.dumps(sendobj)
        call = self._exchange(
            "allreduce",
            data,
            lambda parts: operations.dumps(fold(op, map(operations.loads, parts))),
            reduction=name_of_op(op),
        )
        return operations.loads(self._world.run(call))

    # Collectives of buffers.

    def _exchange(
        self,
        op: str,
        part: Any,
        make: Callable[[list[Any]], Any],
        root: int | None = None,
        nbytes: int | None = None,
        reduction: str = "",
    ) -> Call:
        """A call whose result is what ``make`` makes of all ranks' parts."""
        group = self._group()
        whom = -1 if root is None else group.ranks[self._rooted(op, root)]
        size = nbytes_of(part) if nbytes is None else nbytes

        def steps(call: Call) -> Steps[Any]:
            call.transport = "shared"
            slot = call.agreement.upcoming()  # type: ignore[attr-defined]
            slot.bring(group.me, part, make)
            yield from call.agreed(Offer(size))
            return slot.result

        return group.call(Spec(f"comm.{op}", reduction, root=whom), op, size, steps)

    def Barrier(self) -> None:
        """MPI_Barrier."""
        self._world.run(self._exchange("Barrier", None, lambda parts: None))

    barrier = Barrier

    def Ibarrier(self) -> SimulatedRequest:
        """MPI_Ibarrier."""
        return CollectiveRequest(self._world, self._exchange("Ibarrier", None, lambda parts: None))

    # Windows, files, processes.

    @staticmethod
    def Get_parent() -> Any:
        """The null communicator: no process has started the ranks by MPI."""
        return MPI.COMM_NULL

    def Abort(self, errorcode: int = 0) -> None:
        """Ends this rank's part in the cell."""
        raise SystemExit(errorcode or 1)

    def Free(self) -> None:
        """MPI_Comm_free."""
        if self._lasting:
            raise UsageError(
                "comm.Free() needs a communicator that the program has made: this one lasts as "
                "long as the ranks do."
            )
        running_world().close(self._number)

    Disconnect = Free

    def free(self) -> None:
        """`Free`, if the communicator can be freed."""
        if not self._lasting and self._number in running_world().groups:
            self.Free()

    # Communicators.

    def _made(self, op: str, part: Any, make: Callable[[list[Any]], Any], kind: Any = None) -> Any:
        """A communicator of some ranks: ``make`` returns them in order, for each rank."""
        world, parent = running_world(), self._group()
        call = self._exchange(
            op,
            (world.made, part),
            lambda parts: (max(made for made, _ in parts) + 1, make([one for _, one in parts])),
            nbytes=8,
        )
        number, members = world.run(call)
        world.made = number
        places = members[parent.me]
        ranks = tuple(parent.ranks[place] for place in places)
        world.run(open_group(parent, Spec(f"comm.{op} group"), world, number, ranks))
        return (kind or SimulatedIntracomm)(number) if places else MPI.COMM_NULL

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """MPI_Split: a communicator for each colour; the null communicator for UNDEFINED."""
        if color < 0 and color != MPI.UNDEFINED:
            raise UsageError(
                f"comm.Split needs a colour from 0 on, or MPI.UNDEFINED: found color={color}."
            )

        def members(parts: list[Any]) -> list[list[int]]:
            ordered: dict[int, list[int]] = {}
            for place in sorted(range(len(parts)), key=lambda place: (parts[place][1], place)):
                ordered.setdefault(parts[place][0], []).append(place)
            return [[] if of == MPI.UNDEFINED else ordered[of] for of, _ in parts]

        return self._made("Split", (int(color), int(key)), members)

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """MPI_Comm_split_type: the ranks of each host; the null communicator for UNDEFINED."""
        world = running_world()
        of_none = split_type == MPI.UNDEFINED
        return self.Split(MPI.UNDEFINED if of_none else world.hosts[world.rank], key)

    def Dup(self, info: Any = None) -> Any:
        """MPI_Comm_dup."""
        return self._made(
            "Dup", None, lambda parts: [list(range(len(parts)))] * len(parts), self._like
        )

    def Dup_with_info(self, info: Any) -> Any:
        """MPI_Comm_dup_with_info."""
        return self.Dup()

    def Clone(self) -> Any:
        """`Dup`."""
        return self.Dup()

    def _like(self, number: int) -> SimulatedComm:
        """A communicator with this one's topology."""
        return SimulatedIntracomm(number)

    def Idup(self, info: Any = None) -> tuple[Any, SimulatedRequest]:
        """MPI_Comm_idup; the communicator exists at once, and the request has completed."""
        return self.Dup(info), SimulatedRequest()

    def Idup_with_info(self, info: Any) -> tuple[Any, SimulatedRequest]:
        """MPI_Comm_idup_with_info."""
        return self.Idup()

    def Get_group(self) -> RankGroup:
        """MPI_Comm_group."""
        return RankGroup(self._group().ranks)

    @property
    def group(self) -> RankGroup:
        """Its ranks."""
        return self.Get_group()

    def Create(self, group: RankGroup) -> Any:
        """MPI_Comm_create: a communicator of the ranks of a group."""
        here = self._group().ranks
        places = [here.index(rank) for rank in group.ranks]
        mine = places if self._group().me in places else []
        return self._made("Create", mine, lambda parts: parts)

    def Create_group(self, group: RankGroup, tag: int = 0) -> Any:
        """MPI_Comm_create_group: as `Create`, called by the ranks of the group only."""
        world = running_world()
        if world.rank not in group.ranks:
            return MPI.COMM_NULL
        number = world.number_of((self._number, tag, group.ranks))
        world.open(number, group.ranks, None)
        made = SimulatedIntracomm(number)
        made.Barrier()
        return made

    def Create_cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
        """MPI_Cart_create: a grid; the null communicator on ranks outside of it."""
        extents = [int(dim) for dim in np.atleast_1d(dims)]
        around = [False] * len(extents) if periods is None else list(np.atleast_1d(periods))
        if len(around) == 1:
            around *= len(extents)
        count = int(np.prod(extents))
        if count > self.Get_size():
            raise MPI.Exception(MPI.ERR_DIMS)

        def members(parts: list[Any]) -> list[list[int]]:
            return [list(range(count)) if at < count else [] for at in range(len(parts))]

        kind = lambda number: SimulatedCartcomm(number, extents, [bool(one) for one in around])  # noqa: E731
        return self._made("Create_cart", None, members, kind)


class SimulatedIntracomm(SimulatedComm):
    """The communicators of simulated ranks."""


class SimulatedCartcomm(SimulatedIntracomm):
    """A grid of simulated ranks."""

    def __init__(self, number: int, dims: list[int], periods: list[bool]) -> None:
        super().__init__(number)
        self.dims, self.periods = dims, periods

    def _like(self, number: int) -> SimulatedComm:
        return SimulatedCartcomm(number, self.dims, self.periods)

    @property
    def dim(self) -> int:
        """The number of its dimensions."""
        return len(self.dims)

    ndim = dim

    @property
    def coords(self) -> list[int]:
        """This rank's coordinates."""
        return self.Get_coords(self.Get_rank())

    @property
    def topo(self) -> tuple[list[int], list[bool], list[int]]:
        """Its extents, which of them are periodic, and this rank's coordinates."""
        return self.dims, self.periods, self.coords

    def Get_topo(self) -> tuple[list[int], list[bool], list[int]]:
        """Its extents, which of them are periodic, and this rank's coordinates."""
        return self.topo

    def Get_topology(self) -> int:
        """A grid."""
        return int(MPI.CART)

    def Get_dim(self) -> int:
        """The number of its dimensions."""
        return self.dim

    def Get_coords(self, rank: int) -> list[int]:
        """The coordinates of a rank."""
        return [int(one) for one in np.unravel_index(rank, self.dims)]

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at some coordinates."""
        found = self._at(list(coords))
        if found == MPI.PROC_NULL:
            raise MPI.Exception(MPI.ERR_ARG)
        return found

    def _at(self, coords: list[int]) -> int:
        for at, (one, dim, around) in enumerate(zip(coords, self.dims, self.periods, strict=True)):
            if not 0 <= one < dim and not around:
                return int(MPI.PROC_NULL)
            coords[at] = one % dim
        return int(np.ravel_multi_index(coords, self.dims))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """The ranks from which and to which data goes along a dimension."""
        here = self.coords
        pair = []
        for step in (-disp, disp):
            there = list(here)
            there[direction] += step
            pair.append(self._at(there))
        return pair[0], pair[1]

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """MPI_Cart_sub: a grid of the dimensions that remain."""
        remain = [bool(one) for one in remain_dims]
        here = self.coords
        kept = [dim for dim, stays in zip(self.dims, remain, strict=True) if stays]
        around = [one for one, stays in zip(self.periods, remain, strict=True) if stays]
        fixed = tuple(one for one, stays in zip(here, remain, strict=True) if not stays)

        def members(parts: list[Any]) -> list[list[int]]:
            ordered: dict[Any, list[int]] = {}
            for place, part in enumerate(parts):
                ordered.setdefault(part, []).append(place)
            return [ordered[part] for part in parts]

        return self._made(
            "Sub", fixed, members, lambda number: SimulatedCartcomm(number, kept, around)
        )


class RankGroup:
    """A group of simulated ranks, in order."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in it."""
        me = running_world().rank
        return self.ranks.index(me) if me in self.ranks else int(MPI.UNDEFINED)

    def Get_size(self) -> int:
        """The number of its ranks."""
        return self.size

    def Get_rank(self) -> int:
        """This rank's place in it."""
        return self.rank

    def Incl(self, ranks: Iterable[int]) -> RankGroup:
        """The group of some of its ranks."""
        return RankGroup(self.ranks[rank] for rank in ranks)

    def Excl(self, ranks: Iterable[int]) -> RankGroup:
        """The group without some of its ranks."""
        out = set(ranks)
        return RankGroup(rank for at, rank in enumerate(self.ranks) if at not in out)

    def Free(self) -> None:
        """Forgets it."""

    def __getattr__(self, name: str) -> Any:
        refuse_missing(self, name, MPI.Group, "group")

    @staticmethod
    def Union(group1: RankGroup, group2: RankGroup) -> RankGroup:
        """The ranks of either, those of the first one first."""
        return RankGroup(dict.fromkeys(group1.ranks + group2.ranks))

    @staticmethod
    def Intersection(group1: RankGroup, group2: RankGroup) -> RankGroup:
        """The ranks of both, in the order of the first one."""
        return RankGroup(rank for rank in group1.ranks if rank in group2.ranks)

    @staticmethod
    def Difference(group1: RankGroup, group2: RankGroup) -> RankGroup:
        """The ranks of the first one that are not in the second one."""
        return RankGroup(rank for rank in group1.ranks if rank not in group2.ranks)

    @staticmethod
    def Translate_ranks(
        group1: RankGroup, ranks1: Sequence[int] | None, group2: RankGroup
    ) -> list[int]:
        """The places in another group."""
        chosen = range(group1.size) if ranks1 is None else ranks1
        return [
            group2.ranks.index(group1.ranks[at]) if group1.ranks[at] in group2.ranks
            else int(MPI.UNDEFINED)
            for at in chosen
        ]  # fmt: skip


def _collective(name: str, plan: Any) -> None:
    """Adds the two forms of a collective of buffers: blocking, and posted."""

    def blocking(self: SimulatedComm, *arguments: Any, **options: Any) -> None:
        part, make, take, root = plan(self, *arguments, **options)
        take(self._world.run(self._exchange(name, part, make, root)))

    def posted(self: SimulatedComm, *arguments: Any, **options: Any) -> SimulatedRequest:
        part, make, take, root = plan(self, *arguments, **options)
        call = self._exchange(f"I{name.lower()}", part, make, root)
        return CollectiveRequest(self._world, call, take)

    setattr(SimulatedComm, name, blocking)
    setattr(SimulatedComm, f"I{name.lower()}", posted)


for _name, _plan in PLANS.items():
    _collective(_name, _plan)
time_by_network(SimulatedComm)


WORLD = SimulatedIntracomm(0, "MPI_COMM_WORLD", lasting=True)
SELF = SimulatedIntracomm(ALONE, "MPI_COMM_SELF", lasting=True)


def _lasting(alone: bool) -> SimulatedComm:
    return SELF if alone else WORLD
