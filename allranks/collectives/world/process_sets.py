"""Groups of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.calls.call import Call, Steps
from allranks.collectives.calls.specs import Spec
from allranks.collectives.host import memory
from allranks.collectives.world.world import Group, World, group_nbytes
from allranks.errors import UsageError
from allranks.records.deferred import deferred

if TYPE_CHECKING:
    from mpi4py import MPI


class ProcessSet:
    """Some of the ranks. It can be used once `add_process_set`, or ``init()``, has registered it.

    Args:
        ranks: ranks of the world, in any order, the same on every rank; or a communicator of
            mpi4py, whose ranks they are; None for all.

    Attributes:
        process_set_id: its number once it is registered; before that None. The set of all ranks
            has the number 0.
        mpi_comm: the communicator from which it was made; for all ranks that of ``init()``.
    """

    def __init__(self, ranks: Iterable[int] | MPI.Comm | None) -> None:
        self.process_set_id: int | None = None if ranks is not None else 0
        self.mpi_comm: Any = ranks if hasattr(ranks, "Get_group") else None
        known: Any = None if self.mpi_comm is not None else ranks
        self._ranks = None if known is None else sorted(set(known))

    @property
    def ranks(self) -> list[int]:
        """The members, ascending."""
        if self.process_set_id == 0:
            return list(range(world.current().size))
        if self._ranks is None and self.mpi_comm is not None:
            self._ranks = sorted(ranks_of(self.mpi_comm, world.current()))
        return list(range(world.current().size)) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's place among the members.

        Raises:
            ValueError: it is not one of them.
        """
        me = world.current().rank
        if me not in self.ranks:
            raise ValueError(f"rank() needs a member, and rank {me} is not in {self}.")
        return self.ranks.index(me)

    def included(self) -> bool:
        """True if this rank is a member."""
        return world.current().rank in self.ranks

    def __repr__(self) -> str:
        ranks = self.ranks if world.exists() else self._ranks
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet(None)
"""All ranks."""


def group_of(process_set: ProcessSet | None, op: str) -> Group:
    """The group of a process set; `UsageError` if it is not registered or lacks this rank."""
    this = world.current()
    if process_set is None:
        return this.groups[0]
    if not takes_part(process_set, op):
        raise UsageError(
            f"{op} needs a registered process set that this rank is in: rank {this.rank} is not a "
            f"member of {process_set}. Call it on its members only: if process_set.included(): ..."
        )
    return this.groups[process_set.process_set_id or 0]


def takes_part(process_set: ProcessSet, op: str) -> bool:
    """Whether this rank is a member; `UsageError` if the set is not registered."""
    check(process_set, op)
    number = process_set.process_set_id
    if number == 0:
        return True
    if number is None:
        raise UsageError(
            f"{op} needs a registered process set that this rank is in: {process_set} has not been "
            "registered. Register it on every rank first: add_process_set(process_set)."
        )
    this, ranks = world.current(), process_set.ranks
    # Numbers are reused: the set may have been removed through another object, and its number may
    # belong to other ranks now.
    if this.sets.get(number) != tuple(ranks):
        raise UsageError(
            f"{op} needs a registered process set: {process_set} has been removed. "
            "Register it on every rank again: add_process_set(process_set)."
        )
    return this.rank in ranks


def check(process_set: Any, op: str) -> None:
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"{op} needs a process set, or none for all ranks: found {process_set!r:.60}. Make one "
            "on every rank, and pass it: add_process_set([0, 1])"
        )


