"""The calls of torch's process groups, as calls of groups of allranks. The data are arrays of
numpy, or of cupy on this rank's GPU: these move by the transports of GPUs.

Each function makes a call whose name, arguments and line all members compare before data moves. The
results are written to the given arrays once all members have agreed, so a tensor of a call that
fails is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from allranks.collectives import world as worlds
from allranks.collectives.arrays.reductions import Arithmetic, Array, ReduceOp, check
from allranks.collectives.calls.call import Agreement, Call, Prepared, Steps, Transport
from allranks.collectives.calls.mismatches import list_sites, mismatch_text
from allranks.collectives.calls.numbers import is_looked_at, looking
from allranks.collectives.calls.sites import SITES, USER, find, kind_of
from allranks.collectives.calls.specs import Packed, Spec, describe_group, pack
from allranks.collectives.gpu.device import Device
from allranks.collectives.host.shared_memory import keep
from allranks.collectives.world.world import Group
from allranks.errors import CollectiveMismatch
from allranks.records.ranks import label

Shape = tuple[int, ...]
Combine = Callable[[list[Array]], Array]


class TorchCall(Call):
    """A call whose user's line is above frames of torch. It is found, and kept, for each line."""

    def __init__(self, agreement: Agreement, packed: Packed, nbytes: int) -> None:
        self.agreement, self.packed, self.name, self.nbytes = agreement, packed, None, nbytes
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            known = SITES.get(id(code) + frame.f_lasti)
            if known is not None:
                self.site = known[0]
                break
            if kind_of(code.co_filename) == USER:
                self.site = find(frame)  # which keeps it
                break
            frame = frame.f_back
        else:
            self.site = find(sys._getframe(1))
        self.started = perf_counter()


def _meet(call: Call, _: Transport) -> Steps[None]:
    yield from call.agreed()


def make(
    group: Group, spec: Spec, nbytes: int,
    steps: Callable[[Call, Transport], Steps[Any]] = _meet, device: Device | None = None,
) -> Call:  # fmt: skip
    """A call on the group's fastest transport: between host memories, or between GPUs where its
    arrays are on a ``device``.
    """

    def chosen(call: Call) -> Steps[Any]:
        return (yield from steps(call, group.choose(call, "", device)))

    if device is not None:
        spec = spec._replace(device="gpu")
    call = TorchCall(group.agreement, pack(spec), nbytes)
    call.steps = chosen(call)
    return call


def device_of(array: Any) -> Device | None:
    """This rank's GPU, if an array is on it."""
    return None if isinstance(array, np.ndarray) else worlds.current().gpu


def _arithmetic(group: Group, op: ReduceOp, array: Any) -> Arithmetic:
    device = "" if isinstance(array, np.ndarray) else "gpu"
    return Arithmetic(op, array.dtype, group.size, 1.0, 1.0, device)


def barrier(group: Group) -> Call:
    return make(group, Spec("barrier"), 0)


class Reduction(NamedTuple):
    """The common properties of allreduces of one dtype, shape and operation."""

    packed: Packed
    arithmetic: Arithmetic
    transport: str
    move: Callable[..., Prepared[Array]]
    nbytes: int

    def call(self, group: Group) -> Call:
        call = TorchCall(group.agreement, self.packed, self.nbytes)
        call.transport = self.transport
        return call


def reduction(group: Group, title: str, op: ReduceOp, array: Array, dtype: str) -> Reduction:
    """What allreduces of such an array have in common; it is made once."""
    key = title, op, array.dtype, array.shape
    found: Reduction | None = group.plans.get(key)
    return found or keep(group.plans, key, _reduction(group, title, op, array, dtype))


def _reduction(group: Group, title: str, op: ReduceOp, array: Array, dtype: str) -> Reduction:
    check(op, array.dtype)
    transport = group.through_host

    def in_place(
        call: Call, source: Array, arithmetic: Arithmetic, _: Array | None = None
    ) -> Prepared[Array]:
        return transport.allreduce(call, source, arithmetic, source)

    spec = Spec(title, reduction_name(op), dtype, array.shape)
    arithmetic = _arithmetic(group, op, array)
    looked_at = is_looked_at(group.own, op, array.dtype, array.nbytes)
    move = looking(group.own, group.number, in_place) if looked_at else in_place
    return Reduction(pack(spec), arithmetic, transport.name, move, array.nbytes)


def reduction_name(op: ReduceOp) -> str:
    return {"Sum": "SUM", "Average": "AVG"}.get(op.name, op.name.upper())


def all_reduce(group: Group, plan: Reduction, array: Array) -> Call:
    """An allreduce in place, for a call that is posted."""
    call = plan.call(group)
    call.steps = call.moved(plan.move, array, plan.arithmetic)
    return call


