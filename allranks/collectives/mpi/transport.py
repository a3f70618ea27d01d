"""The communicators of one rank, a fresh one for each epoch, and the transport through them, on any
number of hosts: non-blocking calls, polled.

Source: MPI 4.1, chapter 6, non-blocking collective operations, and section 6.9.2, predefined
reduction operations.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array, ReduceOp
from allranks.collectives.calls.call import (
    ATTEND_SECONDS,
    Awaited,
    Call,
    Members,
    Move,
    Offer,
    Pause,
    Steps,
    cut,
    prepared,
)
from allranks.collectives.calls.rank_state import RENEWALS, RankState
from allranks.collectives.mpi.creation import Creation
from allranks.errors import RankLeft, RankLost
from allranks.records.deferred import deferred
from allranks.records.ranks import label

_OPS = {
    ReduceOp.Average: MPI.SUM,
    ReduceOp.Sum: MPI.SUM,
    ReduceOp.Min: MPI.MIN,
    ReduceOp.Max: MPI.MAX,
    ReduceOp.Product: MPI.PROD,
}
# Some reductions lack MPI's C_BOOL; as bytes, "any" is the largest and "all" the least.
_BOOL_OPS = {
    ReduceOp.Sum: MPI.MAX,
    ReduceOp.Max: MPI.MAX,
    ReduceOp.Min: MPI.MIN,
    ReduceOp.Product: MPI.MIN,
}


def prepare(source: Array, out: Array, reduction: Arithmetic) -> tuple[Array, Array, MPI.Op]:
    ready = reduction.wide(source) if reduction.half else reduction.prescaled(source)
    if ready is out:
        # Not MPI_IN_PLACE: all members have to pass that, and one that has joined does not.
        ready = out.copy()
    if reduction.dtype.kind == "b":
        return ready.view(np.uint8), out.view(np.uint8), _BOOL_OPS[reduction.op]
    kind = reduction.total
    if reduction.op is ReduceOp.Sum and kind.kind in "iu" and kind.itemsize < 4:
        # Open MPI saturates sums of 8 and 16 bits on some processors. Wider ones wrap when cut.
        kind = np.dtype(np.int32)
    total = out if kind == out.dtype else np.empty(out.shape, kind)
    if _is_ordered(reduction):
        return _to_order(ready, reduction.op), total.view(_order_of(total)), _OPS[reduction.op]
    return ready.astype(kind, copy=False), total, _OPS[reduction.op]


def finish(total: Array, out: Array, reduction: Arithmetic) -> None:
    if _is_ordered(reduction):
        total = _from_order(total)
    reduction.finish(total, out)


def mpi_lacks(reduction: Arithmetic) -> bool:
    """Whether MPI's own reduction may lose a NaN: products of complex numbers, long doubles."""
    if reduction.dtype.kind == "c":
        return reduction.op is ReduceOp.Product
    long = reduction.dtype.kind == "f" and reduction.dtype.itemsize > 8
    return long and reduction.op in (ReduceOp.Min, ReduceOp.Max)


def _is_ordered(reduction: Arithmetic) -> bool:
    """Whether MPI gets integers instead of floats: its Min and Max of floats may lose a NaN."""
    floats = reduction.half or reduction.dtype in (np.float32, np.float64)
    return floats and reduction.op in (ReduceOp.Min, ReduceOp.Max)


def _order_of(values: Array) -> np.dtype[Any]:
    return np.dtype(np.int32 if values.itemsize == 4 else np.int64)


def _to_order(values: Array, op: ReduceOp) -> Array:
    """Integers in the order of floats, with a NaN, as in numpy, beyond all of them."""
    kind = _order_of(values)
    found = _turned(values.view(kind))
    limits = np.iinfo(kind)
    found[np.isnan(values)] = limits.max if op is ReduceOp.Max else limits.min
    return found


def _from_order(found: Array) -> Array:
    np.copyto(found, _turned(found))
    return found.view(np.float32 if found.itemsize == 4 else np.float64)


def _turned(bits: Array) -> Array:
    """Flips the bits of negative floats, as their order is reversed; its own inverse."""
    limits = np.iinfo(bits.dtype)
    turned: Array = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return turned


_CREATE_TAG = 29
_RANK_FAILED = getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_OTHER)


_test = MPI.Request.Test
"""MPI's own: a class of allranks may take the name in mpi4py later."""


