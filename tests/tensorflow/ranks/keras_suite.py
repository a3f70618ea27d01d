"""Callbacks, loading, elastic state and layers of Keras 3 and Keras 2.

`names_suite` tests the simplest use of the same names.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import allranks.collectives as c  # noqa: E402
import allranks.tensorflow.keras as hvd  # noqa: E402
from allranks.engine import telemetry  # noqa: E402
from allranks.errors import CollectiveMismatch, UsageError  # noqa: E402
from allranks.keras.versions import LEGACY, keras  # noqa: E402
from allranks.tensorflow import elastic, patches  # noqa: E402

# A warning of Keras when it saves a model with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
RANK, SIZE = c.rank(), c.size()


def mlp(optimizer=None, seed=0, units=4, loss="mse"):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(1)]
    )
    if optimizer is not None:
        model.compile(optimizer, loss)
    return model


def data(rows=8, seed=7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows * SIZE, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


def share(array, rows=8):
    return array[RANK * rows : (RANK + 1) * rows]


def same_everywhere(arrays):
    every = c.allgather_object([np.asarray(a).tobytes() for a in arrays])
    return len({tuple(one) for one in every}) == 1


def normalized(layer):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5, 3))
    outputs = keras.layers.Dense(1)(layer(keras.layers.Dense(4, activation="tanh")(inputs)))
    return keras.Model(inputs, outputs)


def test_batch_normalization_on_ranks_is_that_of_the_joined_batch():
    # The ranks' batches have different lengths, and a mean far from zero.
    lengths = [2 + rank for rank in range(SIZE)]
    ends = np.cumsum(lengths)
    x = np.random.default_rng(1).normal(100.0, 2.0, (ends[-1], 5, 3)).astype("float32")
    mine = slice(ends[RANK] - lengths[RANK], ends[RANK])

    def step(model, inputs, scale):
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(tf.square(model(inputs, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    alone = normalized(keras.layers.BatchNormalization())
    wanted = step(alone, x, 1.0)
    shared = normalized(hvd.SyncBatchNormalization())
    found = step(shared, x[mine], 1.0)
    for gradient, whole in zip(found, wanted, strict=True):
        total = c.allreduce(gradient.numpy(), c.Sum)
        np.testing.assert_allclose(total, whole, rtol=2e-4, atol=2e-4)
    for mine_, theirs in zip(shared.weights, alone.weights, strict=True):
        np.testing.assert_allclose(mine_, theirs, rtol=1e-5, atol=1e-5)


def test_a_masked_batch_normalization_counts_what_is_not_masked():
    layer, alone = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    x = np.random.default_rng(2).normal(size=(SIZE, 4, 3)).astype("float32")
    mask = np.arange(4)[None, :] < 1 + np.arange(SIZE)[:, None] % 4
    alone(x, training=True, mask=mask)
    layer(x[RANK : RANK + 1], training=True, mask=mask[RANK : RANK + 1])
    np.testing.assert_allclose(layer.moving_mean, alone.moving_mean, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, alone.moving_variance, atol=1e-5)


def test_fused_batch_normalization_is_refused():
    with pytest.raises(ValueError, match="needs fused=False"):
        hvd.SyncBatchNormalization(fused=True)


@pytest.fixture
def folder():
    path = tempfile.mkdtemp() if RANK == 0 else None
    return Path(c.broadcast_object(path))


SERVE = """
import sys
class Gone:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("allranks", "horovod", "mpi4py", "matplotlib", "sklearn"):
            raise ImportError(name)
sys.meta_path.insert(0, Gone())
import importlib, numpy as np
keras = importlib.import_module(sys.argv[1])
for saved in sys.argv[2:]:
    model = keras.models.load_model(saved)
    assert type(model.optimizer).__module__.partition(".")[0] == keras.__name__
    assert type(model.optimizer).__name__ == "Adam"
    assert int(model.optimizer.iterations) == 1
    print(float(np.sum(model(np.ones((1, 5, 3))))))
    if saved.endswith(".keras"):  # Keras 3.15 trains no model on that it has read from HDF5
        model.fit(np.ones((4, 5, 3)), np.ones((4, 5, 1)), verbose=0)
        assert int(model.optimizer.iterations) == 2
