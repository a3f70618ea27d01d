"""Graphs: mistakes inside graphs and fit() raise the right error, and the next cell works.

Graphs of TensorFlow 1 are run by each rank in another order, in several threads. For ranks that
raise or are interrupted in fit() see tests/tensorflow/test_in_a_notebook.py.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.tensorflow as hvd  # noqa: E402
from allranks.errors import CollectiveMismatch, RankLeft, UsageError  # noqa: E402
from allranks.tensorflow import tf_bridge  # noqa: E402
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


def gradients(variables: list[Any], loss: Callable[[], Any]) -> Any:
    with tf.GradientTape() as tape:
        value = loss()
    return hvd.DistributedGradientTape(tape).gradient(value, variables)


def sums(*shapes: list[int]) -> Callable[[], Any]:
    """The gradients of sums of variables, which this rank may have in another order."""
    variables = [tf.Variable(tf.ones(shape)) for shape in shapes][:: -1 if odd() else 1]
    return lambda: gradients(variables, lambda: tf.add_n([tf.reduce_sum(v) for v in variables]))


def rows_of_another_table() -> Callable[[], Any]:
    """Tables of equal width in another order: only the numbers of rows may differ."""
    tables = [tf.Variable(tf.ones([rows, 4])) for rows in (50, 70)][:: -1 if odd() else 1]
    read = lambda: tf.add_n([tf.reduce_sum(tf.gather(t, [1, 2 + R])) for t in tables])  # noqa: E731
    return lambda: gradients(tables, read)


def other_variables() -> Callable[[], Any]:
    """Each rank's loss lacks another variable, and the other gradients have equal shapes."""
    variables = [tf.Variable(tf.ones([2, 3])) for _ in "ab"]
    return lambda: gradients(variables, lambda: tf.reduce_sum(variables[odd()]))


MISMATCHES: list[tuple[Callable[[], Callable[[], Any]], tuple[str, ...]]] = [
    (lambda: lambda: hvd.allreduce(tf.ones([4 + odd()])), ("the same shape on every rank",)),
    (lambda: sums([8, 16], [16, 8]), ("((8, 16), (16, 8))", "((16, 8), (8, 16))")),
    (other_variables, ("gradient 0", "gradient 1")),
    (rows_of_another_table, ("rows of (50, 4)",)),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("make", "said"), MISMATCHES)
def test_a_mismatch_is_itself_and_tensorflows(make: Any, said: Any, compiled: bool) -> None:
    run = tf.function(make()) if compiled else make()
    error = in_a_cell(lambda: run())
    assert isinstance(error, CollectiveMismatch)
    assert isinstance(error, tf.errors.FailedPreconditionError)
    assert type(error).__name__ == "CollectiveMismatch"
    assert all(words in str(error) for words in said)
    assert "graphs_suite.py" in str(error)
    assert "PyFunc" not in str(error)
    next_cell_works()