def complete(
    kept: dict[int, list[Any]],
    awaited: Awaited,
    post: Callable[..., MPI.Request],
    *arguments: object,
    status: MPI.Status | None = None,
) -> Steps[MPI.Request]:
    """Posts one non-blocking call and ends when it has completed."""
    held: list[Any] = [arguments]
    # If the wait is left, request and buffers are kept for ever: MPI may still write to them.
    kept[id(held)] = held
    try:
        # In one step of the interpreter: an interrupt cannot come between the call and the list.
        held.extend(starmap(post, (arguments,)))
        request: MPI.Request = held[1]
        awaited.stage += 1
        while not request.Test(status):
            yield awaited
    except MPI.Exception:
        del kept[id(held)]
        raise
    del kept[id(held)]
    return request


def release_dropped(dropped: deque[MPI.Request], most: int) -> None:
    """Releases requests that a program has dropped, and that have ended meanwhile. Looks at the
    first ``most`` of them.
    """
    for _ in range(most):
        try:
            request = dropped.popleft()
        except IndexError:  # there are no more, or another thread looks at them
            return
        try:
            ended = _test(request)
        except MPI.Exception:
            ended = request == MPI.REQUEST_NULL
        if not ended:
            dropped.append(request)


def have_ended(requests: list[MPI.Request]) -> bool:
    """Whether all of these requests have ended. Raises MPI's exception for a rank that has died."""
    try:
        if len(requests) == 1:
            return requests[0].Test()  # in half the time
        return MPI.Request.Testall(requests)
    except MPI.Exception as error:
        if len(requests) > 1 and error.Get_error_class() != MPI.ERR_IN_STATUS:
            raise
        # They differ from each other in nothing but the rank, so no other error is possible.
        raise MPI.Exception(_RANK_FAILED) from error


