"""Training on n ranks is training in one process on the joined batch, step by step."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.tensorflow as hvd  # noqa: E402
from allranks.errors import UsageError  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
STEPS, BATCH = 4, 6
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
Make = Callable[[], Any]

rng = np.random.default_rng(7)
X = rng.normal(size=(STEPS, N, BATCH, 5)).astype(np.float32)
Y = np.sin(3 * X.sum(-1, keepdims=True)).astype(np.float32)
WORDS = rng.integers(0, 9, (STEPS, N, BATCH, 3))


def dense_model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)]
    )


def word_model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(9, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def joined(batches: np.ndarray) -> np.ndarray:
    return batches.reshape(N * BATCH, *batches.shape[2:])


def close(model: Any, reference: Any, tolerance: float = 2e-5) -> None:
    for mine, theirs in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=tolerance, atol=tolerance)


def same_everywhere(model: Any) -> None:
    flat = np.concatenate([v.numpy().ravel() for v in model.variables])
    assert all((flat == other).all() for other in hvd.allgather_object(flat))


def follows(
    distributed: Any,
    plain: Any,
    model: Make = dense_model,
    inputs: np.ndarray = X,
    tolerance: float = 2e-5,
    **compiled: Any,
) -> None:
    """Trains both, and compares all weights after each step."""
    mine, reference = model(), model()
    mine.compile(distributed, "mse", **compiled)
    # Keras' own training is the same in a graph, which takes longer to make than four steps.
    reference.compile(plain, "mse", run_eagerly=True)
    for step in range(STEPS):
        mine.train_on_batch(inputs[step, R], Y[step, R])
        reference.train_on_batch(joined(inputs[step]), joined(Y[step]))
        close(mine, reference, tolerance)
    same_everywhere(mine)
    assert abs(mine.get_weights()[0] - model().get_weights()[0]).max() > 1e-4  # it has learnt


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "Adam": lambda: Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)),
    "clipnorm": lambda: SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: SGD(0.5, clipvalue=0.02),
    "EMA": lambda: Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "loss scale": lambda: SGD(0.1, loss_scale_factor=64.0),
    "accumulation": lambda: Adam(0.01, gradient_accumulation_steps=2),
    "accumulation, clipped": lambda: SGD(0.5, gradient_accumulation_steps=2, global_clipnorm=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_training_is_that_of_the_joined_batch(name: str) -> None:
    make = OPTIMIZERS[name]
    follows(hvd.DistributedOptimizer(make()), make())


@pytest.mark.parametrize("name", ["momentum", "Adam", "global_clipnorm", "accumulation"])
def test_eager_training_is_that_of_the_joined_batch(name: str) -> None:
    make = OPTIMIZERS[name]
    follows(hvd.DistributedOptimizer(make()), make(), run_eagerly=True)


def test_jit_compile_is_left_out_of_a_distributed_step() -> None:
    follows(hvd.DistributedOptimizer(Adam(0.01)), Adam(0.01), jit_compile=True)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_embeddings(as_dense: bool) -> None:
    distributed = hvd.DistributedOptimizer(SGD(0.5), sparse_as_dense=as_dense)
    follows(distributed, SGD(0.5), word_model, WORDS)


def test_sparse_embeddings_with_adam() -> None:
    follows(hvd.DistributedOptimizer(Adam(0.01)), Adam(0.01), word_model, WORDS)


@pytest.mark.parametrize("averaged", [True, False])
def test_backward_passes_are_summed_or_averaged(averaged: bool) -> None:
    distributed = hvd.DistributedOptimizer(
        SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=averaged
    )
    rate = 0.1 if averaged else 0.2
    follows(distributed, SGD(rate, gradient_accumulation_steps=2))


def test_sum_and_predivide_and_compression() -> None:
    follows(hvd.DistributedOptimizer(SGD(0.1 / N), op=hvd.Sum), SGD(0.1))
    follows(hvd.DistributedOptimizer(SGD(0.1), gradient_predivide_factor=4.0), SGD(0.1))
    half = hvd.DistributedOptimizer(SGD(0.1), compression=hvd.Compression.fp16)
    follows(half, SGD(0.1), tolerance=5e-3)


def test_groups_change_nothing_and_nonsense_is_refused() -> None:
    follows(hvd.DistributedOptimizer(SGD(0.1), num_groups=2), SGD(0.1))
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(SGD(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=Average"):
        hvd.DistributedOptimizer(SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(UsageError, match=r"keras\.optimizers"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(UsageError, match="contradict each other"):
        hvd.DistributedOptimizer(SGD(gradient_accumulation_steps=3), backward_passes_per_step=2)


MISTAKES: dict[str, Callable[[], Any]] = {
    "op=Average or op=Sum: found 'sum'": lambda: hvd.DistributedOptimizer(SGD(), op="sum"),
    "1 or more: found 1.5": lambda: hvd.DistributedOptimizer(SGD(), backward_passes_per_step=1.5),
    "Compression.fp16, found 'fp16'": lambda: hvd.DistributedOptimizer(SGD(), compression="fp16"),
    "a process set, or none for all ranks: found [0]": lambda: hvd.DistributedOptimizer(
        SGD(), process_set=[0]
    ),
    "a tf.GradientTape: found int": lambda: hvd.DistributedGradientTape(3),
    "a list of variables: found Variable": lambda: hvd.broadcast_variables(
        dense_model().weights[0], 0
    ),
    "a list of variables: found Sequential": lambda: hvd.broadcast_variables(dense_model(), 0),
    "a list of variables: found ndarray in it": lambda: hvd.broadcast_variables([np.ones(2)], 0),
    "its state: found 5": lambda: hvd.elastic.run(lambda state: state)(5),
    "a model of Keras: found NoneType": lambda: hvd.elastic.TensorFlowKerasState(None),
    "a list of process sets: found 'all'": lambda: hvd.init(process_sets="all"),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_what_is_passed_by_mistake_is_named(said: str) -> None:
    with pytest.raises(UsageError) as raised:
        MISTAKES[said]()
    assert said in str(raised.value)


@pytest.mark.skipif(N < 2, reason="nobody else is in no set")
def test_a_rank_outside_a_set_of_one_does_not_train_alone() -> None:
    only = hvd.add_process_set([0])
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(SGD(0.1), process_set=only), "mse")
    if R == 0:
        model.train_on_batch(X[0, 0], Y[0, 0])
    else:
        with pytest.raises(UsageError, match=f"rank {R} is not a member"):
            model.train_on_batch(X[0, 0], Y[0, 0])
    hvd.remove_process_set(only)


def test_an_optimizer_keeps_its_state_when_it_becomes_distributed() -> None:
    mine, reference = dense_model(), dense_model()
    for model, optimizer in ((mine, Adam(0.01)), (reference, Adam(0.01))):
        model.compile(optimizer, "mse")
        model.train_on_batch(joined(X[0]), joined(Y[0]))
    hvd.DistributedOptimizer(mine.optimizer)
    mine.compile(mine.optimizer, "mse")
    assert mine.optimizer.iterations == 1
    mine.train_on_batch(X[1, R], Y[1, R])
    reference.train_on_batch(joined(X[1]), joined(Y[1]))
    close(mine, reference)


def test_a_pickled_optimizer_goes_on_distributed() -> None:
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(Adam(0.01)), "mse")
    model.train_on_batch(X[0, R], Y[0, R])
    again = pickle.loads(pickle.dumps(model.optimizer))
    assert type(again).__name__ == "Adam"
    copy = dense_model()
    copy.set_weights(model.get_weights())
    copy.compile(again, "mse")
    for one in (model, copy):
        one.train_on_batch(X[1, R], Y[1, R])
    assert copy.optimizer.iterations == 2
    close(copy, model)
    same_everywhere(copy)


def test_a_custom_loop_with_an_optimizer() -> None:
    mine, reference = dense_model(), dense_model()
    ours, plain = hvd.DistributedOptimizer(Adam(0.01)), Adam(0.01)

    def stepper(model: Any, optimizer: Any) -> Any:
        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        return step

    one, other = stepper(mine, ours), stepper(reference, plain)
    for i in range(STEPS):
        one(X[i, R], Y[i, R])
        other(joined(X[i]), joined(Y[i]))
        close(mine, reference)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("make", [dense_model, word_model])
def test_a_tapes_gradients_are_those_of_the_joined_batch(make: Make, compiled: bool) -> None:
    inputs = X if make is dense_model else WORDS
    model = make()
    variables = model.trainable_variables

    def gradients(x: Any, y: Any, shared: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape) if shared else tape
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    run = tf.function(gradients) if compiled else gradients
    for step in range(2):
        mine = run(tf.constant(inputs[step, R]), tf.constant(Y[step, R]), True)
        whole = gradients(joined(inputs[step]), joined(Y[step]), False)
        for a, b in zip(mine, whole, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_local_sources_stay_local() -> None:
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as recorded:
        loss = (a + b) * float(R + 1)
    tape = hvd.DistributedGradientTape(recorded, scale_local_gradients=False)
    tape.register_local_source(a)
    pairs = tape.get_local_and_global_gradients(loss, [a, b])
    assert pairs[0][0][0] is a
    assert pairs[1][0][0] is b
    assert [[float(g) for _, g in found] for found in pairs] == [[R + 1], [(N + 1) / 2]]
    local, whole = tape.gradient(loss, [a, b])
    assert float(local) == R + 1
    assert float(whole) == (N + 1) / 2
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    x = tf.fill([1, 2], R + 1.0)
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(layer(x))
    tape = hvd.PartialDistributedGradientTape(recorded, local_layers=layer)
    scaled = tape.gradient(loss, layer.trainable_variables)[0]
    np.testing.assert_allclose(scaled.numpy(), (R + 1) / N)


def test_partly_distributed_optimizer() -> None:
    model = dense_model()
    first = model.layers[0]
    model.compile(hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=first), "mse")
    model.train_on_batch(X[0, R], Y[0, R])
    kernels = hvd.allgather_object([v.numpy() for v in model.trainable_variables])
    for other in range(N):
        assert (kernels[other][0] == kernels[R][0]).all() == (other == R)
        assert (kernels[other][2] == kernels[R][2]).all()


def test_none_gradients_are_left_out() -> None:
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as recorded:
        loss = a * float(R)
    made = hvd.DistributedGradientTape(recorded).gradient(loss, {"a": a, "b": b})
    assert float(made["a"]) == (N - 1) / 2
    assert made["b"] is None


def test_ranks_that_have_joined_train_again_afterwards() -> None:
    x = tf.Variable(tf.ones([3]))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x) * (R + 1)
        return hvd.DistributedGradientTape(tape).gradient(loss, [x])[0]

    for _ in range(2 * R):
        gradients()
    hvd.join()
    for _ in range(2):
        np.testing.assert_allclose(gradients().numpy(), (N + 1) / 2)


def test_fit_with_a_ragged_last_batch() -> None:
    mine = dense_model()
    mine.compile(hvd.DistributedOptimizer(SGD(0.1, momentum=0.9)), "mse")
    x, y = X[:, R].reshape(-1, 5), Y[:, R].reshape(-1, 1)
    rows = len(x) - 1 - R % 2  # the last batch has 5 or 4 rows
    mine.fit(x[:rows], y[:rows], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    same_everywhere(mine)


def test_mixed_precision_skips_a_step_on_all_ranks() -> None:
    keras.utils.set_random_seed(1)
    policy = keras.mixed_precision.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, dtype=policy), keras.layers.Dense(1)]
    )
    inner = hvd.DistributedOptimizer(SGD(0.01))
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0), "mse")
    before = model.get_weights()
    x = X[0, R].copy()
    if R == N - 1:
        x[0, 0] = np.inf
    model.train_on_batch(x, Y[0, R])
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert float(model.optimizer.dynamic_scale.numpy()) == 512.0
    model.train_on_batch(X[1, R], Y[1, R])
    same_everywhere(model)
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_a_loss_scale_optimizer_can_be_wrapped_itself() -> None:
    make = OPTIMIZERS["Adam"]
    scaled = keras.optimizers.LossScaleOptimizer(make(), initial_scale=16.0)
    follows(hvd.DistributedOptimizer(scaled), make())


def test_broadcast_makes_weights_the_same_and_an_ensemble_differs() -> None:
    def member(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(Adam(0.01), "mse")
        return model

    model = member(R)
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + model.optimizer.variables, 0)
    same_everywhere(model)
    ensemble = member(R)
    ensemble.train_on_batch(X[0, R], Y[0, R])
    kernels = hvd.allgather_object(ensemble.get_weights()[0])
    assert all((kernels[i] != kernels[R]).any() for i in range(N) if i != R)


def test_optimizers_of_version_1_follow_the_joined_batch() -> None:
    v1 = tf.compat.v1

    def losses(graph: Any, make: Make, shared: bool, passes: int = 1) -> list[np.ndarray]:
        with graph.as_default():
            v1.set_random_seed(1)
            x, y = v1.placeholder(tf.float32, [None, 5]), v1.placeholder(tf.float32, [None, 1])
            w = v1.get_variable("w", initializer=tf.ones([5, 3]) * (R + 1 if shared else 1))
            u = v1.get_variable("u", initializer=tf.ones([3, 1]))
            loss = tf.reduce_mean((tf.tanh(x @ w) @ u - y) ** 2)
            optimizer = make()
            if shared:
                optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
            train = optimizer.minimize(loss)
            start = v1.global_variables_initializer()
            same = hvd.broadcast_global_variables(0) if shared else tf.no_op()
        found = []
        with v1.Session(graph=graph) as session:
            session.run(start)
            session.run(same)
            for step in range(STEPS):
                a, b = (X[step, R], Y[step, R]) if shared else (joined(X[step]), joined(Y[step]))
                session.run(train, {x: a, y: b})
                found.append(session.run(w))
        return found

    for make in (
        lambda: v1.train.AdagradOptimizer(0.1),
        lambda: v1.train.AdamOptimizer(0.01),
        lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    ):
        mine = losses(tf.Graph(), make, True)
        np.testing.assert_allclose(mine, losses(tf.Graph(), make, False), rtol=1e-4, atol=1e-5)
    accumulated = losses(tf.Graph(), lambda: v1.train.GradientDescentOptimizer(0.1), True, 2)
    assert (accumulated[0] == 1).all()
    assert (accumulated[1] == accumulated[2]).all()
    assert (accumulated[1] != accumulated[0]).any()


def test_monitored_session_with_the_hook() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=tf.ones([3]) * (R + 1))
        step = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(0.01))
        train = optimizer.minimize(tf.reduce_sum(w**2), global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=3)]
        config = v1.ConfigProto()
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        with v1.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
            while not session.should_stop():
                _, value = session.run([train, w])
    assert all((value == other).all() for other in hvd.allgather_object(value))
    assert value[0] < 1


def test_broadcast_of_global_variables_needs_a_graph() -> None:
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


LOAD = """
import sys
for name in ("allranks", "matplotlib", "sklearn"):
    sys.modules[name] = None  # whoever imports it fails; Keras does without the last two
import keras, numpy as np
for saved in sys.argv[1:]:
    model = keras.models.load_model(saved)
    np.save(saved + ".npy", model.predict(np.ones((2, 5), "float32"), verbose=0))
    assert type(model.optimizer) is keras.optimizers.Adam, type(model.optimizer)
    assert model.optimizer.iterations == 1
    if saved.endswith(".keras"):  # Keras 3.15 trains no model on that it has read from HDF5
        model.fit(np.ones((4, 5)), np.ones((4, 1)), verbose=0)
        assert model.optimizer.iterations == 2
"""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_model_loads_where_allranks_is_not(tmp_path: Path) -> None:
    if R > 0:
        return  # as in a script, one rank saves
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(Adam(0.01)), keras.losses.MeanSquaredError())
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign_add(1)
    saved = [str(tmp_path / "model.keras"), str(tmp_path / "model.h5")]
    for path in saved:
        model.save(path)
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, *saved],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    expected = model.predict(np.ones((2, 5), "float32"), verbose=0)
    for path in saved:
        np.testing.assert_allclose(np.load(f"{path}.npy"), expected, rtol=1e-5)
