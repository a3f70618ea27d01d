"""Every operation against numpy, at any size. Integers exactly; floats to the tolerance below."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import IntEnum
from itertools import chain, groupby
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import shortest_way
from mpi4py import MPI
from operations import ON_GPU, TRANSPORTS, c

import allranks
import allranks.collectives as collectives
from allranks.collectives.timings import Totals
from allranks.errors import CollectiveMismatch, UsageError

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = [np.dtype(name) for name in ("float32", "float64", "float16", ml_dtypes.bfloat16)]
DTYPES = [*map(np.dtype, INTEGERS), *FLOATS, *map(np.dtype, ("complex64", "complex128", "bool"))]
SIZES = [(5,), (7000,), (90_000,)]
SHAPES = [(), (1,), (0,), (3, 0, 2), (4, 3), (2, 1, 3), *SIZES]
#: They move in several pieces, which are cut by bytes: with one dtype of each size.
LARGE = [(300_001,), (700_000,)]
IN_PIECES = ("int8", "float16", "float32", "float64", "complex128")
RELATIVE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-5}
SIZE, RANK = c.size(), c.rank()


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What a rank brings: small numbers that differ from rank to rank."""
    base = (np.arange(int(np.prod(shape))) * 7 + rank * 3) % 11
    if dtype.kind == "b":
        base = base > 4
    elif dtype.kind == "c":
        base = base + 1j * (base[::-1] + rank)
    else:
        base = base + 1 if dtype.kind in "iu" else base / 4 + 1
    return base.astype(dtype).reshape(shape)


def reduced(op: c.ReduceOp, parts: list[np.ndarray]) -> np.ndarray:
    """The same in numpy."""
    dtype = parts[0].dtype
    if dtype.name in ("float16", "bfloat16"):
        return reduced(op, [part.astype("float32") for part in parts]).astype(dtype)
    if op is c.Average:
        if dtype.kind in "iu":
            # Without a sum, which may not fit into the dtype.
            wide = np.stack(parts) if dtype.itemsize == 8 else np.stack(parts).astype("int64")
            whole, rest = np.divmod(wide, wide.dtype.type(len(parts)))
            over, rest = np.divmod(rest.sum(0), len(parts))
            down = whole.sum(0).astype(wide.dtype) + over.astype(wide.dtype)
            return (down + ((down < 0) & (rest > 0))).astype(dtype)
        return np.sum(np.stack(parts), axis=0, dtype=dtype) / len(parts)
    function = {
        c.Sum: np.logical_or if dtype.kind == "b" else np.add,
        c.Product: np.logical_and if dtype.kind == "b" else np.multiply,
        c.Min: np.minimum,
        c.Max: np.maximum,
    }[op]
    return function.reduce(np.stack(parts), axis=0).astype(dtype)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if wanted.dtype.kind in "iub":
        assert (found == wanted).all()
    else:
        kind = "complex128" if wanted.dtype.kind == "c" else "float64"
        relative = RELATIVE.get(wanted.dtype.name, 1e-12)
        np.testing.assert_allclose(found.astype(kind), wanted.astype(kind), rtol=relative)


def members(process_set: c.ProcessSet | None) -> list[int]:
    return list(range(SIZE)) if process_set is None else process_set.ranks


def grouped_too(mine: np.ndarray, op: c.ReduceOp, **options) -> list[np.ndarray]:
    """An allreduce's result, and those of two such arrays in a group."""
    return [c.allreduce(mine, op, **options), *c.grouped_allreduce([mine, mine], op, **options)]


def scattered_too(mine: np.ndarray, op: c.ReduceOp, transport: str) -> list[np.ndarray]:
    """An allreduce's result, and the one row that a reducescatter leaves to this rank."""
    rows = c.reducescatter(np.tile(mine, (SIZE, 1)), op, transport=transport)
    return [c.allreduce(mine, op, transport=transport), rows[0]]


@pytest.fixture(params=["all", "half"])
def process_set(request, sets):
    if request.param not in sets:
        pytest.skip("one rank has no halves")
    return sets[request.param]


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


# Some ranks reduce as all do: dtypes of one, two and four bytes are enough to show it.
SETS = [(dtype, "all") for dtype in DTYPES]
SETS += [(np.dtype(name), "half") for name in ("bool", "float16", "int32")]
each_dtype = pytest.mark.parametrize(
    ("dtype", "process_set"),
    SETS,
    indirect=["process_set"],
    ids=[f"{dtype.name}-{which}" for dtype, which in SETS],
)


