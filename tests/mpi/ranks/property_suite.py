"""Splits, roots and the order of calls, drawn: the same on every rank."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libraries import equal, values

import allranks.collectives as c

# Derandomized: every rank draws the same examples, or they would be a misuse of their own.
drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Deferred, because pytest's own process collects the tests without a world of ranks.
rows = st.deferred(lambda: st.lists(st.integers(0, 9), min_size=c.size(), max_size=c.size()))
roots = st.deferred(lambda: st.integers(0, c.size() - 1))
transports = st.sampled_from(["shared", "mpi", None])


@drawn
@given(data=st.data(), width=st.integers(1, 300) | st.just(20_000), transport=transports)
def test_alltoall_with_any_splits(data, width, transport):
    table = [data.draw(rows) for _ in range(c.size())]
    mine = values(c.rank(), (sum(table[c.rank()]), width), "int32")
    found, received = c.alltoall(mine, table[c.rank()], transport=transport)
    assert received == [table[r][c.rank()] for r in range(c.size())]
    wanted = []
    for r in range(c.size()):
        whole = values(r, (sum(table[r]), width), "int32")
        start = sum(table[r][: c.rank()])
        wanted.append(whole[start : start + table[r][c.rank()]])
    equal(found, np.concatenate(wanted))


@drawn
@given(
    splits=rows,
    width=st.integers(0, 300) | st.just(20_000),
    root=roots,
    transport=transports,
)
def test_scatter_with_any_splits_and_root(splits, width, root, transport):
    whole = values(root, (sum(splits), width), "int32")
    mine = whole if c.rank() == root else None
    found = c.scatter(mine, root, splits, transport=transport)
    start = sum(splits[: c.rank()])
    equal(found, whole[start : start + splits[c.rank()]])


@drawn
@given(
    calls=st.lists(st.sampled_from(["sum", "gather", "root", "big"]), max_size=12),
    seed=st.integers(0, 99),
)
def test_handles_in_any_order(calls, seed):
    begin = {
        "sum": lambda: c.allreduce_async(np.ones(5), c.Sum),
        "gather": lambda: c.allgather_async(np.array([c.rank()])),
        "root": lambda: c.broadcast_async(np.array([c.rank()]), c.size() - 1),
        "big": lambda: c.allreduce_async(np.ones(100_000), c.Sum),
    }
    wanted = {
        "sum": c.size(),
        "gather": np.arange(c.size()),
        "root": c.size() - 1,
        "big": c.size(),
    }
    handles = [begin[call]() for call in calls]
    for index in np.random.default_rng([seed, c.rank()]).permutation(len(calls)):
        assert (handles[index].synchronize() == wanted[calls[index]]).all()
