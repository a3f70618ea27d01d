"""The steps of a recorder: sender, receiver, chunk and values."""

from __future__ import annotations

import json
from dataclasses import replace
from queue import Empty, SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import CollectiveError
from allranks.lessons import links
from allranks.lessons.ring import (
    ALGORITHMS,
    AllreduceRun,
    LoopbackLinks,
    Recorder,
    collect,
    explain,
    find,
)


def parts_of(
    arrays, algorithm="ring", gather=lambda recorder, link: recorder.part, timeout_seconds=60
):
    def one_rank(link):
        recorder = Recorder()
        find(algorithm)(arrays[link.rank], link, recorder=recorder)
        return gather(recorder, link)

    return LoopbackLinks(len(arrays), timeout_seconds=timeout_seconds).run(one_rank)


def test_a_ring_of_three_is_told_step_by_step():
    run = explain([np.array([1, 2, 3]), np.array([10, 20, 30]), np.array([100, 200, 300])])
    told = [
        (s.number, s.phase, s.sender, s.receiver, s.chunk, s.before.items, s.after.items)
        for s in run.steps
    ]
    assert told == [
        (0, "reduce-scatter", 2, 0, 2, (3,), (303,)),
        (0, "reduce-scatter", 0, 1, 0, (10,), (11,)),
        (0, "reduce-scatter", 1, 2, 1, (200,), (220,)),
        (1, "reduce-scatter", 2, 0, 1, (2,), (222,)),
        (1, "reduce-scatter", 0, 1, 2, (30,), (333,)),
        (1, "reduce-scatter", 1, 2, 0, (100,), (111,)),
        (2, "allgather", 2, 0, 0, (1,), (111,)),
        (2, "allgather", 0, 1, 1, (20,), (222,)),
        (2, "allgather", 1, 2, 2, (300,), (333,)),
        (3, "allgather", 2, 0, 2, (303,), (333,)),
        (3, "allgather", 0, 1, 0, (11,), (111,)),
        (3, "allgather", 1, 2, 1, (220,), (222,)),
    ]
    assert [values.items for values in run.inputs] == [(1, 2, 3), (10, 20, 30), (100, 200, 300)]
    assert run.result.items == (111, 222, 333)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=25)
@given(size=st.integers(1, 9), length=st.integers(0, 30))
def test_replaying_the_steps_gives_the_result(algorithm, size, length):
    inputs = [np.arange(length) * (rank + 1) for rank in range(size)]
    run = explain(inputs, algorithm)
    boards = [array.copy() for array in inputs]
    for number in range(run.rounds):
        before = [board.copy() for board in boards]
        steps = [step for step in run.steps if step.number == number]
        # A rank sends and receives at most once a round.
        for end in ("sender", "receiver"):
            assert len({getattr(step, end) for step in steps}) == len(steps)
        for step in steps:
            where = slice(step.start, step.stop)
            assert step.received.items == tuple(before[step.sender][where])
            assert step.before.items == tuple(before[step.receiver][where])
            assert step.nbytes == boards[0][where].nbytes
            boards[step.receiver][where] = step.after.items
    for board in boards:
        assert tuple(board) == run.result.items == tuple(sum(inputs))


@pytest.mark.parametrize(
    ("algorithm", "size", "rounds", "nbytes"),
    [
        ("ring", 4, 6, 6 * 4 * 16),
        ("recursive doubling", 4, 2, 2 * 4 * 64),
        ("recursive doubling", 6, 4, (2 + 2 * 4 + 2) * 64),
        ("tree", 7, 8, 12 * 64),
    ],
)
def test_rounds_and_bytes_are_those_of_the_textbook(algorithm, size, rounds, nbytes):
    run = explain([np.ones(8)] * size, algorithm)
    assert (run.rounds, run.nbytes) == (rounds, nbytes)


def test_a_run_waits_for_its_ranks_however_slow_the_machine_is(monkeypatch):
    class Slow(SimpleQueue):
        """A queue for which each limit is too short."""

        def get(self, block=True, timeout=None):
            if timeout is not None:
                raise Empty
            return super().get()

    monkeypatch.setattr(links, "SimpleQueue", Slow)
    assert explain([np.ones(1)] * 3).result.items == (3.0,)
    with pytest.raises(CollectiveError, match="none came in 10"):
        parts_of([np.ones(1)] * 3, timeout_seconds=10)


def test_a_long_chunk_is_summarised():
    run = explain([np.arange(1000.0)] * 2)
    after = run.steps[0].after
    assert not after.complete
    assert (after.count, len(after.items)) == (500, 4)
    assert (after.minimum, after.maximum) == (1000.0, 1998.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_survives_json(algorithm):
    run = explain([np.array([[1.5, np.nan], [np.inf, 2.0]])] * 3, algorithm)
    text = json.dumps(run.to_dict(), allow_nan=False)
    assert AllreduceRun.from_dict(json.loads(text)) == run
    assert run.result.items == (4.5, "nan", "inf", 6.0)


def test_the_ranks_can_collect_the_story_over_their_own_link():
    arrays = [np.array([rank]) for rank in range(4)]
    story, *others = parts_of(arrays, "tree", collect)
    assert others == [None, None, None]
    assert story == explain(arrays, "tree")


def test_parts_merge_in_any_order_and_a_missing_or_strange_one_is_named():
    parts = parts_of([np.arange(5)] * 3)
    assert AllreduceRun.merge(parts[::-1]) == AllreduceRun.merge(parts)
    with pytest.raises(CollectiveError, match=r"each of its 3 ranks: found ranks \[0, 2\]"):
        AllreduceRun.merge([parts[0], parts[2]])
    with pytest.raises(CollectiveError, match="one part from each"):
        AllreduceRun.merge([])
    parts[1] = replace(parts[1], op="max")
    with pytest.raises(CollectiveError, match=r"rank 0 has 'sum', ranks \[1\] have another"):
        AllreduceRun.merge(parts)


def test_a_recorder_without_a_run_and_an_unknown_algorithm_are_refused():
    with pytest.raises(CollectiveError, match="Pass it as recorder="):
        collect(Recorder(), LoopbackLinks(1)[0])
    with pytest.raises(ValueError, match="expected one of ring, recursive doubling, tree"):
        explain([np.ones(1)], "star")


def test_bfloat16_values_are_recorded_as_numbers():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    run = explain([np.array([1, 2], ml_dtypes.bfloat16)] * 2)
    assert (run.dtype, run.result.items) == ("bfloat16", (2.0, 4.0))
