"""What `allranks.keras` promises with every backend of Keras."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import allranks.collectives as c
import allranks.keras as hvd
from allranks.errors import CollectiveMismatch, RankLeft, UsageError
from tests.keras.ranks.conftest import in_a_cell, interrupted_after, next_cell_works, odd, until

hvd.init()
RANK, SIZE, ROWS = hvd.rank(), hvd.size(), 8
# Keras warns when it saves a model with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_the_backend_is_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"the backend {keras.backend.backend()}")


def mlp(optimizer: Any = None, seed: int = 0, units: int = 4, **compiled: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    if optimizer is not None:
        model.compile(optimizer, "mse", **compiled)
    return model


def data(rows: int = ROWS, seed: int = 7) -> tuple[Any, Any]:
    x = np.random.default_rng(seed).normal(size=(rows * SIZE, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


def share(array: Any, rows: int = ROWS) -> Any:
    return array[RANK * rows : (RANK + 1) * rows]


def values(variables: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def same_everywhere(variables: Any) -> bool:
    every = c.allgather_object([array.tobytes() for array in values(variables)])
    return len({tuple(one) for one in every}) == 1


@pytest.mark.parametrize("how", ["fit", "clipped", "accumulated", "scaled loss"])
def test_training_on_ranks_is_training_on_the_joined_batch(how: str) -> None:
    options: dict[str, Any] = {"clipnorm": 0.5} if how == "clipped" else {}
    if how == "accumulated":
        options["gradient_accumulation_steps"] = 2

    def optimizer() -> Any:
        made = keras.optimizers.Adam(0.05, **options)
        return keras.optimizers.LossScaleOptimizer(made) if how == "scaled loss" else made

    x = data(2 * ROWS)[0]
    # In each step the ranks together have the rows that one process has.
    joined = np.concatenate([x.reshape(2, -1, 3)[step] for step in range(2)])
    wanted = mlp(optimizer())
    wanted.fit(joined, joined @ np.float32([[1], [-2], [0.5]]), SIZE * ROWS, 3, 0, shuffle=False)
    mine = mlp(hvd.DistributedOptimizer(optimizer()))
    part = np.concatenate([share(x.reshape(2, -1, 3)[step]) for step in range(2)])
    mine.fit(part, part @ np.float32([[1], [-2], [0.5]]), ROWS, 3, 0, shuffle=False)
    assert same_everywhere(mine.weights)
    for found, expected in zip(values(mine.weights), values(wanted.weights), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_a_sum_is_so_many_times_the_average() -> None:
    x, y = data()
    steps = []
    for op in (hvd.Average, hvd.Sum):
        model = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=op))
        before = values(model.weights)
        model.fit(share(x), share(y), ROWS, 1, 0)
        after = values(model.weights)
        steps.append([now - then for now, then in zip(after, before, strict=True)])
    for average, whole in zip(*steps, strict=True):
        np.testing.assert_allclose(whole, SIZE * average, rtol=1e-3, atol=1e-6)


def test_a_process_set_trains_its_own_model() -> None:
    half = hvd.add_process_set(range(1))
    others = hvd.add_process_set(range(1, SIZE))
    mine = half if RANK == 0 else others
    model = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=mine), seed=RANK)
    x, y = data()
    model.fit(share(x), share(y), ROWS, 1, 0)
    assert not same_everywhere(model.weights)


def test_callbacks_broadcast_average_and_warm_up() -> None:
    x, y = data(seed=RANK)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.04, momentum=0.9))
    model = mlp(optimizer, seed=RANK, metrics=["mae"])
    history = model.fit(
        share(x), share(y), ROWS // 2, 4, 0,
        callbacks=[
            hvd.BroadcastGlobalVariables(0),
            hvd.MetricAverage(),
            hvd.LearningRateWarmup(warmup_epochs=2),
            hvd.LiveCurves(),
        ],
    )  # fmt: skip
    assert same_everywhere(model.weights)
    assert same_everywhere(optimizer.variables)
    for name in ("loss", "mae"):
        assert len(set(c.allgather_object(tuple(history.history[name])))) == 1
    assert history.history["lr"] == pytest.approx([0.03, 0.04, 0.04, 0.04])


def test_only_the_first_rank_writes_a_checkpoint() -> None:
    folder = Path(tempfile.mkdtemp())
    path = folder / "epoch-{epoch}.weights.h5"
    x, y = data()
    model = mlp(hvd.DistributedOptimizer(keras.optimizers.Adam()))
    saves = hvd.ModelCheckpoint(str(path), save_weights_only=True)
    model.fit(share(x), share(y), ROWS, 2, 0, callbacks=[saves])
    written = sorted(one.name for one in folder.iterdir())
    assert written == (["epoch-1.weights.h5", "epoch-2.weights.h5"] if RANK == 0 else [])
    if RANK == 0:
        again = mlp()
        again.load_weights(folder / "epoch-2.weights.h5")
        for found, expected in zip(values(again.weights), values(model.weights), strict=True):
            np.testing.assert_array_equal(found, expected)


@keras.saving.register_keras_serializable(package="mine")
class Own(keras.optimizers.SGD):
    """An optimizer that a user has registered."""


def test_a_saved_and_a_pickled_optimizer_are_those_of_keras_and_distributed() -> None:
    x, y = data()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model = mlp(optimizer)
    model.fit(share(x), share(y), ROWS, 1, 0)
    config = keras.saving.serialize_keras_object(optimizer)
    assert (config["module"], config["class_name"]) == ("keras.optimizers", "Adam")
    own = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(Own(0.01)))
    assert own["registered_name"] == "mine>Own"
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is type(optimizer)
    assert float(keras.ops.convert_to_numpy(again.learning_rate)) == pytest.approx(0.01)
    with pytest.raises(UsageError, match=r"Type: DistributedOptimizer\(Adam\.from_config"):
        type(optimizer).from_config(optimizer.get_config())


@pytest.mark.covers("mismatch", "Keras on tensorflow", "Keras on jax", "Keras on torch")
def test_models_that_differ_are_a_mismatch_in_fit() -> None:
    mine = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), units=4 + odd())
    x, y = data()
    error = in_a_cell(lambda: mine.fit(share(x), share(y), verbose=0))
    assert isinstance(error, CollectiveMismatch), error
    assert "needs the same shape on every rank" in str(error)
    assert "training_suite.py" in str(error)
    assert "mine.fit(share(x)" in str(error)
    next_cell_works()


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("accumulated", [None, 2])
@pytest.mark.parametrize("left_out", [False, True])
def test_gradients_of_different_variables_are_a_mismatch(
    accumulated: int | None, left_out: bool
) -> None:
    mine = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulated)
    )
    variables = [keras.Variable([0.0, 0.0], name=name) for name in ("first", "second")]
    mine.build(variables)
    ones = keras.ops.ones(2)
    pairs = [(ones if at == odd() else None, variable) for at, variable in enumerate(variables)]
    if left_out:
        pairs = [pair for pair in pairs if pair[0] is not None]

    def step() -> None:
        for _ in range(accumulated or 1):
            mine.apply_gradients(pairs)

    error = in_a_cell(step)
    assert "gradient 0" in str(error), error
    if not (accumulated and keras.backend.backend() == "jax"):  # which raises its own exception
        assert isinstance(error, CollectiveMismatch)
    next_cell_works()
    for found in values(variables):
        np.testing.assert_array_equal(found, [0.0, 0.0])


def test_variables_that_differ_are_named_before_they_are_broadcast() -> None:
    mine = mlp(units=4 + odd())
    error = in_a_cell(lambda: hvd.broadcast_variables(mine.weights, 0))
    assert isinstance(error, CollectiveMismatch), error
    assert "needs the same variables on every rank" in str(error)
    next_cell_works()


def steps_of(model: Any) -> int:
    # The public name counts updates, which are fewer with gradient accumulation.
    return int(keras.ops.convert_to_numpy(model.optimizer._iterations))


def check_kept_after_the_first_batch(model: Any) -> None:
    assert steps_of(model) == 1
    assert same_everywhere(model.weights)
    if not model.optimizer.gradient_accumulation_steps:  # those sums are not yet reduced
        assert same_everywhere(model.optimizer.variables)


class Raises(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and RANK == SIZE - 1:
            raise ValueError("no more data")


@pytest.mark.covers("error", "Keras on tensorflow", "Keras on jax", "Keras on torch")
@pytest.mark.parametrize("accumulated", [None, 2])
def test_a_rank_that_leaves_fit_ends_the_wait_of_the_others(accumulated: int | None) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    mine = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, **options)))
    x, y = data()
    fit = lambda: mine.fit(share(x), share(y), ROWS // 4, 1, 0, callbacks=[Raises()])  # noqa: E731
    error = in_a_cell(fit)
    assert isinstance(error, ValueError if RANK == SIZE - 1 else RankLeft), error
    assert in_a_cell(lambda: check_kept_after_the_first_batch(mine)) is None
    assert in_a_cell(lambda: mine.fit(share(x), share(y), ROWS // 4, 1, 0)) is None


@pytest.mark.parametrize("overflows", [False, True])
def test_a_rank_that_leaves_fit_changes_no_scale_of_the_loss(overflows: bool) -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    mine = mlp(hvd.DistributedOptimizer(scaled))
    x, y = data()
    x = share(x).copy()
    if overflows and RANK == 0:
        x[ROWS // 2 :] = np.inf  # the batch in which the last rank leaves

    def fit() -> None:
        mine.fit(x, share(y), ROWS // 2, 1, 0, shuffle=False, callbacks=[Raises()])

    error = in_a_cell(fit)
    assert isinstance(error, ValueError if RANK == SIZE - 1 else RankLeft), error

    def check() -> None:
        assert same_everywhere(mine.weights)
        assert same_everywhere(mine.optimizer.variables)

    assert in_a_cell(check) is None


@pytest.mark.covers("interrupt", "Keras on tensorflow", "Keras on jax", "Keras on torch")
def test_an_interrupt_ends_a_wait_inside_fit() -> None:
    over = Path(c.broadcast_object(tempfile.mkdtemp())) / "over"
    in_the_second_batch = threading.Event()

    class Late(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and odd():
                until(over.exists)
            elif batch == 1:
                in_the_second_batch.set()

    mine = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    x, y = data()

    def fit() -> None:
        mine.fit(share(x), share(y), ROWS // 4, 1, 0, callbacks=[Late()])

    def interrupted() -> None:
        try:
            with interrupted_after(0.5, in_the_second_batch.is_set):
                fit()
        finally:
            over.touch()

    error = in_a_cell(fit if odd() else interrupted)
    assert isinstance(error, RankLeft if odd() else KeyboardInterrupt), error
    next_cell_works()
    # The odd rank may have the gradients that the others sent before the interrupt.
    assert steps_of(mine) == 1 or (odd() and steps_of(mine) == 2)
    assert all(np.isfinite(one).all() for one in values(mine.weights))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="its steps take the variables' memory")
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_interrupt_while_a_step_computes_keeps_the_variables(method: str) -> None:
    import jax

    class Pressed(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            jax.debug.callback(lambda: os.kill(os.getpid(), signal.SIGINT))
            return inputs

    quiet = mlp(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    x, y = data()
    quiet.fit(share(x), share(y), ROWS, 1, 0)
    before = values(quiet.weights)
    pressed = keras.Sequential([keras.Input((3,)), Pressed(), *quiet.layers])
    pressed.compile(quiet.optimizer, "mse")
    given = [share(x)] if method == "predict" else [share(x), share(y)]

    def interrupted() -> None:
        # Only after the whole test: this never sends, and has SIGINT raise KeyboardInterrupt.
        with interrupted_after(60):
            getattr(pressed, method)(*given, batch_size=ROWS, verbose=0)

    error = in_a_cell(interrupted)
    assert isinstance(error, KeyboardInterrupt), error
    next_cell_works()
    after = values(pressed.weights)
    if method != "fit":  # where the ranks may have finished the step
        for found, expected in zip(after, before, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert all(np.isfinite(value).all() for value in values(quiet.optimizer.variables))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": "adam"}, "needs an optimizer of Keras"),
        ({"op": c.Max}, "needs op=Average or op=Sum"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    given = {"optimizer": keras.optimizers.SGD(), **arguments}
    with pytest.raises(UsageError, match=said):
        hvd.DistributedOptimizer(**given)