def add_process_set(process_set: ProcessSet | Sequence[int] | MPI.Comm) -> ProcessSet:
    """Registers a process set, which from now on has a ``process_set_id``.

    Where the same ranks are registered already, as after the replacement of a rank or in a cell
    that runs again, the set gets their number.

    Collective: every rank of the world must call this, members or not.

    Raises:
        UsageError: a rank does not exist.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    this = world.current()
    ranks: tuple[Any, ...] = tuple(chosen.ranks)
    if not all(isinstance(r, int | np.integer) and not isinstance(r, bool) for r in ranks):
        raise UsageError(
            f"add_process_set needs the numbers of ranks: found {list(ranks)}. Type for a mask: "
            "add_process_set(np.flatnonzero(mask))"
        )
    if not ranks or not set(ranks) <= set(range(this.size)):
        raise UsageError(
            f"add_process_set needs ranks from 0 to {this.size - 1}: found {list(ranks)}. "
            "Name at least one rank, and none that does not exist."
        )
    spec = Spec("add_process_set", shape=ranks)
    number = number_of(ranks)
    if number is not None:
        this.run(this.groups[0].call(spec))
        chosen.process_set_id = number
        return chosen
    # The same on every rank, because all of them register and remove the same sets.
    number = next(n for n in range(1, len(this.sets) + 2) if n not in this.sets)
    # Afterwards either all ranks have the set, or none.
    with deferred():
        this.run(open_group(this.groups[0], spec, this, number, ranks))
        this.sets[number] = ranks
        chosen.process_set_id = number
        this.end_closed()
    return chosen


def make_again(sets: Mapping[int, tuple[int, ...]]) -> None:
    """Registers sets by the numbers that they had in another world. Collective over all ranks."""
    this = world.current()
    for number, ranks in sorted(sets.items()):
        spec = Spec("add_process_set", shape=ranks)
        this.run(open_group(this.groups[0], spec, this, number, ranks))
        this.sets[number] = ranks


def number_of(ranks: tuple[int, ...]) -> int | None:
    return next((n for n, members in ids_and_ranks().items() if members == list(ranks)), None)


def ids_and_ranks() -> dict[int, list[int]]:
    this = world.current()
    return {0: list(range(this.size))} | {n: list(ranks) for n, ranks in sorted(this.sets.items())}


def ranks_of(comm: MPI.Comm, this: World) -> tuple[int, ...]:
    """A communicator's ranks, in its order, as ranks of the world."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        return ()
    if this.mpi is None:
        raise UsageError("a communicator needs MPI, and the loopback has none. Name the ranks.")
    return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, this.mpi.user.Get_group()))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a process set; False for the global one and for one that is not registered.

    Collective: every rank of the world must call this.
    """
    this, number = world.current(), process_set.process_set_id
    if not number or this.sets.get(number) != tuple(process_set.ranks):
        return False
    with deferred():
        this.run(this.groups[0].call(Spec("remove_process_set", root=number)))
        del this.sets[number]
        this.close(number)
        this.end_closed()
        process_set.process_set_id = None
    return True


def open_group(parent: Group, spec: Spec, this: World, number: int, ranks: tuple[int, ...]) -> Call:
    """A call that gives the members of a new group shared memory. Collective over ``parent``.
    Several groups without common ranks can be opened at once: each rank names its own.
    """
    member = this.rank in ranks
    hosts = this.sharing(ranks)
    here = next((own for own in hosts if this.rank in own), (this.rank,))
    nbytes = group_nbytes(len(hosts), len(here), len(ranks))

    def steps(call: Call) -> Steps[None]:
        transport, made = parent.choose(call), None
        # With a name if there is no memfd; the name is removed as soon as all have mapped it.
        if member and this.rank == here[0]:
            made = memory.segment(nbytes) or memory.segment(nbytes, named=True)
        address = np.frombuffer(made.address.encode() if made else b"", np.uint8)
        addresses = yield from call.moved(transport.allgather, address)
        at = addresses[parent.ranks.index(here[0])].tobytes().decode() if member else ""
        mapped = memory.attempt(at, nbytes)
        # Members share memory only if each of them has mapped it.
        word = np.array([mapped is not None or not member], np.uint8)
        everyone = yield from call.moved(transport.allgather, word, [1] * parent.size)
        if made is not None:
            made.close()
        if member:
            whole = all(flag[0] for flag in everyone)
            this.open(number, ranks, mapped if whole else None)

    return parent.call(spec, steps=steps)
