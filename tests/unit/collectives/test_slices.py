"""Reductions by slices: the members' blocks are arrays of one process here."""

import itertools
import sys

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import loopback
from allranks.collectives.arrays.reductions import Arithmetic, Average, Product, ReduceOp, Sum
from allranks.collectives.host.slices import Slices
from allranks.collectives.host.staging import split


def reduced_by_slices(
    op: ReduceOp, sources: list[np.ndarray], outs: list[np.ndarray], prescale: float = 1.0
) -> None:
    """Every member stages; then each reduces its slice, the last one first; then all take."""
    dtype, size, members = sources[0].dtype, sources[0].size, len(sources)
    blocks = [np.full(size, 99).astype(dtype) for _ in sources]
    bounds = split(size, members)
    reduction = Arithmetic(op, dtype, members, prescale, 1.0)
    slices = [Slices.of(blocks, me, (bounds[me], bounds[me + 1])) for me in range(members)]
    for one, source in zip(slices, sources, strict=True):
        one.stage(source, reduction)
    for one, source, out in reversed([*zip(slices, sources, outs, strict=True)]):
        one.reduce(source, out, reduction)
    for one, out in zip(slices, outs, strict=True):
        one.take(out)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("prescale", [1.0, 2.0])
@pytest.mark.parametrize("op", [Sum, Average, Product])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize(("members", "size"), [(2, 7), (2, 1), (3, 10), (5, 12), (4, 3)])
def test_every_member_gets_the_reduction(members, size, dtype, op, prescale, in_place):
    sources = [((np.arange(size) + member) % 3 + 1).astype(dtype) for member in range(members)]
    scaled = np.stack([source.astype("float64") * prescale for source in sources])
    wanted = scaled.prod(0) if op is Product else scaled.sum(0)
    wanted = wanted / members if op is Average else wanted
    wanted = np.trunc(wanted) if dtype == "int32" else wanted
    outs = sources if in_place else [np.empty_like(source) for source in sources]
    reduced_by_slices(op, sources, outs, prescale)
    for out in outs:
        np.testing.assert_allclose(out, wanted.astype(dtype), rtol=2e-3)
    assert all((out == outs[0]).all() for out in outs)


def test_a_member_copies_only_what_others_reduce():
    blocks = [np.zeros(4), np.zeros(4)]
    slices = Slices.of(blocks, 1, (2, 4))
    slices.stage(np.ones(4), Arithmetic(Sum, np.dtype("f8"), 2, 1.0, 1.0))
    assert blocks[1].tolist() == [1, 1, 0, 0]
    assert not blocks[0].any()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
def test_arrays_of_all_sizes_can_follow_each_other():
    """A call by slices leaves the blocks free for each other kind of call, and finds them so."""
    kinds = {
        "whole": lambda x: c.allreduce(x[:3], c.Sum)[0],
        "slices": lambda x: c.allreduce(x[:20_000], c.Sum)[-1],
        "blocks": lambda x: c.reducescatter(x[:90_000], c.Sum)[0],
        "gathered": lambda x: sum(part[0] for part in np.split(c.allgather(x[:9]), c.size())),
    }
    orders = [*itertools.product(kinds, repeat=3)]

    def body() -> list[float]:
        sums = []
        for number, order in enumerate(orders):
            for kind in order:
                sums.append(kinds[kind](np.full(90_000, 10.0 * number + c.rank())))
        return sums

    wanted = [30.0 * number + 3 for number in range(len(orders)) for _ in range(3)]
    assert loopback.run(3, body) == 3 * [wanted]
