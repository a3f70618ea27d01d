"""Graphs of TensorFlow 1, whose operations each rank runs in another order, in its own threads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from conftest import in_a_cell, next_cell_works, odd

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")

import allranks.tensorflow as hvd  # noqa: E402
from allranks.errors import CollectiveMismatch  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
v1 = tf.compat.v1
MANY = 50


def one_of_many(number: int) -> Any:
    """A collective by a name of its own, and what is to come of it."""
    x = tf.constant(np.full(4 * N, number + R, np.float32))
    name = f"many_{number}"
    if number % 5 == 0:
        return hvd.allgather(x[:1], name=name), [number + r for r in range(N)]
    if number % 5 == 1:
        return hvd.broadcast(x, number % N, name=name), [number + number % N] * (4 * N)
    if number % 5 == 2:
        total = [N * number + N * (N - 1) // 2] * 4
        return hvd.reducescatter(x, op=hvd.Sum, name=name), total
    total = [N * number + N * (N - 1) // 2] * (4 * N)
    return hvd.allreduce(x, op=hvd.Sum, name=name), total


def test_many_collectives_in_another_order_on_every_rank() -> None:
    order = random.Random(R)
    with tf.Graph().as_default():
        numbers = list(range(MANY))
        order.shuffle(numbers)
        made = [one_of_many(number) for number in numbers]
        with v1.Session() as session:
            for _ in range(100):
                order.shuffle(made)
                for found, expected in zip(
                    session.run([tensor for tensor, _ in made]),
                    [expected for _, expected in made],
                    strict=True,
                ):
                    np.testing.assert_array_equal(found, expected)


def test_a_collective_that_one_rank_does_not_fetch_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from allranks.tensorflow import turns

    monkeypatch.setattr(turns, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(turns.current(), "late_seconds", 0.3)
    with tf.Graph().as_default(), v1.Session() as session:
        a, b = (hvd.allreduce(tf.ones(2), name=name) for name in ("first", "second"))
        error = in_a_cell(lambda: session.run([b if odd() else a]))
    if N > 1:
        assert error is not None
        said = str(error) + "".join(capfd.readouterr())
        assert "first" in said
        if odd():
            assert isinstance(error, CollectiveMismatch)
            assert f"rank {R} has not come to it for" in str(error)
            assert "waits in second" in str(error)
    next_cell_works()
