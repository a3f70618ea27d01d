"""allreduce, reduce and reducescatter, of one array or of a group; and join, by which ranks without
data take part with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.libraries import labels_of, reduction_of, to_dtype
from allranks.collectives.arrays.reductions import (
    Adasum,
    Arithmetic,
    Array,
    Average,
    Compression,
    ExactArithmetic,
    Product,
    ReduceOp,
    Sum,
    adasum,
    check,
    name_of,
)
from allranks.collectives.calls.call import Call, Offer, Steps, Transport, as_bytes
from allranks.collectives.calls.numbers import is_looked_at, looking
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.calls.specs import JOIN, Spec, describe_group, pack
from allranks.collectives.gpu.dlpack import ALIGNED
from allranks.collectives.gpu.transport import is_of_a_gpu
from allranks.collectives.host.shared_memory import SharedMemoryTransport, keep
from allranks.collectives.host.staging import split
from allranks.collectives.ops.inputs import CollectiveInputs, Handle, listed, read_inputs, run
from allranks.collectives.ops.outputs import GivenArray, fits, fits_on_gpu
from allranks.collectives.world import world as worlds
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.collectives.world.world import Group
from allranks.errors import UsageError

ArraySpecs = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""The dtype and the shape of each array."""
_LINE = 64
"""Bytes: each library can use the memory of arrays that begin at multiples of this."""
_SINGLE_COPIES = 8
"""The most arrays on a GPU that are copied one by one, as in cupy's ``concatenate``."""
_TRUNCATION_HINT = (
    "{} averages by default, and an average of integers that is not an integer is truncated "
    "towards zero. For the sum, pass op=Sum; for the exact average, pass floats."
)


_ANY_HINT = (
    '{} of bool with op=Sum means "any". For the number of True, pass integers: x.astype(int), or '
    "int(x)."
)
_CUT_HINT = (
    "{} multiplies integers by its factors in float64, and cuts them towards zero each time. For "
    "the exact result, pass floats."
)


class ReductionPlan:
    """The common properties of a group's reductions with the same arguments, dtypes and shapes."""

    def __init__(
        self,
        group: Group,
        kind: str,
        op: ReduceOp,
        specs: ArraySpecs,
        factors: tuple[float, float],
        root: int = -1,
        compression: str = "",
        labels: Sequence[str] = (),
        transport: str = "",
        device: str = "",
        exact: bool = False,
    ) -> None:
        dtypes, shapes = [dtype for dtype, _ in specs], [shape for _, shape in specs]
        for dtype in dtypes:
            check(op, dtype)
        _check_shapes(kind, op, shapes, group.size)
        # Here, because a plan is made once for many calls. One member reports it for all.
        if group.size > 1 and group.me == 0:
            for text in _hints(op, {dtype.kind for dtype in dtypes}, factors):
                group.own.hint(text.format(kind.removeprefix("grouped_")))
        self.op, self.factors = op, factors
        self.transport, self.move = group.through_host.name, group.through_host.allreduce
        """How one array goes where nothing else is asked for, and it is not on a GPU."""
        self.own, self.group = group.own, group.number
        sizes = [math.prod(shape) for shape in shapes]
        self.nbytes = sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))
        self.reductions: list[Arithmetic] = []
        found: dict[np.dtype[Any], list[int]] = {}
        # Adasum has its own arithmetic, and moves one array after the other.
        for index, dtype in enumerate(dtypes if op is not Adasum else ()):
            found.setdefault(dtype, []).append(index)
            made = ExactArithmetic if exact else Arithmetic
            self.reductions.append(made(op, dtype, group.size, *factors, device))
        self.batches = [
            Batch(
                group.own,
                where,
                [shapes[index] for index in where],
                self.reductions[where[0]],
                device,
            )
            for where in found.values()
        ]
        """The arrays of each dtype, which move together."""
        if self.batches and self.batches[0].is_looked_at:
            self.move = looking(self.own, self.group, self.move)
        whole = kind == "grouped_allreduce" and op is not Adasum
        names, shown = describe_group([name_of(dtype) for dtype in dtypes], shapes, labels)
        shape = shown if kind.startswith("grouped") or labels else shapes[0]
        elements = sum(batch.size for batch in self.batches) if whole else sum(sizes)
        self.packed = pack(
            Spec(kind, op.name, names, shape, root, *factors, compression, elements,
                 transport, device)
        )  # fmt: skip

    def reduced(
        self,
        call: Call,
        transport: Transport,
        inputs: CollectiveInputs,
        sources: list[Array],
        out: Array | None = None,
    ) -> Steps[list[Array]]:
        """The steps that reduce whole arrays, for all members; a single one to ``out``."""
        outs: list[Any] = [None] * len(sources)
        if self.op is Adasum:
            for index, source in enumerate(sources):
                lengths = [source.nbytes] * call.members.size
                parts = yield from call.moved(transport.allgather, as_bytes(source), lengths)
                total = adasum([part.view(source.dtype) for part in parts], *self.factors)
                outs[index] = total.reshape(source.shape)
            return outs
        for batch in self.batches:
            move = transport.allreduce
            if batch.is_looked_at:
                move = looking(self.own, self.group, move)
            if len(batch.where) == 1:
                index = batch.where[0]
                outs[index] = yield from call.moved(move, sources[index], batch.reduction, out)
                continue
            flat = transport.empty((batch.size,), batch.dtype)
            parts = batch.parts(flat)
            mine = [sources[index] for index in batch.where]
            with inputs.copying(call):
                if batch.in_one_copy:
                    batch.fill_in_one_copy(flat, mine)
                else:
                    batch.fill(flat, parts, mine)
            yield from call.moved(move, flat, batch.reduction, flat)
            for index, part in zip(batch.where, parts, strict=True):
                outs[index] = part
        return outs

    def scattered(
        self, call: Call, transport: Transport, sources: list[Array]
    ) -> Steps[list[Array]]:
        """The steps that reduce to each member its share of the rows."""
        outs, me = [], call.members.me
        for source, reduction in zip(sources, self.reductions, strict=True):
            rows = split(source.shape[0], call.members.size)
            row = source[0].size if source.shape[0] else 0
            out = transport.empty((rows[me + 1] - rows[me], *source.shape[1:]), source.dtype)
            bounds = [start * row for start in rows]
            flat, into = source.reshape(-1), out.reshape(-1)
            yield from call.moved(transport.reducescatter, flat, bounds, into, reduction)
            outs.append(out)
        return outs


