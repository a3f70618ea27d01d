"""Mistakes inside graphs and fit() raise the right error, and the next cell works."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.tensorflow as hvd  # noqa: E402
from allranks.errors import CollectiveMismatch, RankLeft  # noqa: E402
from tests.tensorflow.ranks.conftest import (  # noqa: E402
    in_a_cell,
    interrupted_after,
    next_cell_works,
    odd,
)

hvd.init()
R, N = hvd.rank(), hvd.size()
X, Y = np.ones((24, 3), np.float32), np.ones((24, 1), np.float32)


def model(units: int = 2, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", **compiled)
    return made


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_mismatch_in_a_function_is_itself_and_tensorflows(eagerly: bool) -> None:
    def reduce() -> Any:
        return hvd.allreduce(tf.ones([4 + odd()]))

    run = reduce if eagerly else tf.function(reduce)
    error = in_a_cell(lambda: run())
    assert isinstance(error, CollectiveMismatch)
    assert isinstance(error, tf.errors.FailedPreconditionError)
    assert type(error).__name__ == "CollectiveMismatch"
    assert "needs the same shape on every rank" in str(error)
    assert "mistakes_suite.py" in str(error)
    assert "PyFunc" not in str(error)
    next_cell_works()


def test_models_that_differ_are_a_mismatch_in_fit() -> None:
    mine = model(units=2 + odd())
    error = in_a_cell(lambda: mine.fit(X, Y, verbose=0))
    assert isinstance(error, CollectiveMismatch)
    assert "rank 1" in str(error)
    assert "mine.fit(X, Y" in str(error)
    next_cell_works()


@pytest.mark.parametrize("in_graph", [False, True])
def test_models_that_were_both_seen_before_are_a_mismatch_in_another_order(in_graph: bool) -> None:
    """Both orders have the same number of elements, and each rank has seen both before."""
    tall, wide = tf.Variable(tf.ones([8, 16])), tf.Variable(tf.ones([16, 8]))

    def step(variables: list[Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    orders = [lambda: step([tall, wide]), lambda: step([wide, tall])]
    if in_graph:
        orders = [tf.function(order) for order in orders]
    for order in [*orders, *orders]:
        order()
    error = in_a_cell(lambda: [order() for order in [*orders, orders[odd()]]])
    assert isinstance(error, CollectiveMismatch)
    assert "((8, 16), (16, 8))" in str(error)
    assert "((16, 8), (8, 16))" in str(error)
    next_cell_works()


@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_of_other_variables_are_a_mismatch(in_graph: bool) -> None:
    """Each rank's loss lacks another variable, and the other gradients have equal shapes."""
    variables = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([2, 3]))]

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[odd()])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    error = in_a_cell(tf.function(step) if in_graph else step)
    assert isinstance(error, CollectiveMismatch)
    assert "gradient 0" in str(error)
    assert "gradient 1" in str(error)
    next_cell_works()


def test_rows_of_another_table_are_a_mismatch() -> None:
    """Tables of equal width in another order: only the numbers of rows may differ."""
    tables = [tf.Variable(tf.ones([50, 4])), tf.Variable(tf.ones([70, 4]))]
    if odd():
        tables.reverse()

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.gather(t, [1, 2 + R])) for t in tables])
        return hvd.DistributedGradientTape(tape).gradient(loss, tables)

    for run in (step, tf.function(step)):
        error = in_a_cell(lambda run=run: run())  # type: ignore[misc]
        assert isinstance(error, CollectiveMismatch)
        assert "rows of (50, 4)" in str(error)
        next_cell_works()


def test_a_rank_that_leaves_a_dataset_is_named_by_the_others() -> None:
    rows = tf.data.Dataset.range(3 if odd() else 2)
    summed = rows.map(lambda row: hvd.allreduce(tf.cast(row, tf.float32), op=hvd.Sum))
    error = in_a_cell(lambda: list(summed))
    if odd():
        assert isinstance(error, RankLeft)
        assert isinstance(error, tf.errors.UnknownError)
        assert "Carried" not in str(error)
    else:
        assert error is None
    next_cell_works()


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_rank_that_raises_in_fit_is_named_by_the_others(eagerly: bool) -> None:
    class Raises(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if odd() and batch == 1:
                raise ValueError("bad batch")

    mine = model(run_eagerly=eagerly)
    error = in_a_cell(lambda: mine.fit(X, Y, batch_size=8, verbose=0, callbacks=[Raises()]))
    if odd():
        assert isinstance(error, ValueError)
    else:
        assert isinstance(error, RankLeft)
        assert "rank 1 " in str(error)
        assert "ValueError: bad batch" in str(error)
    next_cell_works()


def test_data_that_raises_in_fit_is_named_by_the_others() -> None:
    def batches() -> Any:
        for i in range(4):
            if odd() and i == 2:
                raise RuntimeError("no such file")
            yield X[:8], Y[:8]

    mine = model()
    error = in_a_cell(lambda: mine.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0))
    if odd():
        assert "no such file" in str(error)
    else:
        assert isinstance(error, RankLeft)
    next_cell_works()


def test_an_interrupt_that_was_heard_ends_nothing_later() -> None:
    with interrupted_after(0.2):
        error = in_a_cell(lambda: [tf.reduce_sum(tf.ones([500, 500])) for _ in iter(int, 1)])
    assert isinstance(error, KeyboardInterrupt)
    mine = model()

    class Late(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if odd() and batch == 1:
                time.sleep(0.3)

    assert in_a_cell(lambda: mine.fit(X, Y, batch_size=8, verbose=0, callbacks=[Late()])) is None


def test_an_interrupt_during_the_steps_of_fit() -> None:
    mine = model()
    data = tf.data.Dataset.from_tensors((X, Y)).repeat()

    def fit() -> None:
        mine.fit(data, steps_per_epoch=10**9, shuffle=False, verbose=0)

    with interrupted_after(1.0) if odd() else nullcontext():
        error = in_a_cell(fit)
    if odd():
        assert isinstance(error, KeyboardInterrupt)
    else:
        assert isinstance(error, RankLeft)
        assert "rank 1 " in str(error)
    next_cell_works()