def all_reduce_on_gpu(group: Group, title: str, op: ReduceOp, array: Array, dtype: str) -> Call:
    check(op, array.dtype)
    spec = Spec(title, reduction_name(op), dtype, array.shape)
    arithmetic = _arithmetic(group, op, array)

    def steps(call: Call, way: Transport) -> Steps[None]:
        yield from call.moved(way.allreduce, array, arithmetic, array)

    return make(group, spec, array.nbytes, steps, device_of(array))


def all_reduce_many(
    group: Group, op: ReduceOp, arrays: Sequence[Array], dtypes: Sequence[str]
) -> Call:
    """An allreduce in place of several arrays of one dtype, moved together."""
    shapes = [array.shape for array in arrays]
    dtype, shown = describe_group(dtypes, shapes)
    spec = Spec("all_reduce_coalesced", reduction_name(op), dtype, shown)
    check(op, arrays[0].dtype)
    arithmetic = _arithmetic(group, op, arrays[0])

    device = device_of(arrays[0])

    def steps(call: Call, way: Transport) -> Steps[None]:
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        move = way.allreduce
        # Not on a GPU, where a look would wait for its work.
        if device is None and is_looked_at(group.own, op, flat.dtype, flat.nbytes):
            move = looking(group.own, group.number, move)
        yield from call.moved(move, flat, arithmetic, flat)
        _deal(flat, arrays)

    return make(group, spec, sum(array.nbytes for array in arrays), steps, device)


def _deal(flat: Array, arrays: Sequence[Array]) -> None:
    start = 0
    for array in arrays:
        np.copyto(array.reshape(-1), flat[start : start + array.size])
        start += array.size


def reduce(group: Group, op: ReduceOp, array: Array, dtype: str, root: int) -> Call:
    """A reduction to ``array`` of the member with index ``root``; the others keep theirs."""
    check(op, array.dtype)
    spec = Spec("reduce", reduction_name(op), dtype, array.shape, group.ranks[root])
    arithmetic = _arithmetic(group, op, array)

    def steps(call: Call, way: Transport) -> Steps[None]:
        out = array if group.me == root else np.empty_like(array)
        source = array if group.me == root else array.copy()
        yield from call.moved(way.allreduce, source, arithmetic, out)

    return make(group, spec, array.nbytes, steps, device_of(array))


def reduce_by_gathering(
    group: Group, spec: Spec, data: Array, combine: Combine, out: Array | None
) -> Call:
    """A reduction that numpy does not have: every member combines the bytes of all."""

    def steps(call: Call, way: Transport) -> Steps[None]:
        parts = yield from call.moved(way.allgather, data, [data.nbytes] * group.size)
        if out is not None:
            out[...] = combine(parts)

    return make(group, spec, data.nbytes, steps)


def reduce_scatter(
    group: Group, title: str, op: ReduceOp, source: Array, out: Array, dtype: str, shape: Shape
) -> Call:
    """Each member gets its slice of the sum; both arrays have one dimension."""
    check(op, source.dtype)
    spec = Spec(title, reduction_name(op), dtype, shape)
    arithmetic = _arithmetic(group, op, source)
    bounds = [out.size * index for index in range(group.size + 1)]

    def steps(call: Call, way: Transport) -> Steps[None]:
        into = np.empty_like(out) if _overlap(source, out) else out
        yield from call.moved(way.reducescatter, source, bounds, into, arithmetic)
        if into is not out:
            np.copyto(out, into)

    return make(group, spec, source.nbytes, steps, device_of(source))