class Batch:
    """Arrays of one dtype, one after the other."""

    def __init__(
        self,
        own: RankState,
        where: list[int],
        shapes: list[tuple[int, ...]],
        reduction: Arithmetic,
        device: str,
    ) -> None:
        self.where, self.shapes, self.dtype = where, shapes, reduction.dtype
        self.in_one_copy = bool(device) and len(where) > _SINGLE_COPIES
        # On a GPU it takes longer to fill gaps between few arrays than alignment saves.
        line = _LINE if not device else ALIGNED if self.in_one_copy else 1
        step = max(1, line // reduction.dtype.itemsize) if len(where) > 1 else 1
        self.spans: list[tuple[int, int, int]] = []
        """Where each array begins and ends, and where the next one begins."""
        self.size = 0
        for shape in shapes:
            end = self.size + math.prod(shape)
            after = -(-end // step) * step
            self.spans.append((self.size, end, after))
            self.size = after
        # Not on a GPU, where a look would wait for its work.
        self.is_looked_at = not device and is_looked_at(
            own, reduction.op, self.dtype, self.size * self.dtype.itemsize
        )
        self._gaps: list[Any] = []
        self.staging = self.reduction = reduction
        if len(where) > 1 and not reduction.half:
            # They are prescaled as they are copied here.
            self.reduction = reduction.unscaled()

    def parts(self, flat: Array) -> list[Array]:
        return [
            flat[start:end] if len(shape) == 1 else flat[start:end].reshape(shape)
            for (start, end, _), shape in zip(self.spans, self.shapes, strict=True)
        ]

    def fill(self, flat: Array, parts: list[Array], sources: Sequence[Array]) -> None:
        for part, source, (_, end, after) in zip(parts, sources, self.spans, strict=True):
            self.staging.staged(source, part)
            if end < after:
                # The gaps between the arrays are reduced too.
                flat[end:after] = 0

    def fill_in_one_copy(self, flat: Array, sources: Sequence[Array]) -> None:
        """As `fill`, for many arrays on a GPU, with one kernel."""
        if not self._gaps:
            sizes = [after - end for _, end, after in self.spans]
            # For all calls: they are only read, by copies in one stream, which writes them first.
            zeros = np.zeros_like(flat, shape=(max(sizes),))
            self._gaps = [zeros[:size] for size in sizes]
        pieces: list[Any] = []
        for source, (start, end, _), gap in zip(sources, self.spans, self._gaps, strict=True):
            if start < end:
                pieces.append(source if len(source.shape) == 1 else source.reshape(-1))
            if gap.size:
                pieces.append(gap)
        # One kernel for more than 8 arrays of less than 2 MiB on average, otherwise a copy each:
        # cupy, cupy/_core/_routines_manipulation.pyx, _concatenate.
        if pieces:
            np.concatenate(pieces, out=flat)
        if not self.staging.copies:
            self.staging.staged(flat, flat)


def _hints(op: ReduceOp, kinds: set[str], factors: tuple[float, float]) -> list[str]:
    """What results are that a user may not expect."""
    found, integers = list[str](), not kinds.isdisjoint("iu")
    if op is Average and integers:
        found.append(_TRUNCATION_HINT)
    elif integers and not all(factor.is_integer() for factor in factors):
        found.append(_CUT_HINT)
    if op is Sum and "b" in kinds:
        found.append(_ANY_HINT)
    return found


def plan_of(
    group: Group, kind: str, op: ReduceOp, specs: ArraySpecs, *options: Any
) -> ReductionPlan:
    key = (kind, op._value_, specs, *options)
    plan: ReductionPlan | None = group.plans.get(key)
    return plan or keep(group.plans, key, ReductionPlan(group, kind, op, specs, *options))


def _check_shapes(kind: str, op: ReduceOp, shapes: list[tuple[int, ...]], size: int) -> None:
    if op is Adasum and (size & (size - 1) or "reducescatter" in kind):
        raise UsageError(
            f"Adasum needs allreduce on a number of ranks that is a power of two: found {kind} "
            f"on {size}. Use Average."
        )
    if "reducescatter" in kind and () in shapes:
        raise UsageError(
            "reducescatter needs a first dimension to cut: found a scalar. "
            "Use allreduce, or reshape(1)."
        )


_SYNONYMS = {
    **{op.name.lower(): op.name for op in ReduceOp},
    **{"mean": "Average", "avg": "Average", "prod": "Product", "multiply": "Product"},
    **{"amin": "Min", "minimum": "Min", "amax": "Max", "maximum": "Max"},
}
"""The names of the reductions in other libraries."""


def begin_reduction(
    kind: str,
    arrays: Sequence[Any],
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    transport: str | None = None,
    device: str = "",
    *,
    root: int = -1,
    labels: Sequence[str] = (),
    out: Any = None,
) -> Call:
    arrays = listed(kind, arrays)
    group = world.current().groups[0] if process_set is None else group_of(process_set, kind)
    op = op_of(kind, op)
    if kind == "reduce":
        group.index(root, kind)
    factors = _factor(kind, prescale_factor), _factor(kind, postscale_factor)
    compress, compressed = _compressor(kind, compression)
    inputs = read_inputs(kind, arrays, transport, device, host=op is Adasum)
    output, memory = None, None
    if out is not None:
        output = _output(kind, arrays, out)
        if op is not Adasum and compression is Compression.none:
            memory = output.memory(inputs)
    sources, contexts = inputs.sources, list[Any]()
    if compression is not Compression.none:
        pairs = [compress(source) for source in sources]
        sources, contexts = [source for source, _ in pairs], [context for _, context in pairs]
    specs = tuple([(source.dtype, source.shape) for source in sources])
    labels = labels or labels_of(arrays)
    exact = factors == (1.0, 1.0) and op in (Sum, Product) and not inputs.device
    integers = [one for one in arrays if _is_integer(one)] if exact else []
    exact = exact and len(integers) == len(arrays) == 1
    way = group.transports.get(inputs.transport, group.through_host)
    if not (exact and way.exact):
        where = "between hosts" if exact else "of several values"
        for integer in integers:
            _check_fits(f"{kind}({op.name}) {where}", op, integer, group.size)
    plan = plan_of(
        group, kind, op, specs, factors, root, compressed, labels,
        inputs.transport, inputs.device, exact,
    )  # fmt: skip
    call = Call(group.agreement, plan.packed, name, plan.nbytes)

    def steps() -> Steps[Any]:
        way = group.choose(call, inputs.transport, inputs.gpu)
        if not sources:
            yield from call.agreed()
        if "reducescatter" in kind:
            outs = yield from plan.scattered(call, way, sources)
        else:
            outs = yield from plan.reduced(call, way, inputs, sources, memory)
        if compression is not Compression.none:
            given = zip(outs, contexts, strict=True)
            outs = [compression.decompress(out, context) for out, context in given]
        if kind == "reduce" and group.ranks[group.me] != root:
            return None
        if output is not None:
            if memory is None:
                output.copied(inputs.restored_alone(outs[0]))
            return output.array
        return (
            inputs.restored(outs) if kind.startswith("grouped") else inputs.restored_alone(outs[0])
        )

    call.steps = steps()
    return inputs.marked(call)


def _is_integer(value: Any) -> bool:
    """Whether it is an integer of Python, also of a class of the program."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fits(title: str, op: ReduceOp, value: int, size: int) -> None:
    """Raises if the result of such numbers of all ranks may not fit into 64 bits. MPI adds up no
    others, and the values of a group are in one array.
    """
    most = abs(value) * size if op is Sum else abs(value) ** size
    if most > np.iinfo(np.int64).max:
        raise UsageError(
            f"{title} needs a result of 64 bits: found {value} on one of "
            f"{size} ranks. Type for one of any size: sum(allgather_object(x)), or pass a float."
        )


def _output(kind: str, arrays: Sequence[Any], out: Any) -> GivenArray:
    if kind != "allreduce":
        raise UsageError(
            f"{kind} has no out, which allreduce alone has. Leave out= out: the result is then new."
        )
    return GivenArray(kind, arrays[0], out)


def op_of(kind: str, op: Any) -> ReduceOp:
    """The reduction for an argument ``op``; `UsageError` if it is none."""
    found = reduction_of(op)
    if found is not None:
        return found
    if isinstance(op, bool):
        # The second argument of Horovod is `average`: True would be Sum here, and False Average.
        meant = "average" if op else "sum"
    else:
        meant = str(op if isinstance(op, str) else getattr(op, "__name__", "")).lower()
    raise UsageError(
        f"{kind} expected op Sum, Average, Min, Max or Product, found {op!r:.60}. "
        f"Type: {kind}(x, op={_SYNONYMS.get(meant, 'Sum')})"
    )


def _factor(kind: str, factor: Any) -> float:
    try:
        return float(factor)
    except (ValueError, TypeError):
        raise UsageError(
            f"{kind} expected a number for prescale_factor and postscale_factor, found "
            f"{factor!r:.60}. Type for example: {kind}(x, prescale_factor=0.5)"
        ) from None


def _compressor(kind: str, compression: Any) -> tuple[Callable[[Array], Any], str]:
    """The function that compresses an array, and its name, which the ranks compare."""
    try:
        return compression.compress, compression.name
    except AttributeError:
        raise UsageError(
            f"{kind} expected compression Compression.none or Compression.fp16, found "
            f"{compression!r:.60}. Type: {kind}(x, compression=Compression.fp16)"
        ) from None


def allreduce(
    array: Any,
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    transport: str | None = None,
    device: str = "",
    out: Any = None,
) -> Any:
    """Every rank gets the element-wise reduction of all ranks' arrays.

    Integers: Sum and Product of arrays wrap around as in numpy, those of Python's integers do not;
    Average does not. Average and the scale factors, which are applied in float64, are truncated
    towards zero: the average of 1 and 2 is 1. float16 and bfloat16 are scaled and accumulated in
    float32. bool: Sum and Max mean "any", Product and Min mean "all".

    Args:
        array: any shape and dtype, the same on every rank; a number, or an array of any library
            on any device.
        op: Average, Sum, Min, Max, Product or Adasum; the same on every rank.
        name: the name in the timeline; by default the call's line.
        process_set: the ranks that take part; by default all.
        prescale_factor: multiplies the arrays before the reduction.
        postscale_factor: multiplies the result.
        compression: `Compression.fp16` halves the bytes of float32.
        transport: "shared" or "mpi", for arrays on a GPU also "nccl", "staged" or "ipc"; by default
            the fastest. "shared" and "mpi" move arrays of a GPU through host memory.
        device: "/cpu:0" moves the array through host memory, "/gpu:0" on the GPU; "" means the
            array's own device. ALLRANKS_ALLREDUCE=nccl|staged|ipc|mpi sets the transport of every
            allreduce on a GPU.
        out: an array to write the result to, of the library, dtype, shape and device of ``array``,
            or ``array`` itself; of numpy, or of another library whose arrays can be written to.
            Each rank may pass one or none. If the call fails its values are undefined.

    Returns:
        ``out``, or a new array of the kind, dtype, shape and device of the input.

    Raises:
        CollectiveMismatch: the ranks passed different arguments; no data was moved.
        UsageError: ``out`` is not like the array, is read-only, or overlaps it.
        RankLeft: a rank will never call this.

    Collective over the process set: all of its ranks call this with the same arguments, except for
    the values, ``name`` and ``out``.
    """
    if (
        type(array) is np.ndarray
        and type(op) is ReduceOp
        and op is not Adasum
        and transport is None
        and not device
        and compression is Compression.none
        and (out is None or fits(out, array))
    ):
        # A numpy array needs no conversion. This is the shortest path; keep it free of calls.
        this = worlds.process or world.current()
        group = this.groups[0] if process_set is None else group_of(process_set, "allreduce")
        key = op._value_, array.dtype, array.shape, prescale_factor, postscale_factor
        try:
            plan: ReductionPlan | None = group.plans.get(key)
        except TypeError:  # a factor is an array, which cannot be a part of a key
            plan = None
        if plan is None:
            array, plan = _plan_of_one(group, key, op, array)
        call = Call(group.agreement, plan.packed, name, plan.nbytes)
        call.transport = plan.transport
        return this.run(call, plan.move, array, plan.reductions[0], out)
    process = worlds.process
    gpu = process.gpu if process is not None else None
    if (
        process is not None
        and gpu is not None
        and gpu.has(array)
        and type(op) is ReduceOp
        and op is not Adasum
        and not device
        and compression is Compression.none
        and is_of_a_gpu(transport)
        and (out is None or fits_on_gpu(out, array, gpu))
    ):
        # The same for an array of cupy on the rank's GPU.
        group = process.groups[0] if process_set is None else group_of(process_set, "allreduce")
        kind = op._value_, array.dtype, array.shape, prescale_factor, postscale_factor, transport
        plan = group.plans.get(kind)
        if plan is None:
            factors = _factor("allreduce", prescale_factor), _factor("allreduce", postscale_factor)
            specs = ((array.dtype, array.shape),)
            plan = plan_of(
                group, "allreduce", op, specs, factors, -1, "", (), transport or "", "gpu"
            )
            if type(prescale_factor) is type(postscale_factor) is float:  # a tensor may change
                keep(group.plans, kind, plan)
        call = Call(group.agreement, plan.packed, name, plan.nbytes)
        way = group.choose(call, transport or "", gpu)
        return process.run(call, way.allreduce, array, plan.reductions[0], out)
    call = begin_reduction(
        "allreduce", [array], op, name, process_set, prescale_factor, postscale_factor,
        compression, transport, device, out=out,
    )  # fmt: skip
    return run(call)


def _plan_of_one(
    group: Group, key: tuple[Any, ...], op: ReduceOp, array: Array
) -> tuple[Array, ReductionPlan]:
    """The array, in native byte order, and the plan of its allreduce."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
        key = (key[0], array.dtype, *key[2:])
    specs = ((array.dtype, array.shape),)
    factors = _factor("allreduce", key[-2]), _factor("allreduce", key[-1])
    key = (*key[:-2], *factors)  # a tensor, which is a key by its identity, may change
    plan: ReductionPlan | None = group.plans.get(key)
    return array, plan or keep(
        group.plans, key, ReductionPlan(group, "allreduce", op, specs, factors)
    )


def allreduce_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts an `allreduce`; `synchronize` returns its result. The array must not change before, nor
    ``out`` be read.
    """
    return Handle(begin_reduction("allreduce", [array], op, **options))


def grouped_allreduce(arrays: Sequence[Any], op: ReduceOp = Average, **options: Any) -> list[Any]:
    """Every rank gets the reductions of a list of arrays, moved together: one wait for all.

    Args:
        arrays: the same number, shapes and dtypes on every rank; dtypes may be mixed.
        op: as in `allreduce`.
        **options: as in `allreduce`, without ``out``.

    Collective over the process set.
    """
    result: list[Any] = run(begin_reduction("grouped_allreduce", arrays, op, **options))
    return result


def grouped_allreduce_async(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> Handle:
    """Posts a `grouped_allreduce`; `synchronize` returns its results."""
    return Handle(begin_reduction("grouped_allreduce", arrays, op, **options))


def reducescatter(array: Any, op: ReduceOp = Average, **options: Any) -> Any:
    """Every rank gets its share, along the first dimension, of the reduction of all arrays.

    Args:
        array: shape (rows, ...), the same on every rank.
        op: Average, Sum, Min, Max or Product.
        **options: as in `allreduce`, without ``out``.

    Returns:
        Shape (rows // size, ...); the first ``rows % size`` ranks get one row more.

    Collective over the process set.
    """
    return run(begin_reduction("reducescatter", [array], op, **options))


def reducescatter_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reducescatter`; `synchronize` returns its result."""
    return Handle(begin_reduction("reducescatter", [array], op, **options))


def grouped_reducescatter(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> list[Any]:
    """Every rank gets its shares of the reductions of a list of arrays.

    Collective over the process set.
    """
    result: list[Any] = run(begin_reduction("grouped_reducescatter", arrays, op, **options))
    return result


def grouped_reducescatter_async(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> Handle:
    """Posts a `grouped_reducescatter`; `synchronize` returns its results."""
    return Handle(begin_reduction("grouped_reducescatter", arrays, op, **options))


def reduce(array: Any, root: int = 0, op: ReduceOp = Average, **options: Any) -> Any:
    """The root gets the element-wise reduction of all ranks' arrays, the others get None.

    Args:
        array: as in `allreduce`.
        root: a rank of the world, the same on every rank.
        op: as in `allreduce`.
        **options: as in `allreduce`, without ``out``.

    Collective over the process set.
    """
    return run(begin_reduction("reduce", [array], op, root=root, **options))


def reduce_async(array: Any, root: int = 0, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reduce`; `synchronize` returns its result."""
    return Handle(begin_reduction("reduce", [array], op, root=root, **options))


def join() -> int:
    """This rank has no more data: until all ranks have joined, it adds zeros to their allreduces.

    Average still divides by the number of all ranks. Only allreduce with Sum or Average continues;
    any other operation of a rank that has not joined raises `CollectiveMismatch` on all.

    Returns:
        The rank that joined last, the same on every rank.

    Raises:
        UsageError: the ranks share no memory, or checks are off.

    Collective over all ranks.
    """
    this = world.current()
    group = this.groups[0]
    if group.channel is None or this.window is None or not this.checks:
        raise UsageError(
            "join() needs ranks that share a host's memory, and checks: found "
            f"{len(set(this.hosts))} hosts, checks {'on' if this.checks else 'off'}. "
            "Give every rank the same number of batches instead: drop the remainder."
        )
    answered = 0
    while True:
        call = group.call(JOIN, "join")
        call.steps = _joined_steps(group, call, answered)
        answered += 1
        last: int | None = this.run(call)
        if last is not None:
            return last


def _joined_steps(group: Group, call: Call, answered: int) -> Steps[int | None]:
    """One call of the others; its result is the last rank to join, once all have."""
    channel = group.channel
    assert channel is not None
    before = channel.turn
    turn = before ^ 1
    # These bytes are zero in every dtype.
    channel.blocks[group.me][turn][:] = 0
    call.transport = "shared"
    yield from call.agreed(Offer(answered=answered))
    channel.turn = turn
    brought = channel.brought(call).values()
    theirs = next((spec for spec, _ in brought if spec.op != JOIN.op), None)
    if theirs is None:
        # The rank that joined last has answered the fewest calls.
        answers = [offer.answered for offer in call.agreement.offers(call)]
        return max(r for r, n in zip(group.ranks, answers, strict=True) if n == min(answers))
    yield from _contribute_zeros(group, call, theirs, before)
    return None


def _contribute_zeros(group: Group, call: Call, spec: Spec, before: int) -> Steps[None]:
    channel, dtype = group.channel, to_dtype(spec.dtype)
    assert channel is not None
    zeros = np.zeros(spec.elements, dtype)
    device = None
    if spec.device:
        inputs = read_inputs("join", [zeros], None, "/gpu:0")
        (zeros,), device = inputs.sources, inputs.gpu
    transport = group.choose(call, spec.transport, device)
    channel.turn = before
    reduction = Arithmetic(
        ReduceOp[spec.reduction], dtype, group.size, spec.prescale, spec.postscale, spec.device
    )
    if isinstance(transport, SharedMemoryTransport):
        yield from transport.contribute_zeros(call, zeros, reduction)
    else:
        _, rest = transport.allreduce(call, zeros, reduction)
        assert not callable(rest)
        yield from rest
