"""Causes on hosts with fewer cores than programs: a missing core is no cause of its ranks."""

from __future__ import annotations

import random

import pytest

from allranks.features.verdict.records import Kind
from allranks.features.verdict.rules import verdicts
from tests.unit.features.scheduled_cells import cell

SMALL = Kind("allreduce", "In[3]:9", 256, 0, "allreduce(gradient)")


def found(work, **options):
    return [(one.kind, one.ranks) for one in verdicts(cell(work, **options))]


def in_turn(size: int):
    """In each step another rank has more work."""
    return [
        lambda step, _, rank=rank: 0.02 if step % size == rank else 0.003 for rank in range(size)
    ]


def evaluates(step: int, _: random.Random) -> float:
    return 0.2 if step % 15 == 14 else 0.005


@pytest.mark.parametrize("work", [0.001, 0.002, 0.01])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_ranks_on_two_cores_have_no_verdict(size, work):
    assert found([work] * size) == []


@pytest.mark.parametrize("calls", [4, 14])
def test_some_small_collectives_after_usual_work_are_no_cause(calls):
    assert found([0.01] * 4, calls=calls, kind=SMALL) == []


@pytest.mark.parametrize("work", [0.001, 0.01])
@pytest.mark.parametrize("size", [2, 4])
def test_beside_other_programs_equal_ranks_have_a_busy_host_at_most(size, work):
    assert {kind for kind, _ in found([work] * size, others=2)} <= {"host"}


@pytest.mark.parametrize("size", [2, 4])
def test_causes_of_ranks_that_share_two_cores_are_named(size):
    last = size - 1
    assert found(in_turn(size)) == [("uneven", ())]
    assert found([0.005] * last + [0.015]) == [("straggler", (last,))]
    assert found([0.005] * last + [evaluates]) == [("sometimes", (last,))]
    assert found([0.001] * size, calls=38, kind=SMALL) == [("latency", ())]


def test_several_slow_ranks_that_share_two_cores_are_named():
    assert found([0.005, 0.02, 0.005, 0.02]) == [("straggler", (1, 3))]


@pytest.mark.parametrize("size", [2, 4])
def test_beside_other_programs_no_wrong_cause_is_named(size):
    last = size - 1
    slow = [0.005] * last + [0.015], [0.005] * last + [evaluates]
    for work in (in_turn(size), *slow):
        allowed = {("host", tuple(range(size))), ("uneven", ())}
        allowed |= {(kind, (last,)) for kind in ("straggler", "sometimes")}
        assert {*found(work, others=2)} <= allowed
