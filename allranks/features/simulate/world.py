"""The world of a simulated rank: allranks' collectives, with an agreement and a transport in lists.

The public functions, the comparison of calls and the arithmetic are those of real ranks. Ranks that
share memory reduce the values in the order of the ranks, so the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array, ExactArithmetic
from allranks.collectives.calls import mismatches, specs
from allranks.collectives.calls.call import (
    NOTHING,
    Call,
    Members,
    Move,
    Offer,
    PointCall,
    Prepared,
    Steps,
    cut,
    prepared,
)
from allranks.collectives.calls.rank_state import EPOCH_SHIFT
from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import Spec
from allranks.collectives.ops.inputs import run
from allranks.collectives.world import current
from allranks.collectives.world.world import ALONE, Group, World
from allranks.errors import CollectiveMismatch
from allranks.features.simulate.events import RankEvent
from allranks.features.simulate.scheduler import Scheduler, Wait


class TaskBoard:
    """The states of all ranks as seen by one: a `Board` in a dictionary."""

    def __init__(self, rank: int, words: dict[tuple[int, int], int], texts: dict[Any, str]) -> None:
        self.rank, self._words, self._texts = rank, words, texts

    def get(self, rank: int, word: int) -> int:
        return self._words.get((rank, word), 0)

    def put(self, word: int, value: int) -> None:
        self._words[self.rank, word] = value

    def text(self, rank: int, kind: int) -> str:
        return self._texts.get((rank, kind), "")

    def write(self, kind: int, text: str) -> None:
        self._texts[self.rank, kind] = text


@dataclass
class Arrival:
    """One arrival of the members of a group: what each contributes, and what is made of it."""

    size: int
    calls: dict[int, Call] = field(default_factory=dict)
    """Of the members that have arrived, by their index."""
    offers: dict[int, Offer] = field(default_factory=dict)
    parts: dict[int, Any] = field(default_factory=dict)
    make: Callable[[list[Any]], Any] | None = None
    """Makes the result of all parts, once; a member that has joined has None."""
    result: Any = None
    exact: Any = None
    """The result for the members that bring integers of Python, once one of them has made it."""
    mismatch: str = ""
    failed: Exception | None = None
    complete: bool = False
    ends: float = 0.0
    last: float = 0.0
    last_rank: int = -1

    def bring(self, me: int, part: Any, make: Callable[[list[Any]], Any] | None = None) -> None:
        self.parts[me] = part
        self.make = self.make or make


class SharedState:
    """What the members of all groups share: the slots of their arrivals, and the boards."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], Arrival] = {}
        self._keys: dict[tuple[int, tuple[int, ...]], int] = {}
        self.numbers: dict[object, int] = {}
        """Of groups that only their own ranks have made."""
        self.words: dict[tuple[int, int], int] = {}
        self.texts: dict[Any, Any] = {}

    def key_of(self, number: int, ranks: tuple[int, ...]) -> int:
        """A number for a group. Groups of other ranks may have the group's own number as well."""
        return self._keys.setdefault((number, ranks), len(self._keys))


