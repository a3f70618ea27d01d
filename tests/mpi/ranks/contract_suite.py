"""Every operation against numpy, at any size. Integers exactly; floats to the tolerance below."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from operations import ON_GPU, TRANSPORTS, c

import allranks
from allranks.collectives.timings import Totals
from allranks.errors import CollectiveMismatch, UsageError

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
HALVES = ["float16", ml_dtypes.bfloat16]
DTYPES = [np.dtype(name) for name in [*INTEGERS, *FLOATS, *COMPLEX, *HALVES, "bool"]]
SHAPES = [(), (1,), (0,), (3, 0, 2), (5,), (4, 3), (2, 1, 3), (7000,), (90_000,)]
RELATIVE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-5}


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What a rank brings: small numbers that differ from rank to rank."""
    count = int(np.prod(shape))
    base = (np.arange(count) * 7 + rank * 3) % 11
    if dtype.kind == "b":
        return (base > 4).reshape(shape)
    if dtype.kind == "c":
        base = base + 1j * (base[::-1] + rank)
    elif dtype.kind not in "iu":
        base = base / 4 + 1
    else:
        base = base + 1
    return base.astype(dtype).reshape(shape)


def members(process_set: c.ProcessSet | None) -> list[int]:
    return list(range(c.size())) if process_set is None else process_set.ranks


def reduced(op: c.ReduceOp, parts: list[np.ndarray]) -> np.ndarray:
    """The same in numpy."""
    dtype = parts[0].dtype
    if dtype.name in ("float16", "bfloat16"):
        return reduced(op, [part.astype("float32") for part in parts]).astype(dtype)
    if op is c.Average:
        wide = dtype.kind in "iu" and dtype.itemsize < 8
        total = np.sum(np.stack(parts), axis=0, dtype="int64" if wide else dtype)
        if dtype.kind in "iu":
            return np.trunc(total.astype("float64") / len(parts)).astype(dtype)
        return total / len(parts)
    function = {
        c.Sum: np.logical_or if dtype.kind == "b" else np.add,
        c.Product: np.logical_and if dtype.kind == "b" else np.multiply,
        c.Min: np.minimum,
        c.Max: np.maximum,
    }[op]
    return function.reduce(np.stack(parts), axis=0).astype(dtype)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if wanted.dtype.kind in "iub":
        assert (found == wanted).all()
    else:
        kind = "complex128" if wanted.dtype.kind == "c" else "float64"
        np.testing.assert_allclose(
            found.astype(kind), wanted.astype(kind), rtol=RELATIVE.get(wanted.dtype.name, 1e-12)
        )


def operations(dtype: np.dtype) -> list[c.ReduceOp]:
    if dtype.kind == "b":
        return [c.Sum, c.Product, c.Min, c.Max]
    if dtype.kind == "c":
        return [c.Average, c.Sum, c.Product]
    return [c.Average, c.Sum, c.Product, c.Min, c.Max]


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
def test_allreduce_is_numpys_reduction(dtype, transport, process_set):
    ranks = members(process_set)
    for shape in SHAPES:
        for op in operations(dtype):
            mine = values(c.rank(), shape, dtype)
            found = c.allreduce(mine, op, transport=transport, process_set=process_set)
            same(found, reduced(op, [values(r, shape, dtype) for r in ranks]))
            assert (mine == values(c.rank(), shape, dtype)).all()


def test_operations_of_mpi4py_name_the_same_reductions():
    from mpi4py import MPI

    mine = values(c.rank(), (5,), np.dtype("f8"))
    for op, same_op in ((MPI.SUM, c.Sum), (MPI.PROD, c.Product), (MPI.MIN, c.Min)):
        same(c.allreduce(mine, op=op), c.allreduce(mine, op=same_op))
    with pytest.raises(UsageError, match="expected op Sum, Average"):
        c.allreduce(mine, op=MPI.LAND)


