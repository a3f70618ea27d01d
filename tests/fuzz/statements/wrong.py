"""Collectives that cannot complete: what ranks bring differs, or one of them does not come."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, statement, statements

_MISMATCH = {
    "shape": "allreduce(np.ones({n} + (rank == {rank})))",
    "dimensions": "allreduce(np.ones({n}).reshape(-1, 1) if rank == {rank} else np.ones({n}))",
    "dtype": "allreduce(np.ones({n}, 'f4' if rank == {rank} else 'f8'))",
    "reduction": "allreduce(np.ones({n}), Max if rank == {rank} else Sum)",
    "root": "broadcast(np.ones({n}), int(rank == {rank}))",
    "factor": "allreduce(np.ones({n}), prescale_factor=1.0 + (rank == {rank}))",
    "transport": "allreduce(np.ones({n}), transport='mpi' if rank == {rank} else 'shared')",
    "order": "for _call in (allreduce, allgather)[::-1 if rank == {rank} else 1]: _call(np.ones({n}))",
    "operation": "(barrier if rank == {rank} else lambda: allreduce(np.ones({n})))()",
    "rows": "allgather(np.ones(({n}, 2 + (rank == {rank}))))",
    "group": "grouped_allreduce([np.ones(3)] * (2 + (rank == {rank})))",
    "group's shapes": "grouped_allreduce([np.ones((2, {n}))[:: 1], np.ones(({n}, 2))]"
    "[:: -1 if rank == {rank} else 1])",
    "raw and ours": "comm.allreduce(1) if rank == {rank} else allreduce(1)",
    "async": "synchronize(allreduce_async(np.ones({n} + (rank == {rank}))))",
    "set or world": "(allreduce(1, process_set=global_process_set) if rank != {rank} "
    "else broadcast(1, 0))",
    "reducescatter": "reducescatter(np.ones(({n} + (rank == {rank}), 2)))",
    "objects": "broadcast_object(1, 0) if rank == {rank} else allgather_object(1)",
}


@statement(weight=10)
def a_mismatch(draw: Draw) -> Case:
    source = draw.rng.choice(sorted(_MISMATCH.values()))
    source = source.format(n=draw.rng.choice((1, 3, 5000, 100_000)), rank=draw.rank)
    failed = dict.fromkeys(range(draw.size), "CollectiveMismatch")
    return Case(source, ("CellFailed",), (f"rank {draw.rank}",), failed)


@statement(weight=2)
def a_call_too_few(draw: Draw) -> Case:
    times = draw.rng.choice((1, 2, 50))
    call = draw.rng.choice(
        (*("allreduce(np.ones(3))", "barrier()", "allgather(np.ones(50_000))"), "comm.barrier()")
    )
    return Case(
        f"for _i in range({times} - (rank == {draw.rank})): {call}",
        ("CellFailed",),
        (f"rank {draw.rank} finished ", "finished the cell"),
        {},
        after_end=False,
    )


@statement(weight=2)
def a_collective_of_some_ranks(draw: Draw) -> Case:
    if draw.size < 2:
        return Case("")
    return Case(
        "allreduce(np.ones(3))",
        ("CellFailed",),
        (f"rank {draw.rank} does not run",),
        {},
        ranks=draw.others,
    )


@statement(weight=2)
def ranks_that_wait_for_each_other(draw: Draw) -> Case:
    one, other = sorted(draw.rng.sample(range(draw.size), 2))
    return Case(
        f"if rank == {one}: recv({other})\nelif rank == {other}: recv({one})",
        ("CellFailed",),
        ("wait for each other",),
        dict.fromkeys((one, other), "CollectiveMismatch"),
    )


@statement()
def process_sets_in_opposite_order(draw: Draw) -> Case:
    one, other = sorted(draw.rng.sample(range(draw.size), 2))
    if draw.size == 2:
        sets = "_a = add_process_set([0]); _b = global_process_set"
    else:
        sets = f"_a = add_process_set([{one}, {other}]); _b = global_process_set"
    return Case(
        f"{sets}\n"
        f"_order = (_a, _b) if rank == {one} else (_b, _a)\n"
        "for _s in _order:\n    if _s.included(): allreduce(1, process_set=_s)",
        ("CellFailed",) if draw.size > 2 else ("ok",),
        undo="assert remove_process_set(_a)",
    )


_REFUSED = {
    "UsageError": (
        *("broadcast(np.ones(3), root=99)", "reduce(np.ones(3), -1)", "send(np.ones(1), 77)"),
        *("alltoall(np.ones(3), [1])", "allreduce(np.ones(3), transport='pigeon')"),
        "remove_process_set(99)",
    ),
    "TypeError": ("allreduce(np.array(['a']))", "allreduce(np.array([object()]))", "allreduce()"),
}


@statement(weight=2)
def a_call_that_is_refused(draw: Draw) -> Case:
    source = draw.rng.choice([one for each in sorted(_REFUSED.values()) for one in each])
    return Case(source, ("CellFailed",))


@statement(weight=2)
def handles_left_behind(draw: Draw) -> Case:
    who = draw.rng.choice(("True", f"rank == {draw.rank}", f"rank != {draw.rank}"))
    n = draw.rng.choice((3, 70_000))
    return Case(f"if {who}: _handles = [allreduce_async(np.ones({n})) for _ in range(3)]")


@statement()
def a_message_that_nobody_takes(draw: Draw) -> Case:
    n = draw.rng.choice((1, 1_000_000))
    return Case(f"if rank == 0: send(np.ones({n}), 1)", ("ok", "CellFailed"), mixes=False)


statements(
    process_sets_that_differ=lambda draw: Case(
        f"add_process_set([{draw.rank}] if rank == {draw.rank} else [{draw.others[0]}])",
        ("CellFailed",),
        ("CollectiveMismatch",),
    ),
    a_process_set_left_behind=lambda draw: Case(
        f"_left = add_process_set([{draw.rank}])", undo="assert remove_process_set(_left)"
    ),
    a_handle_of_another_epoch=lambda draw: Case(
        "try: _old\nexcept NameError: _old = None\n"
        "_h = _old\n_old = allreduce_async(np.ones(3))\n"
        f"if rank == {draw.rank}: raise ValueError('leaves')\n"
        "if _h is not None: synchronize(_h)\n"
        "synchronize(_old)",
        ("CellFailed",),
    ),
    a_rank_that_shuts_down=lambda draw: Case(
        f"if rank == {draw.rank}: shutdown()\nelse: allreduce(np.ones(3))",
        ("CellFailed",),
        (f"rank {draw.rank} finished ",),
        {},
    ),
    renewed_by_one_rank=lambda draw: Case(
        f"from allranks import collectives as _c\nif rank == {draw.rank}: _c.init(); init()\nbarrier()"
    ),
)