class TaskAgreement:
    """`Agreement` of tasks: the last one to arrive compares the calls, and makes the result."""

    def __init__(self, own: SimulatedWorld, members: Members) -> None:
        self.own, self.members = own, members
        self.key = own.shared.key_of(members.number, members.ranks)
        self.renew()

    def renew(self) -> None:
        self.count = self.number = self.own.epoch << EPOCH_SHIFT

    def upcoming(self) -> Arrival:
        """The slot of this rank's next arrival."""
        slots, at = self.own.shared.slots, (self.key, self.count + 1)
        found = slots.get(at)
        if found is None:
            found = slots[at] = Arrival(self.members.size)
        return found

    def arrive(self, call: Call, offer: Offer) -> bool:
        call.number = self.number = self.number + 1
        call.posted = True
        return self._arrive(call, offer)

    def _arrive(self, call: Call, offer: Offer) -> bool:
        slot = call.carry = self.upcoming()
        self.count = call.stage = self.count + 1
        slot.calls[self.members.me], slot.offers[self.members.me] = call, offer
        scheduler = self.own.scheduler
        scheduler.computed()
        task = scheduler.tasks[self.own.rank]
        call.started = task.clock
        if task.clock >= slot.last:
            slot.last, slot.last_rank = task.clock, task.rank
        if len(slot.calls) < slot.size:
            return False
        try:
            with scheduler.uncounted():
                self._complete(slot, call)
        except BaseException:  # such as a RecursionError: the others see that this rank is missing
            if not slot.complete:
                del slot.calls[self.members.me]
            raise
        return self._agreed(call)

    def _complete(self, slot: Arrival, call: Call) -> None:
        scheduler, members = self.own.scheduler, self.members
        slot.complete = True
        del self.own.shared.slots[self.key, self.count]
        found = {one.packed.fingerprint: one.spec for one in slot.calls.values()}
        if len(found) > 1:
            others = set(found.values()) - {specs.JOIN}
            if len(others) > 1 or not specs.goes_with_joined(*others):
                slot.mismatch = mismatches.mismatch_text(self.brought(call))
        if not slot.mismatch and slot.make is not None:
            try:
                slot.result = slot.make([slot.parts.get(at) for at in range(slot.size)])
            except Exception as error:  # of a user's operation, or of arrays that do not fit
                slot.failed = error
        nbytes = max(one.nbytes for one in slot.calls.values())
        slot.ends = slot.last + scheduler.network.collective_seconds(
            call.spec.op, nbytes, members.ranks
        )
        for rank in members.ranks:
            scheduler.wake(rank)

    def _agreed(self, call: Call) -> bool:
        slot, scheduler = call.carry, self.own.scheduler
        task = scheduler.tasks[self.own.rank]
        begin = min(call.started, task.clock)
        task.clock = max(task.clock, slot.ends)
        scheduler.record(
            RankEvent(task.rank, "collective", call.spec.title, begin, max(begin, slot.last),
                  task.clock, slot.last_rank, call.nbytes, 0, call.number, self.members.number,
                  call.site)
        )  # fmt: skip
        if slot.mismatch:
            raise CollectiveMismatch(slot.mismatch)
        if slot.failed is not None:
            raise _again(slot.failed)
        call.last, call.last_rank = slot.last, slot.last_rank
        return True

    def wait(self, call: Call, offer: Offer) -> Steps[None]:
        while not call.carry.complete:
            yield call
        self._agreed(call)

    def barrier(self, call: Call) -> Steps[None]:
        if not self._arrive(call, NOTHING):
            yield from self.wait(call, NOTHING)

    def offers(self, call: Call) -> list[Offer]:
        return [offer for _, offer in sorted(call.carry.offers.items())]

    def brought(self, call: Call) -> dict[int, tuple[Spec, Site]]:
        ranks, calls = self.members.ranks, sorted(call.carry.calls.items())
        return {ranks[at]: (one.spec, one.site) for at, one in calls}

    def missing(self, call: Call) -> tuple[int, ...]:
        if call.carry is None:
            return ()
        arrived = call.carry.calls
        return tuple(rank for at, rank in enumerate(self.members.ranks) if at not in arrived)

    def unfinished(self, number: int) -> tuple[int, ...]:
        return ()

    def sites(self, call: Call) -> dict[int, Site]:
        if call.carry is None:
            return {self.own.rank: call.site}
        return {rank: site for rank, (_, site) in self.brought(call).items()}

    def finish(self, call: Call) -> None: ...


def _again(error: Exception) -> Exception:
    try:
        error = copy(error)  # each rank adds its own frames
    except Exception:
        pass  # its class takes other arguments than it keeps
    return error.with_traceback(None)


class TaskTransport:
    """`Transport` of tasks: each member's part waits in the slot until the last one arrives."""

    # The name by which a call asks for the transport of one host.
    name = "shared"

    def __init__(self, agreement: TaskAgreement) -> None:
        self.agreement, self.members = agreement, agreement.members

    @property
    def exact(self) -> bool:
        """As on real ranks: whether one host has all members."""
        hosts = self.agreement.own.hosts
        return len({hosts[rank] for rank in self.members.ranks}) == 1

    def renew(self) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def _bring(self, part: Array | None, make: Callable[[list[Any]], Any]) -> Arrival:
        slot, own = self.agreement.upcoming(), self.agreement.own
        if part is not None and own.pending:
            # The caller may change the array before the others have arrived.
            part = part.copy()
        slot.bring(self.members.me, part, make)
        return slot

    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        # Not an exact one: of the other members, some may have brought an integer of numpy.
        make = partial(Arithmetic.combine, reduction)
        slot = self._bring(reduction.prescaled(source), lambda parts: make(_with_zeros(parts)))

        def rest() -> Array:
            found: Array = slot.result
            if out is not None:
                np.copyto(out, found)
                return out
            if isinstance(reduction, ExactArithmetic):
                if slot.exact is None:
                    parts = [slot.parts.get(at) for at in range(slot.size)]
                    slot.exact = reduction.combine(_with_zeros(parts))
                found = slot.exact
            return found.copy()

        return Offer(source.nbytes), rest

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Prepared[None]:
        combine = reduction.combine
        slot = self._bring(reduction.prescaled(source), lambda parts: combine(_with_zeros(parts)))
        low, high = bounds[self.members.me], bounds[self.members.me + 1]
        return Offer(source.nbytes), lambda: np.copyto(out, slot.result[low:high])

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        here = self.members.me == root
        slot = self._bring(array if here else None, lambda parts: parts[root].copy())

        def rest() -> None:
            if not here:
                np.copyto(array, slot.result)

        return Offer(array.nbytes), rest

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        slot = self._bring(source, _copies)
        reads = root in (-1, self.members.me)

        def rest() -> list[Array]:
            found: list[Array] = slot.result
            # A result of several parts is put together, and so is new memory.
            return (
                ([part.copy() for part in found] if len(found) == 1 else found)
                if reads
                else [np.empty(0, np.uint8)] * len(found)
            )

        return Offer(source.nbytes), rest

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        me = self.members.me
        slot = self._bring(source, _copies)
        slot.parts[me] = cut(slot.parts[me], list(lengths) or [0] * self.members.size)
        yield Offer(source.nbytes)
        nothing = np.empty(0, np.uint8)
        return [
            part[me].copy() if root in (-1, at) else nothing for at, part in enumerate(slot.result)
        ]