@each_dtype
def test_allreduce_is_numpys_reduction(dtype, process_set):
    """On each transport, and on the one that is chosen for an array of its size.

    Elements are reduced one after the other: every shape with one op, every op with few sizes.
    """
    ops = [c.Average, c.Sum, c.Product, c.Min, c.Max]
    ops = ops[1:] if dtype.kind == "b" else ops[:3] if dtype.kind == "c" else ops
    for shape in [*SHAPES, *(LARGE if dtype.name in IN_PIECES else ())]:
        parts = {r: values(r, shape, dtype) for r in members(process_set)}
        mine = parts[RANK].copy()
        for op in ops if shape in SIZES else ops[:1]:
            wanted = reduced(op, [*parts.values()])
            for transport in [*(TRANSPORTS if shape in SHAPES else ()), *[None] * (op is ops[0])]:
                same(c.allreduce(mine, op, transport=transport, process_set=process_set), wanted)
        assert (mine == parts[RANK]).all()


def test_operations_of_mpi4py_name_the_same_reductions():
    mine = values(RANK, (5,), np.dtype("f8"))
    for op, same_op in ((MPI.SUM, c.Sum), (MPI.PROD, c.Product), (MPI.MIN, c.Min)):
        same(c.allreduce(mine, op=op), c.allreduce(mine, op=same_op))
    with pytest.raises(UsageError, match="expected op Sum, Average"):
        c.allreduce(mine, op=MPI.LAND)


@pytest.mark.parametrize("columns", [3, 100, 400, 7000])
def test_allreduce_of_a_transposed_array_is_the_same(columns):
    parts = [values(r, (columns, 100), np.dtype("float32")).T for r in range(SIZE)]
    found = c.allreduce(parts[RANK], c.Sum)
    same(found, reduced(c.Sum, parts))
    in_window = c.empty((columns, 100), "float32")
    in_window[:] = parts[RANK].T
    for view in (np.transpose, lambda x: x[::-1], lambda x: x[:, 1:]):
        wanted = reduced(c.Sum, [np.ascontiguousarray(view(part.T)) for part in parts])
        same(c.allreduce(view(in_window), c.Sum), wanted)


class Changed:
    """A number that changes, and is the same key, as a tensor."""

    def __init__(self) -> None:
        self.now = 0.0

    def __float__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_factor_that_has_changed_since_the_last_call_counts():
    factor, mine = Changed(), np.ones(3)
    for times in (1.0, 2.0):
        assert (c.allreduce(mine, c.Max, prescale_factor=factor) == times).all()


def test_what_an_iterator_of_arrays_raises_is_raised():
    with pytest.raises(TypeError, match="can't multiply"):
        c.grouped_allreduce(one * "text" for one in ["list"])


@pytest.mark.parametrize("dtype", ["int32", "float32", "float16"])
def test_allreduce_of_arrays_in_the_window_is_the_same(dtype):
    for count in (100, 40_000, 70_000, 1_200_000):
        parts = [values(r, (count,), np.dtype(dtype)) for r in range(SIZE)]
        for where in ("all", "some"):
            mine = parts[RANK].copy()
            if where == "all" or RANK % 2:
                mine = c.empty(count, dtype)
                mine[:] = parts[RANK]
            same(c.allreduce(mine, c.Sum), reduced(c.Sum, parts))
            twice = reduced(c.Sum, [part * 2 for part in parts])
            same(c.allreduce(mine, c.Sum, prescale_factor=2.0), twice)
            assert (mine == parts[RANK]).all()