def test_a_wrong_argument_in_a_layer_names_the_layer() -> None:
    class Wrong(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return hvd.allreduce(inputs, op="sum")

    with pytest.raises(UsageError, match=r"(?s)Wrong\.call\(\).*expected op Sum, Average"):
        Wrong()(tf.ones(2))


def test_models_that_differ_are_a_mismatch_in_fit() -> None:
    mine = model(units=2 + odd())
    error = in_a_cell(lambda: mine.fit(X, Y, verbose=0))
    assert isinstance(error, CollectiveMismatch)
    assert "rank 1" in str(error)
    assert "mine.fit(X, Y" in str(error)
    next_cell_works()


def test_models_that_were_both_seen_before_are_a_mismatch_in_another_order() -> None:
    """Both orders have the same number of elements, and each rank has seen both before."""
    variables = [tf.Variable(tf.ones([8, 16])), tf.Variable(tf.ones([16, 8]))]
    total = lambda: tf.add_n([tf.reduce_sum(v) for v in variables])  # noqa: E731
    orders = [tf.function(lambda by=by: gradients(variables[::by], total)) for by in (1, -1)]
    for order in [*orders, *orders]:
        order()
    error = in_a_cell(lambda: [order() for order in [*orders, orders[odd()]]])
    assert isinstance(error, CollectiveMismatch)
    assert "((8, 16), (16, 8))" in str(error)
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


def test_an_interrupt_that_was_heard_ends_nothing_later() -> None:
    def busy() -> None:
        with interrupted_after(0.2):
            while True:
                tf.reduce_sum(tf.ones([500, 500]))

    assert isinstance(in_a_cell(busy), KeyboardInterrupt)
    mine = model()

    class Late(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if odd() and batch == 1:
                time.sleep(0.3)

    assert in_a_cell(lambda: mine.fit(X, Y, batch_size=8, verbose=0, callbacks=[Late()])) is None


v1 = tf.compat.v1
MANY = 50


def one_of_many(number: int) -> Any:
    """Returns a collective with its own name, and its expected result."""
    x = tf.constant(np.full(4 * N, number + R, np.float32))
    name = f"many_{number}"
    everybody = [number + r for r in range(N)]
    total = [sum(everybody)] * (4 * N)
    if number % 7 == 0:
        return hvd.allgather(x[:1], name=name), everybody
    if number % 7 == 1:
        return hvd.broadcast(x, number % N, name=name), [number + number % N] * (4 * N)
    if number % 7 == 2:
        return hvd.reducescatter(x, op=hvd.Sum, name=name), total[:4]
    if number % 7 == 3:
        both = hvd.grouped_allgather([x[:1], x[:1]], name=name)
        return tf.concat(both, 0), [*everybody, *everybody]
    if number % 7 == 4:
        return hvd.alltoall(x, name=name), np.repeat(everybody, 4)
    if number % 7 == 5:
        w = v1.get_variable(name, initializer=x)
        return hvd.broadcast_([w], N - 1, name=name)[0], [everybody[-1]] * (4 * N)
    return hvd.allreduce(x, op=hvd.Sum, name=name), total


def test_many_collectives_in_another_order_on_every_rank() -> None:
    order = random.Random(R)
    with tf.Graph().as_default():
        numbers = list(range(MANY))
        order.shuffle(numbers)
        made = [one_of_many(number) for number in numbers]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(15):
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
    monkeypatch.setattr(tf_bridge, "_PATIENCE_SECONDS", 8.0)
    monkeypatch.setattr(tf_bridge.current(), "late_seconds", 0.3)
    with tf.Graph().as_default(), v1.Session() as session:
        both = [hvd.allreduce(tf.ones(2), name=name) for name in ("first", "second")]
        error = in_a_cell(lambda: session.run(both[odd()]))
        assert error is not None
        said = "".join(capfd.readouterr())
        if odd():
            assert f"first is next on all ranks: rank {R} has not reached it for" in said
            assert isinstance(error, CollectiveMismatch)
            assert f"rank {R} has not reached it for" in str(error)
            assert "waits in second" in str(error)
        elif R == 0:
            assert re.search(r"has waited \d s for rank 1", said)
        # The order of that cell is not valid in the next one.
        assert in_a_cell(lambda: session.run(both[1])) is None
        assert in_a_cell(lambda: session.run(both)) is None
    next_cell_works()


def test_a_rank_that_leaves_ends_every_wait_of_a_session() -> None:
    """Otherwise a session never ends, because one of its operations waits."""
    with tf.Graph().as_default(), v1.Session() as session:
        several = [hvd.allreduce(tf.ones(2), name=f"several_{i}") for i in range(4)]
        error = in_a_cell(lambda: None if odd() else session.run(several))
        assert error is None if odd() else isinstance(error, RankLeft)
        assert in_a_cell(lambda: session.run(several)) is None
    next_cell_works()


def test_a_set_with_the_number_of_a_removed_one_runs_in_sessions() -> None:
    for _ in range(2):
        members = hvd.add_process_set([0, 1])
        with tf.Graph().as_default(), v1.Session() as session:
            if members.included():
                summed = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=members)
                assert session.run(summed) == 2
        hvd.remove_process_set(members)


def test_the_gradient_of_an_allgather_keeps_its_own_dtype() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant(np.ones([R + 1, 2]))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def narrowed(y: Any) -> Any:
            return tf.identity(y), lambda g: tf.cast(g, tf.float32)

        gathered = narrowed(hvd.allgather(x))
        (gradient,) = tf.gradients(gathered * (R + 1.0), x)
        assert gradient.dtype == tf.float32
        np.testing.assert_allclose(session.run(gradient), np.full([R + 1, 2], (N + 1) / 2))


class Given(v1.train.GradientDescentOptimizer):  # type: ignore[misc]
    """A user's optimizer without a loss."""

    def compute_gradients(self, *, of: Any) -> Any:  # type: ignore[override]
        return [(tf.cast(of, tf.float32) * tf.ones_like(v), v) for v in v1.trainable_variables()]


def test_an_optimizer_accumulates_and_counts_every_step() -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=tf.zeros([2]))
        u = v1.get_variable("u", initializer=tf.zeros([2]))
        steps = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(Given(1.0), backward_passes_per_step=2)
        optimizer.register_local_var(u)
        pairs = optimizer.compute_gradients(of=R + 1)
        train = optimizer.apply_gradients(pairs, global_step=steps)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for step in range(1, 5):
                seen = session.run([train, [g for g, _ in pairs]])[1]
                shared, own = session.run([w, u])
                assert session.run(steps) == step
                due = step // 2
                np.testing.assert_allclose(shared, [-due * (N + 1)] * 2)
                np.testing.assert_allclose(own, [-due * 2 * (R + 1) / N] * 2)
                # Before the last pass, the result is this step's gradient.
                first = N + 1 if step % 2 == 0 else R + 1
                np.testing.assert_allclose(seen[0], [first] * 2)


def test_accumulated_slices_become_dense() -> None:
    with tf.Graph().as_default():
        table = v1.get_variable("table", initializer=tf.zeros([N + 1, 2]))
        loss = tf.reduce_sum(tf.gather(table, [R, N]))
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(4):
                session.run(train)
            found = session.run(table)
    np.testing.assert_allclose(found[:, 0], [-4 / N] * N + [-4])


def test_an_optimizer_that_accumulates_needs_a_graph() -> None:
    made = hvd.DistributedOptimizer(Given(1.0), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="backward_passes_per_step=2, and TensorFlow executes"):
        made.compute_gradients(of=1)