def _copies(parts: list[Any]) -> list[Any]:
    # The ranks go on, and change their arrays, before all others have read them.
    return [
        [piece.copy() for piece in part] if isinstance(part, list) else part.copy()
        for part in parts
    ]


def _with_zeros(parts: list[Array | None]) -> list[Array]:
    like = next(part for part in parts if part is not None)
    zeros = np.zeros_like(like)  # of the ranks that have joined
    return [zeros if part is None else part for part in parts]


_FIRST_OF_SOME = 1 << 40
"""Groups that only their own ranks have made have numbers from here on."""


class SimulatedWorld(World):
    """One simulated rank."""

    def __init__(self, rank: int, hosts: tuple[int, ...], shared: SharedState) -> None:
        self.shared = shared
        self.scheduler: Scheduler
        self._made_here: dict[object, int] = {}
        super().__init__(rank, hosts, TaskBoard(rank, shared.words, shared.texts))  # type: ignore[arg-type]
        self.notebook = False
        self.open(0, tuple(range(len(hosts))), None)
        self.open(ALONE, (rank,), None)

    def open(self, number: int, ranks: tuple[int, ...], memory: Any, *, now: bool = True) -> None:
        """Adds a group that this rank is in."""
        agreement = TaskAgreement(self, Members(number, ranks, self.rank))
        self.groups[number] = Group(self, agreement, {"shared": TaskTransport(agreement)})

    def number_of(self, kind: object) -> int:
        """Returns the same number on all ranks that make a group of this kind, which no other group
        has: of those of one kind, the next one.
        """
        # An interrupt may leave the ranks with different counts, and ends the epoch.
        kind = (self.epoch, kind)
        self._made_here[kind] = self._made_here.get(kind, 0) + 1
        numbers = self.shared.numbers
        return numbers.setdefault((kind, self._made_here[kind]), _FIRST_OF_SOME + len(numbers))

    @property
    def threaded(self) -> bool:
        """Always false: only the task of this rank makes calls."""
        return False

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        key = ("local", self.hosts[self.rank])
        found: Any = self.shared.texts.get(key)
        if found is None:
            here = self.hosts[self.rank]
            found = tuple(rank for rank, host in enumerate(self.hosts) if host == here)
            self.shared.texts[key] = found
        ranks: tuple[int, ...] = found
        return ranks

    def _lost_by(self, error: BaseException) -> None:
        """No process of MPI can die here."""

    def _drive(self, steps: Steps[Any]) -> Any:
        try:
            awaited: Any = next(steps)
            while True:
                self.scheduler.block(Wait(awaited, awaited.missing, awaited.every))
                awaited = next(steps)
        except StopIteration as end:
            return end.value

    def poll(self, call: Call) -> None:
        """Looks whether a posted call has ended; the other ranks run meanwhile."""
        super().poll(call)
        if not call.done:
            self.scheduler.poll()
            super().poll(call)


class Silent:
    """In place of a `Journal`: the scheduler's events are the record of the calls."""

    records: ClassVar[list[Any]] = []

    def keep(self, call: Call) -> None: ...

    add = keep

    def since(self, ended: float, most: int) -> tuple[list[Any], int]:
        return [], 0


def open_group(parent: Group, spec: Spec, this: World, number: int, ranks: tuple[int, ...]) -> Call:
    """As the function of `world.process_sets`, without shared memory."""

    def steps(call: Call) -> Steps[None]:
        parent.choose(call)
        yield from call.agreed()
        if this.rank in ranks:
            this.open(number, ranks, None)

    return parent.call(spec, steps=steps)


def join() -> int:
    """This rank has no more data, as `allranks.collectives.join`."""
    group, answered = current().groups[0], 0
    while True:
        call = group.call(specs.JOIN, "join", 0, lambda call, n=answered: _join(group, call, n))  # type: ignore[misc]
        answered += 1
        last: int | None = run(call)
        if last is not None:
            return last


def _join(group: Group, call: Call, answered: int) -> Steps[int | None]:
    call.transport = "shared"
    yield from call.agreed(Offer(answered=answered))
    if any(one.spec != specs.JOIN for one in call.carry.calls.values()):
        return None
    answers = [offer.answered for offer in call.agreement.offers(call)]
    # The rank that joined last has answered the fewest calls.
    return max(r for r, n in zip(group.ranks, answers, strict=True) if n == min(answers))


def point_call(world: World, title: str, number: int, peers: tuple[int, ...]) -> PointCall:
    """The call of a send or a receive that has to wait, for its texts."""
    return PointCall(world.groups[number].agreement, Spec(title), title, peers)