@pytest.mark.parametrize("dtype", ["int8", "int32", "float32", "float16", "complex64", "bool"])
def test_an_allreduce_writes_to_the_array_that_it_is_given(dtype, process_set, transport):
    """To another one or to its own, and on some ranks to none."""
    ops, dtype = (c.Max, c.Sum) if dtype == "bool" else (c.Sum, c.Product), np.dtype(dtype)
    options = {"process_set": process_set, "transport": transport}
    for shape in [(), (0,), (4, 3), *SIZES, LARGE[0]]:
        parts = [values(r, shape, dtype) for r in members(process_set)]
        out = np.full(shape, 1, dtype)
        for op in ops:
            mine = values(RANK, shape, dtype)
            for given in (out, None if RANK % 2 else out):
                found = c.allreduce(mine, op, out=given, **options)
                assert given is None or found is given
                same(found, reduced(op, parts))
                same(mine, values(RANK, shape, dtype))
            found = c.allreduce(mine, op, out=None if RANK % 2 else mine, **options)
            assert (found is mine) == (RANK % 2 == 0)
            same(found, reduced(op, parts))
        if dtype.kind != "b":
            mine = values(RANK, shape, dtype)
            c.allreduce(mine, c.Sum, prescale_factor=2.0, out=out, **options)
            same(out, reduced(c.Sum, [part * dtype.type(2) for part in parts]))
            assert c.allreduce(mine, c.Average, out=mine, **options) is mine
            same(mine, reduced(c.Average, parts))


@pytest.mark.skipif(ON_GPU, reason="arrays on a GPU are in no window")
@pytest.mark.parametrize("in_place", [False, True])
def test_an_allreduce_writes_to_arrays_in_and_beside_the_window(in_place):
    for count in (100, 40_000, 70_000, 1_200_000):
        parts = [values(r, (count,), np.dtype("float32")) for r in range(SIZE)]
        for turn in range(4):
            mine, out = (
                c.empty(count) if (turn >> bit & 1) ^ (RANK & 1) else np.empty(count, np.float32)
                for bit in (0, 1)
            )
            mine[:] = parts[RANK]
            out = mine if in_place else out
            for factor in (1.0, 2.0):
                assert c.allreduce(mine, c.Sum, prescale_factor=factor, out=out) is out
                same(out, reduced(c.Sum, [part * factor for part in parts]))
                mine[:] = parts[RANK]


def test_a_result_is_copied_to_an_array_that_no_transport_writes_to(transport):
    mine, total = np.full((3, 2), 1.0 + RANK, "float32"), SIZE * (SIZE + 1) / 2
    whole = np.zeros((2, 6), "float32")
    options = [{"out": np.zeros((3, 2), "float32"), "compression": c.Compression.fp16}]
    if not ON_GPU:
        options += [{"out": whole[:, ::2].T}, {"out": whole[:, 1::2].T}]
    for each in options:
        found = c.allreduce(mine, c.Sum, transport=transport, **each)
        assert found is each["out"]
        assert (found == total).all()
    handle = c.allreduce_async(mine, c.Sum, transport=transport)
    assert (handle.synchronize() == total).all()
    if not ON_GPU:
        swapped = mine.astype(">f4")
        assert (c.allreduce(swapped, c.Sum, out=swapped) == total).all()
        number = np.empty((), "int64")
        assert c.allreduce(1, c.Sum, out=number) is number
        assert number == SIZE
        handle = c.allreduce_async(mine, c.Sum, transport=transport, out=mine)
        assert handle.synchronize() is mine
        assert (mine == total).all()


def test_adasum_writes_to_the_array_that_it_is_given():
    if SIZE & (SIZE - 1):
        pytest.skip("takes a power of two ranks")
    out, mine = np.zeros(3, "float32"), np.ones(3, "float32")
    assert c.allreduce(mine, c.Adasum, out=out) is out
    np.testing.assert_allclose(out, 1.0)


UNLIKE: dict[str, tuple[Callable[[np.ndarray], object], str]] = {
    "shape": (lambda x: np.empty(5, "f4"), r"expected a \S+ array of float32 \(4,\).*\(5,\)"),
    "dtype": (lambda x: np.empty(4, "f8"), "expected .* of float32 .* found .* of float64"),
    "list": (lambda x: [0.0] * 4, "an out of numpy, cupy or torch: found"),
    "read-only": (lambda x: np.frombuffer(bytes(16), "f4"), "found a read-only array"),
    "overlap": (lambda x: x.base[:4], "found one that overlaps it"),
}


@pytest.mark.skipif(ON_GPU, reason="see the suite of GPUs")
@pytest.mark.parametrize("what", [*UNLIKE])
def test_an_out_that_is_not_like_the_array_is_refused(what, transport):
    whole = np.ones(6, "f4")
    mine = whole[1:5]
    make, said = UNLIKE[what]
    out = make(mine)
    for call in (c.allreduce, c.allreduce_async):
        with pytest.raises(UsageError, match=said):
            call(mine, c.Sum, transport=transport, out=out)
    assert (whole == 1).all()
    # Nothing was sent.
    assert (c.allreduce(mine, c.Sum, transport=transport) == SIZE).all()