@each_dtype
def test_allreduce_chooses_a_transport_with_the_same_result(dtype, process_set):
    for shape in [*SHAPES, (300_001,), (700_000,)]:
        op = operations(dtype)[0]
        found = c.allreduce(values(c.rank(), shape, dtype), op, process_set=process_set)
        same(found, reduced(op, [values(r, shape, dtype) for r in members(process_set)]))


@pytest.mark.parametrize("dtype", ["int32", "float32", "float16"])
def test_allreduce_of_arrays_in_the_window_is_the_same(dtype):
    for count in (100, 70_000, 1_200_000):
        for where in ("all", "some"):
            mine = values(c.rank(), (count,), np.dtype(dtype))
            if where == "all" or c.rank() % 2:
                living = c.empty(count, dtype)
                living[:] = mine
                mine = living
            found = c.allreduce(mine, c.Sum)
            parts = [values(r, (count,), np.dtype(dtype)) for r in range(c.size())]
            same(found, reduced(c.Sum, parts))
            assert (mine == parts[c.rank()]).all()


def test_results_in_the_window_are_each_ranks_own():
    found = c.allreduce(np.ones(200_000), c.Sum)
    found += c.rank()
    c.barrier()
    assert (found == c.size() + c.rank()).all()


def test_results_outlive_later_calls():
    kept = [c.allreduce(np.full(100_000, float(i)), c.Max) for i in range(6)]
    views = [array[10:20] for array in kept]
    del kept
    for i in range(6):
        c.allreduce(np.full(100_000, 77.0), c.Max)
        assert (views[i] == i).all()


def test_every_rank_gets_the_same_bits(transport):
    mine = np.random.default_rng(c.rank()).standard_normal(50_000).astype("float32")
    for count in (10, 5_000, 50_000):
        found = c.allreduce(mine[:count], c.Sum, transport=transport)
        assert len(set(c.allgather_object(found.tobytes()))) == 1


@pytest.mark.parametrize("count", [1, 3000])
def test_an_array_that_is_not_aligned_is_one_like_others(transport, count):
    mine = np.frombuffer(b"." + bytes(8 * count), np.float64, offset=1)
    assert not mine.flags.aligned
    assert (c.allreduce(mine, c.Sum, transport=transport) == 0).all()
    assert (c.broadcast(mine, 0) == 0).all()
    assert c.allgather(mine).shape == (c.size() * count,)
    assert (c.grouped_allreduce([mine, mine], c.Sum, transport=transport)[1] == 0).all()


def test_factors_scale_before_and_after(transport):
    mine = np.full(6, 2.0 + c.rank())
    found = c.allreduce(mine, c.Sum, prescale_factor=0.5, postscale_factor=3.0, transport=transport)
    np.testing.assert_allclose(found, sum((2.0 + r) * 0.5 for r in range(c.size())) * 3.0)