def _overlap(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.may_share_memory(one, other)
    begins, others = one.data.ptr, other.data.ptr
    return bool(begins < others + other.nbytes and others < begins + one.nbytes)


def broadcast(group: Group, data: Array, dtype: str, shape: Shape, root: int) -> Call:
    spec = Spec("broadcast", "", dtype, shape, group.ranks[root])

    def steps(call: Call, way: Transport) -> Steps[None]:
        yield from call.moved(way.broadcast, data, root)

    return make(group, spec, data.nbytes, steps, device_of(data))


def all_gather(
    group: Group, spec: Spec, data: Array, outs: Sequence[Array], root: int = -1
) -> Call:
    """Every member's bytes to ``outs`` of all members, or of the one with index ``root``."""

    def steps(call: Call, way: Transport) -> Steps[None]:
        parts = yield from call.moved(way.allgather, data, [data.nbytes] * group.size, root)
        if root in (-1, group.me):
            for out, part in zip(outs, parts, strict=True):
                np.copyto(out, part)

    return make(group, spec, data.nbytes * group.size, steps, device_of(data))


def gather_uneven(
    group: Group, spec: Spec, data: Array, take: Callable[[list[Array]], None]
) -> Call:
    """Every member's bytes, of any length, for the function ``take``."""

    def steps(call: Call, way: Transport) -> Steps[None]:
        take((yield from call.moved(way.allgather, data)))

    return make(group, spec, data.nbytes, steps)


def scatter(group: Group, spec: Spec, data: Array, out: Array, root: int) -> Call:
    """Equal pieces of the bytes of the member with index ``root``."""
    lengths = [data.nbytes // group.size] * group.size if group.me == root else []

    def steps(call: Call, way: Transport) -> Steps[None]:
        parts = yield from call.moved(way.alltoall, data, lengths, root)
        np.copyto(out, parts[root])

    return make(group, spec, out.nbytes * group.size, steps, device_of(out))


def all_to_all(
    group: Group,
    spec: Spec,
    data: Array,
    lengths: Sequence[int],
    outs: Sequence[Array],
    *,
    even: bool,
) -> Call:
    """Consecutive pieces of every member's bytes; ``even`` if ``spec`` has their lengths."""

    def steps(call: Call, way: Transport) -> Steps[None]:
        if not even:
            table = np.array([*lengths, *(out.nbytes for out in outs)], np.int64).view(np.uint8)
            gather = group.through_host.allgather
            tables = yield from call.moved(gather, table, [table.nbytes] * group.size)
            _check_pieces(group, call, [found.view(np.int64).tolist() for found in tables])
        parts = yield from call.moved(way.alltoall, data, lengths)
        for out, part in zip(outs, parts, strict=True):
            np.copyto(out, part)

    nbytes = max(data.nbytes, sum(out.nbytes for out in outs))
    return make(group, spec, nbytes, steps, device_of(data))


def _check_pieces(group: Group, call: Call, tables: list[list[int]]) -> None:
    """Raises `CollectiveMismatch` on all members if one expects another piece than it gets."""
    for sender, sent in enumerate(tables):
        for receiver, expected in enumerate(tables):
            found, wanted = sent[receiver], expected[group.size + sender]
            if found != wanted:
                ends = label((group.ranks[sender],)), label((group.ranks[receiver],))
                text = (
                    f"{call.spec.title} needs equal sizes on both sides: {ends[0]} sends {found} "
                    f"bytes to {ends[1]}, which expects {wanted}. Compare the input splits of the "
                    "sender with the output splits of the receiver."
                )
                raise CollectiveMismatch("\n".join([text, *list_sites(call.sites())]))


def gather_objects(group: Group, spec: Spec, value: object) -> Call:
    """The list of all members' objects."""
    from allranks.collectives.ops.operations import dumps, loads

    data = dumps(value)

    def steps(call: Call, way: Transport) -> Steps[list[Any]]:
        parts = yield from call.moved(way.allgather, data)
        return [loads(part) for part in parts]

    return make(group, spec, data.nbytes, steps)


def new_group(group: Group, count: int, ranks: Shape, members: Shape) -> Call:
    """The greatest ``count`` of the ranks that are about to make a group of torch.

    Some ranks may make one group while others make another, if the members of each agree.

    Args:
        count: how many groups of torch this rank has made.
        ranks: torch's numbers of the members.
        members: their ranks in the world.
    """
    from allranks.collectives.ops.operations import dumps, loads

    data = dumps((count, ranks, members))

    def steps(call: Call, way: Transport) -> Steps[int]:
        parts = yield from call.moved(way.allgather, data)
        found = dict(zip(group.ranks, map(loads, parts), strict=True))
        every = {rank: others for rank, (_, _, others) in found.items()}
        if any(every[rank] != others for others in every.values() for rank in others):
            sites = call.sites()
            brought = {
                rank: (Spec("new_group", shape=shown), sites[rank])
                for rank, (_, shown, _) in found.items()
            }
            raise CollectiveMismatch(mismatch_text(brought))
        return max(int(counted) for counted, *_ in found.values())

    return make(group, Spec("new_group"), data.nbytes, steps)


def limited(steps: Steps[Any], seconds: float, expire: Callable[[], BaseException]) -> Steps[Any]:
    """The same steps, which raise an error after this time."""
    deadline = perf_counter() + seconds
    while True:
        try:
            awaited = next(steps)
        except StopIteration as end:
            return end.value
        if perf_counter() > deadline:
            raise expire()
        yield awaited


def expired(call: Call, seconds: float) -> RuntimeError:
    """The error at the end of a time limit, in torch's words."""
    # gloo: "Timed out waiting 1000ms for recv operation to complete".
    missing = call.missing() if call.posted else ()
    late = f"; {label(missing)} did not arrive" if missing else ""
    return RuntimeError(
        f"allranks: Timed out waiting {seconds * 1000:.0f}ms for {call.spec.title} to complete at "
        f"{call.site}{late}"
    )