"""


def test_a_saved_model_serves_and_trains_without_allranks(folder):
    model = normalized(hvd.SyncBatchNormalization())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, keras.losses.MeanSquaredError())  # HDF5 has no "mse"
    model.fit(np.ones((4, 5, 3)), np.ones((4, 5, 1)), verbose=0)
    if RANK == 0:  # as in a script, one rank saves
        saved = [folder / "model.keras", folder / "model.h5"][: 1 if LEGACY else 2]
        for path in saved:
            model.save(path)
        ended = subprocess.run(
            [sys.executable, "-c", SERVE, keras.__name__, *saved], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        mine = float(np.sum(model(np.ones((1, 5, 3)))))
        assert list(map(float, ended.stdout.split())) == pytest.approx([mine] * len(saved), 1e-5)


def test_a_loaded_model_trains_on_where_the_saved_one_was(folder):
    x, y = data()
    model = mlp(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), seed=1)
    model.fit(share(x), share(y), batch_size=8, epochs=3, shuffle=False, verbose=0)
    if RANK == 0:
        model.save(folder / "model.keras")
    c.barrier()
    loaded = hvd.load_model(folder / "model.keras")
    assert int(loaded.optimizer.iterations) == 3
    for one in (model, loaded):
        one.fit(share(x), share(y), batch_size=8, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert same_everywhere(loaded.weights)


def test_only_the_first_rank_writes_the_best_model(folder):
    model = mlp("sgd")
    path = folder / f"best-{RANK}.keras"
    best = hvd.callbacks.BestModelCheckpoint(str(path), monitor="loss")
    model.fit(*map(share, data()), verbose=0, callbacks=[best])
    assert path.exists() == (RANK == 0)
    with pytest.raises(UsageError, match="needs a filepath"):
        hvd.callbacks.BestModelCheckpoint()


@pytest.mark.parametrize("built", [True, False])
def test_all_ranks_begin_with_the_roots_weights_and_optimizer(built):
    root = SIZE - 1
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
    model = keras.Sequential(([keras.Input((3,))] if built else []) + layers)
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    if built:
        model.optimizer.build(model.trainable_variables)
        for velocity in model.optimizer.momentums:
            velocity.assign(np.full(velocity.shape, float(RANK)))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    before = [w.numpy().copy() for w in model.weights] if built else []
    model.fit(*map(share, data()), verbose=0, callbacks=[callback])
    assert same_everywhere(model.weights)
    if built:
        assert same_everywhere(model.optimizer.momentums)
        if root == RANK:
            for now, then in zip(model.weights, before, strict=True):
                np.testing.assert_allclose(now, then + 0.9 * root, rtol=1e-6)


def test_local_variables_are_left_to_each_rank():
    model = mlp(keras.optimizers.SGD(0.0), seed=RANK)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [model.layers[0]])
    model.fit(*map(share, data()), verbose=0, callbacks=[callback])
    assert same_everywhere(model.layers[1].weights)
    assert not same_everywhere(model.layers[0].weights)


def test_metrics_are_averaged_for_the_history_and_later_callbacks():
    seen = {}

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.update(logs)

    model = mlp(keras.optimizers.SGD(0.0))
    x, y = data()
    own = model.evaluate(share(x), share(y), verbose=0)
    history = model.fit(
        share(x), share(y), verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback(), Later()]
    ).history
    mean = np.mean(c.allgather_object(own))
    assert history["loss"] == [pytest.approx(mean, rel=1e-5)]
    assert seen["loss"] == history["loss"][0]
    exact = {"lr": 0.1, "count": 16_777_217.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, exact)
    assert exact == {"lr": pytest.approx(0.1, rel=1e-15), "count": 16_777_217.0}


def rates(callback, epochs, steps=4, optimizer=None):
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(float(self.model.optimizer.learning_rate))

    model = mlp(optimizer or keras.optimizers.SGD(0.8))
    x, y = data()
    history = model.fit(
        share(x), share(y), 8 // steps, epochs, verbose=0, callbacks=[callback, Look()]
    ).history
    return found, history


def test_the_rate_follows_the_epochs_also_inside_an_optimizer_that_scales_the_loss():
    home = keras.mixed_precision if LEGACY else keras.optimizers
    scaling = home.LossScaleOptimizer(keras.optimizers.SGD(0.8, momentum=0.9))
    given = hvd.callbacks
    for optimizer in (keras.optimizers.SGD(0.8), scaling):
        schedule = given.LearningRateScheduleCallback(None, 0.5, start_epoch=1, end_epoch=3)
        found, history = rates(schedule, 4, steps=1, optimizer=optimizer)
        assert found == pytest.approx([0.8, 0.8, 0.4, 0.4])
        assert history["lr"] == pytest.approx(found)
    by_batch = given.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False)
    assert rates(by_batch, 2)[0] == pytest.approx([0.1 * (1 + e / 4) for e in range(8)])
    # From the rate of one rank to that of all.
    found, _ = rates(given.LearningRateWarmupCallback(warmup_epochs=2), 3)
    steps = [1 / SIZE * ((e + 1) / 8 * (SIZE - 1) + 1) for e in range(8)] + [1.0] * 4
    assert found == pytest.approx([0.8 * step for step in steps])


def test_momentum_is_scaled_where_the_rate_changes():
    # With the correction a velocity is the current rate times a sum of gradients.
    model = mlp(keras.optimizers.SGD(0.1, momentum=0.9))
    x, y = data()
    weights = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append([w.numpy().copy() for w in self.model.weights])

    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda e: [1.0, 0.5][e])
    velocities = []

    class Before(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            found = getattr(self.model.optimizer, "momentums", ())
            velocities.append([m.numpy().copy() for m in found])

    with_ = [Before(), schedule, Look()]
    model.fit(share(x), share(y), batch_size=8, epochs=2, verbose=0, callbacks=with_)
    twin = mlp("sgd")
    twin.set_weights(weights[0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(twin(share(x)) - share(y)))
    gradients = tape.gradient(loss, twin.trainable_variables)
    for before, velocity, gradient, after in zip(
        weights[0], velocities[1], gradients, weights[1], strict=True
    ):
        step = 0.9 * 0.5 * velocity - 0.05 * gradient.numpy()
        np.testing.assert_allclose(after, before + step, atol=1e-5)


def test_a_rate_that_is_a_schedule_is_said_to_be_one():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    with pytest.raises(UsageError, match="found ExponentialDecay"):
        rates(callback, 1, optimizer=keras.optimizers.SGD(schedule))


def test_what_fit_measures_is_logged_for_the_curves():
    telemetry.process_metrics.begin()
    model = mlp("sgd")
    x, y = data()
    curves = hvd.callbacks.LiveCurvesCallback(every=2, prefix="a/", member=3)
    options = {"validation_data": (x, y), "verbose": 0, "callbacks": [curves]}
    model.fit(share(x), share(y), batch_size=2, epochs=2, **options)
    told, points = telemetry.process_metrics.take()
    assert told == [["a/loss", "3", 4], ["a/val_loss", "3", 2]]
    assert list(np.frombuffer(points)[:8:2]) == [2, 4, 6, 8]


def test_a_mismatch_that_comes_again_is_raised():
    state = elastic.ObjectState(tries=0)
    tries = []

    @elastic.run
    def train(state):
        tries.append(1)
        state.tries += 1
        c.allreduce(np.ones(2 + RANK))

    with pytest.raises(CollectiveMismatch):
        train(state)
    assert len(tries) == 3
    assert state.tries == 0


@pytest.mark.skipif(LEGACY, reason="a Sequential of Keras 2 that is not built has no weights")
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_are_created_after_a_commit_do_not_become_zero(compiled):
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
    if compiled:
        model.compile(keras.optimizers.SGD(0.25, momentum=0.5), "mse")
    state = hvd.elastic.KerasState(model)
    model.build((None, 3))
    before = model.get_weights()
    state.restore()
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    if compiled:
        model.fit(*data(), verbose=0)
        state.restore()
        assert not any(np.any(one) for one in optimizer_momentums(model.optimizer))
        assert float(model.optimizer.learning_rate) == 0.25


def optimizer_momentums(optimizer):
    found = optimizer.variables
    every = found() if callable(found) else found
    return [np.asarray(one) for one in every if one.shape == (3, 2)]


def test_new_hosts_reset_without_a_failure():
    state = elastic.TensorFlowState([tf.Variable(1.0 + RANK)], batch=0)
    calls = []

    @elastic.run
    def train(state):
        calls.append(state.batch)
        if len(calls) == 1:
            state.batch = 5
            if RANK == 0:
                state.on_hosts_updated(0.0, 1)
            state.commit()
        return float(state.variables[0])

    assert train(state) == 1.0
    assert calls == [0, 5]


def test_a_rank_that_sees_its_own_gpu_finds_it_at_every_local_rank():
    assert patches.repeated(["gpu"], 4) == ["gpu"] * 4
    assert patches.repeated(["gpu", "other"], 4) == ["gpu", "other"]
    assert patches.repeated([], 4) == []
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.visible_device_list = "3"
    assert patches.with_own_gpu(config, 1).gpu_options.visible_device_list == "0"
    assert patches.with_own_gpu(config, 8) is config
    assert patches.with_own_gpu(None, 1) is None