def test_factors_cut_integers_towards_zero(transport):
    found = c.allreduce(np.array([-7]), c.Max, postscale_factor=0.5, transport=transport)
    assert found[0] == -3


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", [c.Sum, c.Product, c.Average, c.Min, c.Max])
def test_large_integers_are_as_numpys(op, dtype, transport):
    """As many as vector instructions take at once, which an MPI may have saturate."""
    limits = np.iinfo(dtype)
    edges = np.array([limits.max, limits.max - 1, limits.max // 2, limits.min], dtype)
    for shape in ((2,), (70,), (90_000,)):
        parts = [np.resize(np.roll(edges, rank), shape) for rank in range(c.size())]
        if op is c.Average and np.dtype(dtype).itemsize == 8:
            parts = [part // 4096 for part in parts]  # divided in float64, which is cut off there
        found = c.allreduce(parts[c.rank()], op, transport=transport)
        same(found, reduced(op, parts))
        own = c.reducescatter(np.tile(parts[c.rank()], (c.size(), 1)), op, transport=transport)
        same(own[0], reduced(op, parts))


def test_half_precision_is_scaled_where_it_does_not_overflow(transport):
    for value, before, after in ((60000.0, 2.0, 0.25), (6e-8, 1 / 8, 8.0)):
        for count in (3, 90_000):
            mine = np.full(count, value, "float16")
            options = {"prescale_factor": before, "postscale_factor": after}
            found = c.allreduce(mine, c.Average, transport=transport, **options)
            group = c.grouped_allreduce([mine, mine], c.Average, transport=transport, **options)
            for each in (found, *group):
                same(each, np.full(count, float(mine[0]) * before * after).astype("float16"))


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32"])
def test_factors_are_numpys(dtype, transport):
    for count in (3, 90_000):
        parts = [np.resize([1, 0, 1, 1 + rank], count).astype(dtype) for rank in range(c.size())]
        for before, after in ((1.0, 0.5), (1.0, 2.0), (1.0, -1.0), (0.0, 1.0), (2.0, 0.5)):
            options = {"prescale_factor": before, "postscale_factor": after}
            scaled = [(part * before).astype(dtype) for part in parts]
            wanted = (reduced(c.Sum, scaled) * after).astype(dtype)
            mine = parts[c.rank()]
            same(c.allreduce(mine, c.Sum, transport=transport, **options), wanted)
            group = c.grouped_allreduce([mine, mine], c.Sum, transport=transport, **options)
            same(group[0], wanted)
            same(group[1], wanted)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_nan_of_a_product_of_complex_numbers_stays(dtype, transport):
    large = float(np.finfo(dtype).max)
    mine = np.full(40, complex(np.nan, -large / 2) if c.rank() else complex(6e4, -large), dtype)
    mine[20:] = 1 + 1j
    with np.errstate(over="ignore", invalid="ignore"):
        found = c.allreduce(mine, c.Product, transport=transport)
    assert np.isnan(found[:20]).all() == (c.size() > 1)
    same(found[20:], np.full(20, (1 + 1j) ** c.size(), dtype))


@pytest.mark.parametrize("dtype", [np.dtype(name) for name in [*FLOATS, *HALVES]], ids=str)
@pytest.mark.parametrize("op", [c.Min, c.Max, c.Sum, c.Average, c.Product])
def test_a_nan_of_any_rank_is_everybodys_nan(op, dtype, transport):
    for count in (1, 8, 90_000):
        for bad in range(c.size()):
            mine = np.full(count, -1.0 - c.rank(), dtype)
            if c.rank() == bad:
                mine[::2] = np.nan
            found = c.allreduce(mine, op, transport=transport)
            (row,) = c.reducescatter(np.tile(mine, (c.size(), 1)), op, transport=transport)
            for each in (found, row):
                assert np.isnan(each[::2]).all()
                assert not np.isnan(each[1::2]).any()


@pytest.mark.parametrize("dtype", [np.dtype(name) for name in [*FLOATS, *HALVES]], ids=str)
def test_the_least_and_the_largest_are_numpys(dtype, transport):
    """Signs, zeros and infinities, at which floats and their bits are ordered differently."""
    edges = np.array([-np.inf, -2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 1.0, 2.5, np.inf], dtype)
    parts = [np.random.default_rng(rank).choice(edges, 500) for rank in range(c.size())]
    for op in (c.Min, c.Max):
        same(c.allreduce(parts[c.rank()], op, transport=transport), reduced(op, parts))


def test_average_of_integers_is_cut_towards_zero():
    assert c.allreduce(-c.rank()) == -int(sum(range(c.size())) / c.size())


def test_fp16_compression_gives_back_the_dtype():
    mine = np.full(5, 1.5 + c.rank(), "float32")
    found = c.allreduce(mine, c.Sum, compression=c.Compression.fp16)
    same(found, np.full(5, sum(1.5 + r for r in range(c.size())), "float32"))


def test_numbers_come_back_as_numbers():
    assert c.allreduce(2.5, c.Sum) == 2.5 * c.size()
    assert type(c.allreduce(2, c.Sum)) is int
    assert type(c.allreduce(np.float32(2), c.Sum)) is np.float32


def test_any_layout_of_input_works(transport):
    whole = np.arange(24.0).reshape(4, 6)
    frozen = whole.copy()
    frozen.flags.writeable = False
    for mine in (whole.T, whole[::2, ::3], whole[:, 1], frozen, whole.astype(">f8"), [[1.0, 2.0]]):
        found = c.allreduce(mine, c.Sum, transport=transport)
        np.testing.assert_array_equal(found, np.asarray(mine) * c.size())
        assert found.flags.writeable


def test_grouped_allreduce_mixes_shapes_and_dtypes(transport, process_set):
    ranks = members(process_set)
    kinds = [((3, 2), "float32"), ((), "int64"), ((0,), "float32"), ((90_000,), "float32")]

    def bring(rank):
        return [values(rank, shape, np.dtype(dtype)) for shape, dtype in kinds]

    found = c.grouped_allreduce(
        bring(c.rank()), c.Sum, transport=transport, process_set=process_set
    )
    for index, one in enumerate(found):
        same(one, reduced(c.Sum, [bring(rank)[index] for rank in ranks]))


def test_grouped_calls_of_nothing_give_nothing():
    assert c.grouped_allreduce([]) == []
    assert c.grouped_allgather([]) == []
    assert c.grouped_reducescatter([]) == []


@pytest.mark.parametrize("shape", [(1,), (7, 2), (0, 3), (100_001,)])
@pytest.mark.parametrize("dtype", ["int16", "float32", "float16", "bool"])
def test_reducescatter_gives_the_first_ranks_one_row_more(shape, dtype, transport, process_set):
    ranks = members(process_set)
    op = c.Max if dtype == "bool" else c.Sum
    found = c.reducescatter(
        values(c.rank(), shape, np.dtype(dtype)), op, transport=transport, process_set=process_set
    )
    whole = reduced(op, [values(r, shape, np.dtype(dtype)) for r in ranks])
    same(found, np.array_split(whole, len(ranks))[ranks.index(c.rank())])


def test_grouped_reducescatter_scatters_each():
    found = c.grouped_reducescatter([np.ones((5, 2)), np.arange(3.0)], c.Sum)
    wholes = [np.ones((5, 2)) * c.size(), np.arange(3.0) * c.size()]
    mine = [np.array_split(whole, c.size())[c.rank()] for whole in wholes]
    for one, wanted in zip(found, mine, strict=True):
        same(one, wanted)


def test_reduce_gives_the_root_alone(transport, process_set):
    ranks = members(process_set)
    for root in ranks:
        found = c.reduce(
            np.array([c.rank() + 1]), root, c.Sum, transport=transport, process_set=process_set
        )
        assert found == (sum(ranks) + len(ranks) if c.rank() == root else None)


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_no_rank_is_refused(root):
    for call in (c.reduce, c.broadcast, c.gather, c.scatter):
        with pytest.raises(UsageError, match=rf"{call.__name__} needs a root .*found {root}"):
            call(np.ones((c.size(), 2)), root)


@each_dtype
def test_broadcast_gives_the_roots_array(dtype, transport, process_set):
    for root in members(process_set):
        for shape in SHAPES:
            found = c.broadcast(
                values(c.rank(), shape, dtype), root, transport=transport, process_set=process_set
            )
            same(found, values(root, shape, dtype))


@each_dtype
def test_allgather_joins_uneven_rows(dtype, transport, process_set):
    ranks = members(process_set)
    for tail in ((), (3,), (2, 0), (40_000,)):
        mine = values(c.rank(), (c.rank() % 3, *tail), dtype)
        found = c.allgather(mine, transport=transport, process_set=process_set)
        same(found, np.concatenate([values(r, (r % 3, *tail), dtype) for r in ranks]))


def test_grouped_allgather_joins_each(transport):
    found = c.grouped_allgather(
        [np.full((c.rank(), 2), c.rank()), np.full(1, 0.5)], transport=transport
    )
    same(found[0], np.concatenate([np.full((r, 2), r) for r in range(c.size())]))
    same(found[1], np.full(c.size(), 0.5))


def test_gather_gives_the_root_what_allgather_gives_all(transport, process_set):
    ranks = members(process_set)
    root = ranks[-1]
    mine = np.full(c.rank() + 1, c.rank())
    found = c.gather(mine, root, transport=transport, process_set=process_set)
    if c.rank() == root:
        same(found, np.concatenate([np.full(r + 1, r) for r in ranks]))
    else:
        assert found is None


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (30_000, 2), (3, 0)])
def test_scatter_cuts_the_roots_array(rows, width, transport, process_set):
    ranks = members(process_set)
    root, me = ranks[-1], ranks.index(c.rank())
    whole = np.arange(len(ranks) * rows * width * 1.0).reshape(len(ranks) * rows, width)
    mine = whole if c.rank() == root else None
    even = c.scatter(mine, root, transport=transport, process_set=process_set)
    same(even, whole[me * rows : (me + 1) * rows])
    splits = [len(whole), *[0] * (len(ranks) - 1)] if c.rank() == root else None
    first = c.scatter(mine, root, splits, transport=transport, process_set=process_set)
    same(first, whole if me == 0 else whole[:0])


@pytest.mark.parametrize("width", [0, 1, 20_000])
def test_alltoall_sends_each_rank_its_piece(width, transport, process_set):
    ranks = members(process_set)
    me = ranks.index(c.rank())

    def piece(source, target):
        return np.full((source + target, width), source * 100 + target, "int32")

    mine = np.concatenate([piece(me, other) for other in range(len(ranks))])
    splits = [me + other for other in range(len(ranks))]
    found, received = c.alltoall(mine, splits, transport=transport, process_set=process_set)
    same(found, np.concatenate([piece(other, me) for other in range(len(ranks))]))
    assert received == [other + me for other in range(len(ranks))]


def test_alltoall_without_splits_needs_equal_pieces():
    found = c.alltoall(np.arange(c.size()) + 10 * c.rank())
    assert list(found) == [10 * r + c.rank() for r in range(c.size())]
    if c.size() > 1:
        with pytest.raises(UsageError, match="multiple of"):
            c.alltoall(np.ones(c.size() + 1))


def test_objects_travel():
    assert c.broadcast_object({"rank": c.rank()}, c.size() - 1) == {"rank": c.size() - 1}
    assert c.allgather_object([c.rank()] * c.rank()) == [[r] * r for r in range(c.size())]


def test_adasum_of_equal_gradients_is_the_gradient():
    if c.size() & (c.size() - 1):
        with pytest.raises(UsageError, match="power of two"):
            c.allreduce(np.ones(4), c.Adasum)
    else:
        np.testing.assert_allclose(c.allreduce(np.arange(4.0), c.Adasum), np.arange(4.0))


def test_adasum_takes_factors():
    if c.size() & (c.size() - 1) == 0:
        options = {"prescale_factor": 0.5, "postscale_factor": 3.0}
        found = c.allreduce(np.arange(4.0), c.Adasum, **options)
        np.testing.assert_allclose(found, np.arange(4.0) * 1.5)


def test_adasum_of_orthogonal_gradients_is_their_sum():
    if c.size() & (c.size() - 1) == 0:
        mine = np.eye(c.size())[c.rank()]
        np.testing.assert_allclose(c.allreduce(mine, c.Adasum), np.ones(c.size()))
        for found in c.grouped_allreduce([mine, mine], c.Adasum):
            np.testing.assert_allclose(found, np.ones(c.size()))


def test_handles_may_be_synchronized_in_any_order(sets, transport):
    posted = [
        c.allreduce_async(np.full(9, float(i)), c.Sum, transport=transport, process_set=chosen)
        for i in range(6)
        for chosen in sets.values()
    ]
    order = posted if c.rank() % 2 else posted[::-1]
    for handle in order:
        c.synchronize(handle)
    for index, handle in enumerate(posted):
        chosen = list(sets.values())[index % len(sets)]
        assert (c.synchronize(handle) == index // len(sets) * len(members(chosen))).all()


def test_poll_says_when_a_result_is_there():
    handle = c.allgather_async(np.array([c.rank()]))
    while not c.poll(handle):
        continue
    assert list(handle.synchronize()) == list(range(c.size()))


def test_a_blocking_call_carries_out_what_was_posted_before():
    handle = c.broadcast_async(np.array([c.rank()]), c.size() - 1)
    assert c.allreduce(1, c.Sum) == c.size()
    assert c.poll(handle)


def test_a_set_of_other_ranks_is_refused(sets):
    if c.size() > 1:
        other = c.ProcessSet([c.rank()])
        with pytest.raises(ValueError, match="has not been registered"):
            c.allreduce(1.0, process_set=other)
    if c.size() > 2:
        foreign = c.add_process_set([0, 1])
        if c.rank() > 1:
            with pytest.raises(ValueError, match="not a member"):
                c.allreduce(1.0, process_set=foreign)
        assert c.remove_process_set(foreign)
        assert not c.remove_process_set(c.global_process_set)


def test_records_tell_waiting_from_transfer():
    c.allreduce(np.ones(1000, "float32"), c.Sum, name="gradients")
    record = c.records()[-1]
    assert (record.op, record.name, record.nbytes) == ("allreduce", "gradients", 4000)
    assert record.arrived <= record.last_arrived <= record.ended
    assert (record.busbw_gbps is None) == (c.size() == 1)


def counted(calls: Callable[[], object]) -> tuple[float, float]:
    """Seconds that calls took, and seconds of waiting and transfer that are told of them."""
    totals = Totals()
    before, began = len(c.records()), time.perf_counter()
    calls()
    took = time.perf_counter() - began
    told = sum(row.wait_seconds + row.transfer_seconds for row in totals.changed())
    records = c.records()[before:]
    assert told == pytest.approx(sum(r.wait_seconds + r.transfer_seconds for r in records))
    return took, told


def test_time_away_from_asynchronous_calls_is_neither_waiting_nor_transfer(sets, transport):
    away = 0.3

    def calls() -> None:
        posted = [
            c.allreduce_async(np.full(2000, float(i)), c.Sum, transport=transport, process_set=s)
            for i in range(200)
            for s in sets.values()
        ]
        time.sleep(away)
        c.grouped_allreduce([np.ones(3), np.ones(3)], c.Sum)
        for handle in posted:
            c.synchronize(handle)

    took, told = counted(calls)
    assert 0 < told <= took - away


def test_a_moment_counts_for_one_of_the_calls_that_are_under_way_together(sets):
    """The last rank comes later, and every other one waits for it in several calls at once."""

    def calls() -> None:
        if c.rank() == c.size() - 1:
            time.sleep(0.2)
        posted = [
            c.allreduce_async(np.ones(5), c.Sum, process_set=s) for s in sets.values() for _ in "ab"
        ]
        for handle in posted:
            c.synchronize(handle)

    took, told = counted(calls)
    assert 0 < told <= took


ROOMS = Path(allranks.__file__).parent / "collectives"
PAGE = Path(allranks.__file__).parents[1] / "docs" / "architecture.md"


def way_of(call: Callable[[], object]) -> list[tuple[Path, str]]:
    """The functions of ours that a call passes, in their order, where it need not wait."""
    ways: list[list[tuple[Path, str]]] = []

    def note(frame, event, _):
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOMS):
            ways[-1].append((file.relative_to(ROOMS), code.co_name))

    for _ in range(500):
        ways.append([])
        sys.setprofile(note)
        call()
        sys.setprofile(None)
    return min(ways, key=len)


@pytest.mark.skipif(ON_GPU or c.local_size() < c.size(), reason="needs memory that all share")
def test_an_array_passes_few_functions_and_no_room_twice():
    array = np.ones(3, np.float32)
    way = way_of(lambda: c.allreduce(array))
    entered = [room for room, _ in groupby(file.parent for file, _ in way)]
    assert len(way) <= 12
    assert len({file for file, _ in way}) <= 6
    assert len(entered) == len(set(entered))
    # The page names them in this order.
    told, at = PAGE.read_text().partition("## The path of an array")[2].partition("\n## ")[0], 0
    for file, name in way:
        assert f"`{file.as_posix()}`" in told
        at = told.index(f"{name}`", at)


one_host = pytest.mark.skipif(c.local_size() < c.size(), reason="join needs a single host")


@one_host
def test_ranks_without_data_join_the_others():
    for done in range(c.rank() + 1):
        found = c.allreduce(np.full(3, 1.0), c.Sum)
        assert found[0] == c.size() - done
        big = c.allreduce(np.full(150_000, 1.0, "float32"), c.Average)
        np.testing.assert_allclose(big, (c.size() - done) / c.size(), rtol=1e-6)
        assert c.allreduce(1, c.Sum, transport="mpi") == c.size() - done
    assert c.join() == c.size() - 1
    assert c.allreduce(1, c.Sum) == c.size()


@one_host
@pytest.mark.parametrize("own", ["shared", "mpi", None])
@pytest.mark.parametrize("count", [3, 1000, 100_000])
def test_factors_and_groups_count_for_ranks_that_have_joined_too(count, own):
    if c.rank() < c.size() - 1:
        mine = np.full(count, 4.0, "float32")
        left = c.size() - 1
        options = {"prescale_factor": 0.5, "postscale_factor": 10.0, "transport": own}
        found = c.allreduce(mine, c.Sum, **options)
        group = c.grouped_allreduce([mine, mine], c.Sum, **options)
        halves = c.allreduce(np.full(count, 4.0, "float16"), c.Sum, **options)
        small = c.allreduce(np.full(count, 4, "int8"), c.Average, transport=own)
        for each in (found, *group, halves):
            assert (each == left * 20.0).all()
        assert (small == int(left * 4 / c.size())).all()
    c.join()


@one_host
def test_an_operation_that_joined_ranks_cannot_bring_zeros_to_is_refused():
    if c.size() > 1:
        with pytest.raises(CollectiveMismatch, match="the same operation"):
            _ = c.join() if c.rank() == 0 else c.broadcast(1.0, 1)


@pytest.mark.parametrize("count", [0, 3, 500_000])
def test_send_and_recv_carry_an_array_around(count):
    if c.size() > 1:
        after, before = (c.rank() + 1) % c.size(), (c.rank() - 1) % c.size()
        mine = np.full((count, 2), c.rank(), "int16")
        if c.rank() % 2 or c.rank() == c.size() - 1 == 0:
            found = c.recv(before)
            c.send(mine, after)
        elif c.rank() == 0:
            c.send(mine, after)
            found = c.recv(before)
        else:
            found = c.recv(before)
            c.send(mine, after)
        same(found, np.full((count, 2), before, "int16"))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: c.send(np.ones(2), "a"), r"found rank 'a' .*, tag 0\."),
        (lambda: c.send(np.ones(2), 0.5), r"found rank 0\.5 .*, tag 0\."),
        (lambda: c.recv((c.rank() + 1) % c.size(), None), r"found rank \d .*, tag None\."),
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
    assert rows == {f"rank {r}" for r in range(c.size())}
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"transfer"}
    assert any("gradients" in e["name"] for e in events)