@pytest.mark.parametrize("operation", ["grouped_allreduce", "reducescatter", "reduce"])
def test_allreduce_alone_has_an_out(operation):
    mine = np.ones(SIZE)
    with pytest.raises(UsageError, match=f"{operation} has no out, which allreduce alone has"):
        getattr(collectives, operation)([mine] if "grouped" in operation else mine, out=mine)


def test_results_are_each_ranks_own_and_outlive_later_calls():
    found = c.allreduce(np.ones(200_000), c.Sum)
    found += RANK
    c.barrier()
    assert (found == SIZE + RANK).all()
    kept = [c.allreduce(np.full(100_000, float(i)), c.Max) for i in range(6)]
    views = [array[10:20] for array in kept]
    del kept
    for i in range(6):
        c.allreduce(np.full(100_000, 77.0), c.Max)
        assert (views[i] == i).all()


def test_every_rank_gets_the_same_bits(transport):
    mine = np.random.default_rng(RANK).standard_normal(600_000).astype("float32")
    for count in (0, 10, 5_000, 8192, 50_000, 600_000):
        found = c.allreduce(mine[:count], c.Sum, transport=transport)
        assert len(set(c.allgather_object(found.tobytes()))) == 1


@pytest.mark.parametrize("count", [1, 3000])
def test_an_array_that_is_not_aligned_is_one_like_others(transport, count):
    mine = np.frombuffer(b"." + bytes(8 * count), np.float64, offset=1)
    assert not mine.flags.aligned
    assert (np.stack(grouped_too(mine, c.Sum, transport=transport)) == 0).all()
    assert (c.broadcast(mine, 0) == 0).all()
    assert c.allgather(mine).shape == (SIZE * count,)


def test_averages_and_factors_cut_integers_towards_zero(transport):
    found = c.allreduce(np.array([-7]), c.Max, postscale_factor=0.5, transport=transport)
    assert found[0] == -3
    assert c.allreduce(-RANK) == -int(sum(range(SIZE)) / SIZE)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", [c.Sum, c.Product, c.Average, c.Min, c.Max])
