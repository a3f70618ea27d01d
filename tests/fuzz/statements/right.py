"""Statements that check their own result: collectives of every kind, and what may stand beside."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, right, rights, statement, statements

_DTYPES = (*("u1", "i2", "i4", "i8", "u8"), *("f2", "f4", "f8"), *("c8", "c16"), "?")
_SHAPES = ("()", "(0,)", "(1,)", "(7,)", "(3, 5)", "(0, 4)", "(1000,)", "(40_000,)", "(64, 1025)")
_VIEWS = ("{}", "{}[..., ::-1]", "{}.T", "np.asfortranarray({})")


def _array(draw: Draw, dtype: str, shape: str) -> str:
    """Source of an array of small numbers that differ from rank to rank, by ``r``."""
    view = draw.rng.choice(_VIEWS) if shape != "()" else "{}"
    made = f"((np.arange(np.prod({shape}, dtype=int)) % 5 + r) % 7).astype('{dtype}')"
    return view.format(f"{made}.reshape({shape})")


@right
def allreduce(draw: Draw) -> str:
    op, dtype = draw.rng.choice(("Sum", "Min", "Max", "Product")), draw.rng.choice(_DTYPES)
    if dtype.startswith("c"):
        op = draw.rng.choice(("Sum", "Product"))
    array = _array(draw, dtype, draw.rng.choice(_SHAPES))
    more = draw.rng.choice(("", "", ", transport='mpi'"))
    fold = {"Sum": "+", "Product": "*"}.get(op)
    if dtype == "?":
        fold = {"Sum": "|", "Product": "&", "Min": "&", "Max": "|"}[op]
    both = f"a {fold} b" if fold else f"np.{op.lower()}imum(a, b)"
    return (
        "import functools\n"
        f"_of = lambda r: {array}\n"
        f"_right(allreduce(_of(rank), {op}{more}), "
        f"functools.reduce(lambda a, b: np.asarray({both}).astype('{dtype}'), "
        f"map(_of, range(size))), 'allreduce {op} {dtype}')"
    )


@right
def average(draw: Draw) -> str:
    n = draw.rng.choice((1, 10, 30_000))
    return f"_right(allreduce(np.full({n}, rank * 2.0)), np.full({n}, size - 1.0), 'average')"


@right
def grouped(draw: Draw) -> str:
    n = draw.rng.choice((1, 500, 20_000))
    return (
        f"_a, _b = grouped_allreduce([np.full(({n}, 2), rank), np.ones(3, 'f4')], Sum)\n"
        f"_right(_a, np.full(({n}, 2), sum(range(size))), 'grouped')\n"
        "_right(_b, np.full(3, size, 'f4'), 'grouped')"
    )


@right
def broadcast(draw: Draw) -> str:
    n = draw.rng.choice((1, 40_000))
    return f"_right(broadcast(np.full({n}, rank), {draw.rank}), [{draw.rank}] * {n}, 'broadcast')"


@right
def allgather(draw: Draw) -> str:
    rows = draw.rng.choice(("rank", "size - rank", "3", "0"))
    return (
        f"_rows = lambda rank: {rows}\n"
        "_right(allgather(np.full((_rows(rank), 2), rank)), np.concatenate("
        "[np.full((_rows(r), 2), r) for r in range(size)]), 'allgather')"
    )


@right
def reducescatter(draw: Draw) -> str:
    n = draw.rng.choice((1, 6, 5000))
    return (
        f"_right(reducescatter(np.arange({n}.0), Sum), "
        f"np.array_split(np.arange({n}.0) * size, size)[rank], 'reducescatter')"
    )


@right
def around(draw: Draw) -> str:
    n = draw.rng.choice((1, 100, 100_000))
    return (
        "if rank == 0:\n"
        f"    send(np.full({n}, 7), 1)\n"
        f"    _right(recv(size - 1), [7 + size - 1] * {n}, 'around')\n"
        "else:\n"
        "    send(recv(rank - 1) + 1, (rank + 1) % size)"
    )


@right
def handles(draw: Draw) -> str:
    order = draw.rng.choice(("_h", "_h[::-1]"))
    n = draw.rng.choice((1, 5, 60))
    return (
        f"_h = [allreduce_async(np.full(9, i + rank), Sum) for i in range({n})]\n"
        f"for _each in {order}: synchronize(_each)\n"
        f"_right(synchronize(allgather_async(np.array([rank]))), range(size), 'handles')"
    )


@right
def process_set(draw: Draw) -> str:
    members = list(draw.others or (0,))
    if draw.size == 2:
        members = [draw.rank]
    return (
        f"_s = add_process_set({members})\n"
        f"if _s.included(): _right(allreduce(np.array([rank]), Sum, process_set=_s), "
        f"[{sum(members)}], 'process set')\n"
        "assert remove_process_set(_s)"
    )


@right
def shared_memory(draw: Draw) -> str:
    n = draw.rng.choice((10, 200_000))
    return (
        f"_e = empty({n}); _e[:] = rank\n"
        f"_right(allreduce(_e, Sum), np.full({n}, sum(range(size)), 'f4'), 'empty')"
    )


@right
def many_calls(draw: Draw) -> str:
    n = draw.rng.choice((20, 200))
    return f"for _i in range({n}): _right(allreduce(_i, Sum), _i * size, 'many')\nbarrier()"


@statement(weight=5)
def only_right_ones(draw: Draw) -> Case:
    return Case("")


@statement(weight=2)
def a_rank_that_is_late(draw: Draw) -> Case:
    seconds = draw.rng.choice((0.05, 0.2, 0.8))
    return Case(
        f"if rank == {draw.rank}: time.sleep({seconds})\n"
        "_right(allreduce(np.array([rank]), Sum), [sum(range(size))], 'late')"
    )


@statement()
def a_rank_that_is_named_as_late(draw: Draw) -> Case:
    return Case(
        f"if rank == {draw.rank}: time.sleep(4)\nbarrier()",  # The others may begin 1 s later.
        says=(f"rank {draw.rank}:", "has waited", "time.sleep(4)"),
    )


@statement()
def a_rank_that_is_stopped_for_a_moment(draw: Draw) -> Case:
    at = draw.rng.uniform(0, 0.3)
    return Case(
        "for _i in range(50): allreduce(np.ones(9)); time.sleep(0.005)",
        signals=((at, draw.rank, 19), (at + draw.rng.uniform(0.1, 0.8), draw.rank, 18)),
    )


@statement()
def values(draw: Draw) -> Case:
    last, value = draw.rng.choice(
        (
            ("rank ** 2", lambda r: r**2),
            ("{'r': rank, 'é': [None, (1.5,)]}", lambda r: {"r": r, "é": [None, (1.5,)]}),
            ("'x' * 100_000 + str(rank)", lambda r: "x" * 100_000 + str(r)),
            ("[allreduce(rank, Sum)] and rank", lambda r: r),
            ("2 ** 5000 + rank", lambda r: 2**5000 + r),
        )
    )
    return Case("", last=last, values=tuple(value(r) for r in range(draw.size)))


rights(
    reduce_to_one=lambda draw: (
        f"_r = reduce(np.array([rank, 1]), {draw.rank}, Sum)\n"
        f"_right(_r, [sum(range(size)), size] if rank == {draw.rank} else None, 'reduce')"
    ),
    gather=lambda draw: (
        f"_r = gather(np.array([rank]), {draw.rank})\n"
        f"_right(_r, range(size) if rank == {draw.rank} else None, 'gather')"
    ),
    scatter=lambda draw: (
        f"_r = scatter(np.arange(2 * size) if rank == {draw.rank} else None, {draw.rank})\n"
        "_right(_r, [2 * rank, 2 * rank + 1], 'scatter')"
    ),
    alltoall=lambda draw: (
        "_r, _got = alltoall(np.full(size * (rank + 1), rank), [rank + 1] * size)\n"
        "_right(_r, np.repeat(np.arange(size), np.arange(1, size + 1)), 'alltoall')\n"
        "_right(_got, range(1, size + 1), 'alltoall')"
    ),
    objects=lambda draw: (
        f"assert broadcast_object({{'x': rank}}, {draw.rank}) == {{'x': {draw.rank}}}\n"
        "assert allgather_object((rank, 'é')) == [(r, 'é') for r in range(size)]"
    ),
    joining=lambda draw: (
        f"for _i in range(1 + (rank == {draw.rank})):\n"
        "    _r = allreduce(np.array([1]), Sum)\n"
        "assert join() is not None"
    ),
    mpi4py_calls=lambda draw: (
        "assert comm.allreduce(rank) == sum(range(size))\n"
        f"assert comm.bcast(rank, {draw.rank}) == {draw.rank}\n"
        "_r = np.empty(2); comm.Allreduce(np.array([rank, 1.0]), _r)\n"
        "_right(_r, [float(sum(range(size))), float(size)], 'comm.Allreduce')"
    ),
    a_caught_mismatch=lambda draw: (
        "from allranks.errors import CollectiveMismatch\n"
        "try:\n"
        f"    allreduce(np.ones(3 + (rank == {draw.rank})))\n"
        "    raise WrongResult('no mismatch')\n"
        "except CollectiveMismatch: pass\n"
        "_right(allreduce(np.array([rank]), Sum), [sum(range(size))], 'after a mismatch')"
    ),
)


statements(
    some_of_the_ranks=lambda draw: Case(
        "_seen = rank\nassert rank in range(size)", ranks=draw.among()
    ),
    a_loop_of_large_arrays=lambda draw: Case(
        "for _i in range(5):\n"
        "    _right(allreduce(np.full(1_000_000, rank, 'f4'), Sum)[::1000], "
        "np.full(1000, sum(range(size)), 'f4'), 'large')"
    ),
    records_within_the_cell=lambda draw: Case(
        "_began = time.monotonic()\n"
        "for _i in range(20): allreduce(np.ones(1000))\n"
        "_spent = time.monotonic() - _began\n"
        "_summed = sum(r.wait_seconds + r.transfer_seconds for r in records()[-20:])\n"
        "assert 0 <= _summed <= _spent, WrongResult(f'{_summed} of {_spent}')"
    ),
)