class MpiTransport:
    """Transport over a group's own communicator, which is made when it is first needed.

    With ``now`` it is made at once: all members are here, and stay. Members that share no memory
    could not wait for each other later, without it. ``user`` stands for each epoch's communicator
    of all ranks in turn.
    """

    name = "mpi"
    exact = False

    def __init__(self, own: RankState, members: Members, user: MPI.Intracomm, *, now: bool) -> None:
        self.own, self.members = own, members
        self._user, self._now = user, now
        self._is_world = members.ranks == tuple(range(own.size))
        self.renew()

    def renew(self) -> None:
        self._comm = self._create() if self._now and not self._is_world else None

    def _create(self) -> MPI.Intracomm:
        """Blocks, as MPI has no other form: called when all members are certain to call it."""
        ranks = self._user.Get_group().Incl(list(self.members.ranks))
        return MPI.Intracomm(self._user).Create_group(ranks, _CREATE_TAG + self.members.number)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def comm(self, awaited: Awaited) -> Steps[MPI.Intracomm]:
        """The group's communicator of this epoch. Collective over the group, which has arrived."""
        if self._comm is None and self._is_world:
            comm, request = MPI.Intracomm(self._user).Idup()
            while not request.Test():
                yield awaited
            self._comm = comm
        elif self._comm is None:
            with deferred():
                self._comm = self._create()
        return self._comm

    def _do(self, call: Call, post: Callable[..., MPI.Request], *arguments: object) -> Steps[None]:
        yield from complete(self.own.held_requests, call, post, *arguments)

    @prepared
    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Move[Array]:
        found = np.empty(source.shape, source.dtype) if out is None else out
        into = found.reshape(-1)
        flat = into if source is found else source.reshape(-1)
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        if mpi_lacks(reduction):
            yield from self._by_all(call, flat, slice(None), into, reduction)
        else:
            ready, total, op = prepare(flat, into, reduction)
            yield from self._do(call, comm.Iallreduce, ready, total, op)
            finish(total, into, reduction)
        return found

    def _by_all(
        self, call: Call, source: Array, mine: slice, out: Array, reduction: Arithmetic
    ) -> Steps[None]:
        """Gathers all members' values and reduces this rank's part of them here."""
        data = reduction.prescaled(source).view(np.uint8)
        parts = yield from self.gather(call, data, [data.nbytes] * self.members.size)
        reduction.combine([part.view(reduction.dtype)[mine] for part in parts], out)

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Move[None]:
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        if mpi_lacks(reduction):
            mine = slice(bounds[self.members.me], bounds[self.members.me + 1])
            yield from self._by_all(call, source, mine, out, reduction)
            return
        ready, total, op = prepare(source, out, reduction)
        counts = [high - low for low, high in pairwise(bounds)]
        yield from self._do(call, comm.Ireduce_scatter, ready, total, counts, op)
        finish(total, out, reduction)

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        yield Offer(array.nbytes)
        comm = yield from self.comm(call)
        yield from self._do(call, comm.Ibcast, array, root)

    @prepared
    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Move[list[Array]]:
        yield Offer(source.nbytes)
        sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
        return (yield from self.gather(call, source, sizes, root))

    def gather(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """As `allgather`, once all have agreed and the lengths are known."""
        comm = yield from self.comm(call)
        counts = list(lengths)
        reads = root in (-1, self.members.me)
        out = np.empty(sum(counts) if reads else 0, np.uint8)
        into = (out, counts, offsets(counts), MPI.BYTE)
        if root < 0:
            yield from self._do(call, comm.Iallgatherv, source, into)
        else:
            yield from self._do(call, comm.Igatherv, source, into if reads else None, root)
        return cut(out, counts) if reads else [out] * len(counts)

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        size, me = self.members.size, self.members.me
        mine = np.array(lengths or [0] * size, np.int64)
        if root >= 0:
            got = np.zeros(1, np.int64)
            yield from self._do(call, comm.Iscatter, mine if me == root else None, got, root)
            out = np.empty(int(got[0]), np.uint8)
            pieces = (source, list(lengths), offsets(lengths), MPI.BYTE)
            yield from self._do(call, comm.Iscatterv, pieces if me == root else None, out, root)
            return [out if index == root else out[:0] for index in range(size)]
        theirs = np.empty(size, np.int64)
        yield from self._do(call, comm.Ialltoall, mine, theirs)
        return (yield from self.exchange(call, source, lengths, theirs.tolist()))

    def exchange(
        self, call: Call, source: Array, lengths: Sequence[int], theirs: Sequence[int]
    ) -> Steps[list[Array]]:
        """MPI_Ialltoallv, once all have agreed and the lengths are known."""
        comm = yield from self.comm(call)
        counts, out = list(theirs), np.empty(sum(theirs), np.uint8)
        send = (source, list(lengths), offsets(lengths), MPI.BYTE)
        receive = (out, counts, offsets(counts), MPI.BYTE)
        yield from self._do(call, comm.Ialltoallv, send, receive)
        return cut(out, counts)


def offsets(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


_LOOKS = 20
"""Calls of MPI that a waiting rank makes every 20 ms, so that other ranks' transfers progress."""
_TOLD_SECONDS = 5.0
_DEATHS = {
    getattr(MPI, name, MPI.ERR_LASTCODE)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
}
NAME, NAME_ALONE = "MPI_COMM_WORLD", "MPI_COMM_SELF"
"""MPI's names of the communicators that `user` and `alone` stand for."""


@dataclass(eq=False)
class Epochs:
    """The communicators of one rank, epoch by epoch. ``pristine`` is used for nothing but making
    the next epoch's communicator. ``user`` stands for each epoch's communicator in turn; ``alone``
    is the same for this rank alone, with another communicator only after it was used. ``renewed``
    is called with the epoch's number once it has begun.
    """

    own: RankState
    user: Any
    alone: Any
    pristine: MPI.Intracomm
    renewed: Callable[[int], None]
    everyone: MPI.Intracomm | None = None
    """On several hosts, all living processes of the job: also those that have no rank yet."""
    _renewing: Steps[tuple[MPI.Intracomm, int]] | None = None
    """What makes the next communicator, also after the call that began it was left."""
    _renewals = _wanted = 0
    """How many communicators this rank has begun to make, and the epoch that it wants."""
    # Never freed: freeing one that was left in the middle of a call makes MPICH return wrong
    # results later.
    _retired: list[MPI.Intracomm] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.creation = Creation(self.own)

    def renew(self, epoch: int) -> None:
        """Moves this rank to a fresh communicator, for this epoch, or for a later one that another
        rank asks for. Collective over all ranks.
        """
        self._wanted, pause, attended, begun = epoch, Pause(), 0.0, -1
        with deferred() as held:
            # What was left before comes first: other ranks may have been in it too.
            while begun < epoch:
                self._renewing = self._renewing or self._renew_steps()
                try:
                    next(self._renewing)
                except StopIteration as end:
                    self._renewing = None
                    fresh, begun = end.value
                    # Also one that is not the last: other ranks may have begun this epoch, and make
                    # the communicators of its groups together with this one.
                    self._begin(fresh, begun)
                    continue
                except BaseException:
                    self._renewing = None
                    raise
                # An interrupt is raised here; the next call continues where this one was left.
                held.leave()
                waited = pause()
                if waited - attended > ATTEND_SECONDS:
                    attended = waited
                    self._check_others()

    def _begin(self, fresh: MPI.Intracomm, epoch: int) -> None:
        self._retired.append(MPI.Intracomm(self.user))
        fresh.Set_name(NAME)
        rebind(self.user, fresh)
        self.renewed(epoch)

    def _check_others(self) -> None:
        """Raises `RankLeft` if a rank does not come to a renewal."""
        own, board = self.own, self.own.board
        # A rank publishes that it has ended a renewal before it publishes that it has left.
        left = [(*why, rank) for rank in board.ranks if (why := own.exit_of(rank))]
        parts = [(board.get(one[2], RENEWALS), *one) for one in left]
        missing = [one for one in parts if one[0] <= 2 * self._renewals]
        if missing:
            # First those that have not even begun it.
            _, _, reason, rank = min(missing)
            needs = f"renew() needs all of {label(board.ranks)}: rank {rank} {reason}."
            raise RankLeft(f"{needs} {own.advice(rank, reason) or 'Call renew() on every rank.'}")

    def release_dropped(self) -> None:
        """Releases all requests that the program has dropped, and that have ended meanwhile."""
        release_dropped(self.own.dropped_requests, len(self.own.dropped_requests))

    def renew_alone(self) -> None:
        """Drops the messages that this rank has sent to itself."""
        self._retired.append(MPI.Intracomm(self.alone))
        rebind(self.alone, self._retired[-1].Dup())
        self.alone.Set_name(NAME_ALONE)

    def take_over(self, pristine: MPI.Intracomm, fresh: MPI.Intracomm) -> None:
        """Replaces the communicators of all ranks, some of which are new; the old ones are kept."""
        self._retired += [self.pristine, MPI.Intracomm(self.user)]
        self._renewing, self._renewals = None, 0
        self.own.board.put(RENEWALS, 0)
        self.creation.through_tcp = True
        self.pristine = pristine
        fresh.Set_name(NAME)
        rebind(self.user, fresh)

    def lost_by(self, error: BaseException) -> RankLost | None:
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
        """Lets MPI progress transfers between ranks, and what they ask of this one's windows."""
        try:
            for _ in range(_LOOKS):
                self.pristine.Iprobe()
        except MPI.Exception as error:
            if not reports_death(error):
                raise

    def _renew_steps(self) -> Steps[tuple[MPI.Intracomm, int]]:
        """Returns the communicator, and the latest epoch that a rank wants."""
        kept = self.own.held_requests
        awaited = SimpleNamespace(stage=0, longest_sleep=0.0, sleep=None)
        self._renewals += 1
        self.own.board.put(RENEWALS, 2 * self._renewals)
        fresh, request = self.pristine.Idup()
        kept[id(request)] = [fresh, request]
        while not request.Test():
            yield awaited
        # No rank may use, let alone revoke, the new one while another rank is still creating it. If
        # one has left this before and now wants a later epoch, all get that one.
        mine, latest = np.array([self._wanted], np.int64), np.empty(1, np.int64)
        yield from complete(kept, awaited, self.pristine.Iallreduce, mine, latest, MPI.MAX)
        # Not before: a rank that has left passes on nothing to the others.
        self.own.board.put(RENEWALS, 2 * self._renewals + 1)
        return fresh, int(latest[0])


def reports_death(error: BaseException) -> bool:
    return isinstance(error, MPI.Exception) and error.Get_error_class() in _DEATHS


def rebind(comm: MPI.Comm, fresh: MPI.Comm) -> None:
    """Makes a communicator object stand for another communicator."""
    kind = ctypes.c_uint64 if MPI._sizeof(MPI.Comm) == 8 else ctypes.c_uint32
    # In place: the user's `comm` lives as long as the notebook, and many cells refer to it, but
    # its communicator changes with the epoch.
    kind.from_address(MPI._addressof(comm)).value = kind.from_address(MPI._addressof(fresh)).value