def test_large_integers_are_as_numpys(op, dtype):
    """As many as vector instructions take at once, which an MPI may have saturate."""
    limits = np.iinfo(dtype)
    edges = np.array([limits.max, limits.max - 1, limits.max // 2, limits.min], dtype)
    for shape in ((2,), (70,), (90_000,)):
        parts = [np.resize(np.roll(edges, rank), shape) for rank in range(SIZE)]
        long = op is c.Average and np.dtype(dtype).itemsize == 8
        if long and ON_GPU:
            parts = [part // 4096 for part in parts]  # a GPU adds them up in 64 bits
        wanted = reduced(op, parts)
        for found in chain(*(scattered_too(parts[RANK], op, each) for each in TRANSPORTS)):
            if long:  # the sum is rounded where it needs more than 64 bits
                differ = [abs(int(a) - int(b)) for a, b in zip(found[:4], wanted[:4], strict=True)]
                assert max(differ) < SIZE
                assert (found == np.resize(found[:4], found.shape)).all()
            else:
                same(found, wanted)


@pytest.mark.skipif(ON_GPU, reason="a GPU adds integers up in 64 bits")
@pytest.mark.parametrize("count", [1, 70_000])
def test_an_average_of_large_integers_is_exact_where_it_fits(count, transport):
    for number in (2**53 + 1, -(2**62) - 5, 2**63 - 1):
        mine = np.full(count, number)
        for found in grouped_too(mine, c.Average, transport=transport):
            assert abs(found.astype(object) - number).max() < max(1, SIZE - 1)
        times = np.full(count, 1_764_400_000_000_000_000 + 3 * RANK)
        found = c.allreduce(times, transport=transport)
        assert (found == 1_764_400_000_000_000_000 + 3 * sum(range(SIZE)) // SIZE).all()


@pytest.mark.skipif(c.local_size() < SIZE, reason="between hosts MPI adds up 64 bits")
def test_sums_and_products_of_pythons_integers_have_any_size():
    assert c.allreduce(2**62, c.Sum) == SIZE * 2**62
    assert c.allreduce(-(10**10), c.Product) == (-(10**10)) ** SIZE
    assert c.synchronize(c.allreduce_async(2**63 - 1, c.Sum)) == SIZE * (2**63 - 1)
    assert c.reduce(2**62, 0, c.Sum) == (None if RANK else SIZE * 2**62)
    assert c.allreduce(RANK, c.Sum) == sum(range(SIZE))
    assert c.allreduce(IntEnum("Sizes", {"most": 2**62}).most, c.Sum) == SIZE * 2**62
    if SIZE > 1:
        with pytest.raises(UsageError, match="a result of 64 bits: found 461168601842738"):
            c.allreduce(2**62, c.Sum, transport="mpi")


def test_integers_of_python_among_others_are_refused_if_their_result_may_not_fit():
    assert c.grouped_allreduce([2**40, -1], c.Sum) == [SIZE * 2**40, -SIZE]
    if SIZE > 1:
        for op, others in ((c.Sum, [2**62, 1]), (c.Product, [1.0, 2**62])):
            with pytest.raises(UsageError, match="of several values needs a result of 64 bits"):
                c.grouped_allreduce(others, op)


def test_half_precision_is_scaled_where_it_does_not_overflow(transport):
    for value, before, after in ((60000.0, 2.0, 0.25), (6e-8, 1 / 8, 8.0)):
        options = {"prescale_factor": before, "postscale_factor": after, "transport": transport}
        for count in (3, 90_000):
            mine = np.full(count, value, "float16")
            wanted = np.full(count, float(mine[0]) * before * after).astype("float16")
            for found in grouped_too(mine, c.Average, **options):
                same(found, wanted)


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32"])
def test_factors_are_numpys(dtype, transport):
    for count in (3, 90_000):
        parts = [np.resize([1, 0, 1, 1 + rank], count).astype(dtype) for rank in range(SIZE)]
        for before, after in ((1.0, 0.5), (1.0, 2.0), (1.0, -1.0), (0.0, 1.0), (2.0, 0.5)):
            options = {"prescale_factor": before, "postscale_factor": after}
            scaled = [(part * before).astype(dtype) for part in parts]
            for found in grouped_too(parts[RANK], c.Sum, transport=transport, **options):
                same(found, (reduced(c.Sum, scaled) * after).astype(dtype))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_nan_of_a_product_of_complex_numbers_stays(dtype, transport):
    large = float(np.finfo(dtype).max)
    mine = np.full(40, complex(np.nan, -large / 2) if RANK else complex(6e4, -large), dtype)
    mine[20:] = 1 + 1j
    with np.errstate(over="ignore", invalid="ignore"):
        found = c.allreduce(mine, c.Product, transport=transport)
    assert np.isnan(found[:20]).all() == (SIZE > 1)
    same(found[20:], np.full(20, (1 + 1j) ** SIZE, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [c.Min, c.Max, c.Sum, c.Average, c.Product])
def test_a_nan_of_any_rank_is_everybodys_nan(op, dtype, transport):
    for count in (1, 8, 90_000):
        mine = np.full(count, -1.0 - RANK, dtype)
        # Of each rank some, and some of none.
        mine[RANK :: SIZE + 1] = np.nan
        for found in scattered_too(mine, op, transport):
            assert (np.isnan(found) == (np.arange(count) % (SIZE + 1) < SIZE)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_least_and_the_largest_are_numpys(dtype, transport):
    """Signs, zeros and infinities, at which floats and their bits are ordered differently."""
    edges = np.array([-np.inf, -2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 1.0, 2.5, np.inf], dtype)
    parts = [np.random.default_rng(rank).choice(edges, 500) for rank in range(SIZE)]
    for op in (c.Min, c.Max):
        same(c.allreduce(parts[RANK], op, transport=transport), reduced(op, parts))


def test_any_layout_of_input_works(transport):
    whole = np.arange(24.0).reshape(4, 6)
    frozen = whole.copy()
    frozen.flags.writeable = False
    for mine in (whole.T, whole[::2, ::3], whole[:, 1], frozen, whole.astype(">f8"), [[1.0, 2.0]]):
        found = c.allreduce(mine, c.Sum, transport=transport)
        np.testing.assert_array_equal(found, np.asarray(mine) * SIZE)
        assert found.flags.writeable


def test_groups_mix_shapes_and_dtypes(transport, process_set):
    kinds = [((3, 2), "float32"), ((), "int64"), ((0,), "float32"), ((90_000,), "float32")]

    def bring(rank):
        return [values(rank, shape, np.dtype(dtype)) for shape, dtype in kinds]

    options = {"transport": transport, "process_set": process_set}
    parts = zip(*map(bring, members(process_set)), strict=True)
    for found, each in zip(c.grouped_allreduce(bring(RANK), c.Sum, **options), parts, strict=True):
        same(found, reduced(c.Sum, list(each)))
    for call in (c.grouped_allreduce, c.grouped_allgather, c.grouped_reducescatter):
        assert call([], **options) == []


@pytest.mark.parametrize("shape", [(1,), (7, 2), (0, 3), (100_001,)])
@pytest.mark.parametrize("dtype", ["int16", "float32", "float16", "bool"])
def test_reducescatter_gives_the_first_ranks_one_row_more(shape, dtype, transport, process_set):
    ranks, op = members(process_set), c.Max if dtype == "bool" else c.Sum
    parts = [values(r, shape, np.dtype(dtype)) for r in ranks]
    me, options = ranks.index(RANK), {"transport": transport, "process_set": process_set}
    wanted = np.array_split(reduced(op, parts), len(ranks))[me]
    same(c.reducescatter(parts[me], op, **options), wanted)
    for found in c.grouped_reducescatter([parts[me], parts[me]], op, **options):
        same(found, wanted)


def test_reduce_and_gather_give_the_root_alone(transport, process_set):
    ranks, options = members(process_set), {"transport": transport, "process_set": process_set}
    for root in ranks:
        total = c.reduce(np.array([RANK + 1]), root, c.Sum, **options)
        rows = c.gather(np.full(RANK + 1, RANK), root, **options)
        if root == RANK:
            assert total == sum(ranks) + len(ranks)
            same(rows, np.concatenate([np.full(r + 1, r) for r in ranks]))
        else:
            assert total is rows is None


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_no_rank_is_refused(root):
    for call in (c.reduce, c.broadcast, c.gather, c.scatter):
        with pytest.raises(UsageError, match=rf"{call.__name__} needs a root .*found {root}"):
            call(np.ones((SIZE, 2)), root)


@each_dtype
def test_broadcast_gives_the_roots_array_and_allgather_joins_uneven_rows(
    dtype, transport, process_set
):
    ranks, options = members(process_set), {"transport": transport, "process_set": process_set}
    # Over all dtypes, each shape from each root.
    for number, shape in enumerate(SHAPES, DTYPES.index(dtype)):
        root = ranks[number % len(ranks)]
        same(c.broadcast(values(RANK, shape, dtype), root, **options), values(root, shape, dtype))
    for tail in ((), (3,), (2, 0), (40_000,)):
        parts = {r: values(r, (r % 3, *tail), dtype) for r in ranks}
        joined = np.concatenate([*parts.values()])
        same(c.allgather(parts[RANK], **options), joined)
        one, other = c.grouped_allgather([parts[RANK], np.full(1, 0.5)], **options)
        same(one, joined)
        same(other, np.full(len(ranks), 0.5))


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (30_000, 2), (3, 0)])
def test_scatter_cuts_the_roots_array(rows, width, transport, process_set):
    ranks, options = members(process_set), {"transport": transport, "process_set": process_set}
    root, me = ranks[-1], ranks.index(RANK)
    whole = np.arange(len(ranks) * rows * width * 1.0).reshape(len(ranks) * rows, width)
    mine = whole if root == RANK else None
    same(c.scatter(mine, root, **options), whole[me * rows : (me + 1) * rows])
    splits = [len(whole), *[0] * (len(ranks) - 1)] if root == RANK else None
    first = c.scatter(mine, root, splits, **options)
    same(first, whole if me == 0 else whole[:0])


@pytest.mark.parametrize("width", [0, 1, 20_000])
def test_alltoall_sends_each_rank_its_piece(width, transport, process_set):
    ranks = members(process_set)
    me, all_of_them = ranks.index(RANK), range(len(ranks))

    def piece(source, target):
        return np.full((source + target, width), source * 100 + target, "int32")

    mine = np.concatenate([piece(me, other) for other in all_of_them])
    splits = [me + other for other in all_of_them]
    found, received = c.alltoall(mine, splits, transport=transport, process_set=process_set)
    same(found, np.concatenate([piece(other, me) for other in all_of_them]))
    assert received == splits


@pytest.mark.parametrize("splits", [[0.5] * SIZE, [1.0] * SIZE, [True] * SIZE])
def test_splits_that_are_no_whole_numbers_are_refused(splits):
    with pytest.raises(UsageError, match=r"alltoall needs splits of whole numbers: found \["):
        c.alltoall(np.arange(SIZE), splits)


def test_alltoall_without_splits_needs_equal_pieces():
    found = c.alltoall(np.arange(SIZE) + 10 * RANK)
    assert list(found) == [10 * r + RANK for r in range(SIZE)]
    if SIZE > 1:
        with pytest.raises(UsageError, match="multiple of"):
            c.alltoall(np.ones(SIZE + 1))


def test_adasum_is_the_gradient_of_equal_ones_and_the_sum_of_orthogonal_ones():
    if SIZE & (SIZE - 1):
        with pytest.raises(UsageError, match="power of two"):
            c.allreduce(np.ones(4), c.Adasum)
        return
    np.testing.assert_allclose(c.allreduce(np.arange(4.0), c.Adasum), np.arange(4.0))
    options = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    found = c.allreduce(np.arange(4.0), c.Adasum, **options)
    np.testing.assert_allclose(found, np.arange(4.0) * 1.5)
    for found in grouped_too(np.eye(SIZE)[RANK], c.Adasum):
        np.testing.assert_allclose(found, np.ones(SIZE))


def test_handles_may_be_synchronized_in_any_order(sets, transport):
    posted = [
        c.allreduce_async(np.full(9, float(i)), c.Sum, transport=transport, process_set=chosen)
        for i in range(6)
        for chosen in sets.values()
    ]
    for handle in posted if RANK % 2 else posted[::-1]:
        c.synchronize(handle)
    for index, handle in enumerate(posted):
        chosen = list(sets.values())[index % len(sets)]
        assert (c.synchronize(handle) == index // len(sets) * len(members(chosen))).all()


def test_poll_says_when_a_result_is_there_as_after_a_blocking_call():
    handle = c.allgather_async(np.array([RANK]))
    while not c.poll(handle):
        continue
    assert list(handle.synchronize()) == list(range(SIZE))
    handle = c.broadcast_async(np.array([RANK]), SIZE - 1)
    assert c.allreduce(1, c.Sum) == SIZE
    assert c.poll(handle)


@pytest.mark.skipif(SIZE < 2, reason="one rank has no others")
def test_a_set_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match="has not been registered"):
        c.allreduce(1.0, process_set=c.ProcessSet([RANK]))
    assert not c.remove_process_set(c.global_process_set)
    if SIZE > 2:
        foreign = c.add_process_set([0, 1])
        if RANK > 1:
            with pytest.raises(ValueError, match="not a member"):
                c.allreduce(1.0, process_set=foreign)
        assert c.remove_process_set(foreign)


def test_records_tell_waiting_from_transfer():
    c.allreduce(np.ones(1000, "float32"), c.Sum, name="gradients")
    record = c.records()[-1]
    assert (record.op, record.name, record.nbytes) == ("allreduce", "gradients", 4000)
    assert record.arrived <= record.last_arrived <= record.ended
    assert (record.busbw_gbps is None) == (SIZE == 1)


@pytest.mark.parametrize("away", [0.3, 0])
def test_a_moment_counts_for_one_of_the_calls_that_are_under_way_together(sets, transport, away):
    """Not at all where this rank is away, and once where it waits for a late one in several."""
    totals, before, began = Totals(), len(c.records()), time.perf_counter()
    if not away and RANK == SIZE - 1:
        time.sleep(0.2)
    posted = [
        c.allreduce_async(np.full(2000, float(i)), c.Sum, transport=transport, process_set=s)
        for i in range(200 if away else 2)
        for s in sets.values()
    ]
    time.sleep(away)
    c.grouped_allreduce([np.ones(3), np.ones(3)], c.Sum)
    for handle in posted:
        c.synchronize(handle)
    took = time.perf_counter() - began
    told = sum(row.wait_seconds + row.transfer_seconds for row in totals.changed())
    records = c.records()[before:]
    assert told == pytest.approx(sum(r.wait_seconds + r.transfer_seconds for r in records))
    assert 0 < told <= took - away


PAGE = Path(allranks.__file__).parents[1] / "docs" / "architecture.md"


@pytest.mark.skipif(ON_GPU or c.local_size() < SIZE, reason="needs memory that all share")
def test_an_array_passes_few_functions_and_no_room_twice():
    array = np.ones(3, np.float32)
    # The rank that comes last waits for none.
    way = min(c.allgather_object(shortest_way(lambda: c.allreduce(array))), key=len)
    entered = [room for room, _ in groupby(file.parent for file, _ in way)]
    assert len(way) <= 12
    assert len({file for file, _ in way}) <= 6
    assert len(entered) == len(set(entered))
    # The page names them in this order.
    told, at = PAGE.read_text().partition("## The path of an array")[2].partition("\n## ")[0], 0
    for file, name in way:
        assert f"`{file.as_posix()}`" in told
        at = told.index(f"{name}`", at)


one_host = pytest.mark.skipif(c.local_size() < SIZE, reason="join needs a single host")


@one_host
def test_ranks_without_data_join_the_others():
    for done in range(RANK + 1):
        assert c.allreduce(np.full(3, 1.0), c.Sum)[0] == SIZE - done
        big = c.allreduce(np.full(150_000, 1.0, "float32"), c.Average)
        np.testing.assert_allclose(big, (SIZE - done) / SIZE, rtol=1e-6)
        assert c.allreduce(1, c.Sum, transport="mpi") == SIZE - done
    assert c.join() == SIZE - 1
    assert c.allreduce(1, c.Sum) == SIZE


@one_host
@pytest.mark.parametrize("own", ["shared", "mpi", None])
@pytest.mark.parametrize("count", [3, 1000, 40_000, 100_000])
def test_factors_and_groups_count_for_ranks_that_have_joined_too(count, own):
    left = SIZE - 1
    options = {"prescale_factor": 0.5, "postscale_factor": 10.0, "transport": own}
    if left > RANK:
        found = grouped_too(np.full(count, 4.0, "float32"), c.Sum, **options)
        found.append(c.allreduce(np.full(count, 4.0, "float16"), c.Sum, **options))
        assert all((each == left * 20.0).all() for each in found)
        small = c.allreduce(np.full(count, 4, "int8"), c.Average, transport=own)
        assert (small == int(left * 4 / SIZE)).all()
    c.join()


@one_host
@pytest.mark.skipif(SIZE < 2, reason="one rank has no others")
def test_an_operation_that_joined_ranks_cannot_bring_zeros_to_is_refused():
    with pytest.raises(CollectiveMismatch, match="the same operation"):
        _ = c.join() if RANK == 0 else c.broadcast(1.0, 1)


@pytest.mark.skipif(SIZE < 2, reason="one rank has no others")
@pytest.mark.parametrize("count", [0, 3, 500_000])
def test_send_and_recv_carry_an_array_around(count):
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    mine = np.full((count, 2), RANK, "int16")
    if RANK == 0:
        c.send(mine, after)
    found = c.recv(before)
    if RANK:
        c.send(mine, after)
    same(found, np.full((count, 2), before, "int16"))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: c.send(np.ones(2), "a"), r"found rank 'a' .*, tag 0\."),
        (lambda: c.send(np.ones(2), 0.5), r"found rank 0\.5 .*, tag 0\."),
        (lambda: c.recv((RANK + 1) % SIZE, None), r"found rank \d .*, tag None\."),
    ],
)
def test_send_and_recv_refuse_what_is_no_rank_or_no_tag(call, found):
    with pytest.raises(UsageError, match=f"send and recv need another rank.*{found}"):
        call()


def test_the_timeline_has_a_row_a_rank(tmp_path):
    path = c.broadcast_object(str(tmp_path / "trace.json"))
    c.allreduce(np.ones(10), name="gradients")
    c.timeline(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {f"rank {r}" for r in range(SIZE)}
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"transfer"}
    assert any("gradients" in e["name"] for e in events)
