"""Training on n ranks equals training in one process on the joined batch, at every step."""

from __future__ import annotations

import functools
import io
import pickle
import random
import re
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.tensorflow as hvd  # noqa: E402
import allranks.tensorflow.keras as hvd_keras  # noqa: E402
from allranks.errors import (  # noqa: E402
    CollectiveMismatch,
    MissingDependency,
    RankLeft,
    UsageError,
)
from tests.tensorflow.ranks.conftest import in_a_cell, next_cell_works  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
STEPS, BATCH = 4, 6
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
LossScale = keras.optimizers.LossScaleOptimizer
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
    """Trains both models, and compares all weights after each step."""
    mine, reference = model(), model()
    mine.compile(distributed, "mse", **compiled)
    # Eager, because the reference gives the same result and a graph takes longer to build.
    reference.compile(plain, "mse", run_eagerly=True)
    for step in range(STEPS):
        mine.train_on_batch(inputs[step, R], Y[step, R])
        reference.train_on_batch(joined(inputs[step]), joined(Y[step]))
        close(mine, reference, tolerance)
    same_everywhere(mine)
    assert abs(mine.get_weights()[0] - model().get_weights()[0]).max() > 1e-4  # it has learned


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: SGD(0.5, global_clipnorm=0.05),
    "EMA": lambda: Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "loss scale": lambda: SGD(0.1, loss_scale_factor=64.0),
    "accumulation": lambda: Adam(0.01, gradient_accumulation_steps=2),
    "accumulation, clipped": lambda: SGD(0.5, gradient_accumulation_steps=2, global_clipnorm=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_training_is_that_of_the_joined_batch(name: str) -> None:
    make = OPTIMIZERS[name]
    follows(hvd.DistributedOptimizer(make()), make())


@pytest.mark.parametrize("name", ["global_clipnorm", "accumulation"])
def test_eager_training_is_that_of_the_joined_batch(name: str) -> None:
    make = OPTIMIZERS[name]
    follows(hvd.DistributedOptimizer(make()), make(), run_eagerly=True)


def test_sparse_embeddings() -> None:
    follows(hvd.DistributedOptimizer(Adam(0.01)), Adam(0.01), word_model, WORDS)
    dense = hvd.DistributedOptimizer(SGD(0.5), sparse_as_dense=True)
    follows(dense, SGD(0.5), word_model, WORDS)


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


WRONG_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("DistributedOptimizer needs op=Average or op=Sum: found Adasum", {"op": hvd.Adasum}),
    (
        "gradient_predivide_factor needs op=Average: found op=Sum",
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
    ),
    ("op=Average or op=Sum: found 'sum'", {"op": "sum"}),
    ("1 or more: found 1.5", {"backward_passes_per_step": 1.5}),
    ("Compression.fp16, found 'fp16'", {"compression": "fp16"}),
    ("a process set, or none for all ranks: found [0]", {"process_set": [0]}),
]
MISTAKES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("Pass for instance keras.optimizers.Adam()", hvd.DistributedOptimizer, ("adam",)),
    ("a tf.GradientTape: found int", hvd.DistributedGradientTape, (3,)),
    ("a list of variables: found Variable", hvd.broadcast_variables, (keras.Variable(1.0), 0)),
    ("a list of variables: found Sequential", hvd.broadcast_variables, (dense_model(), 0)),
    ("a list of variables: found ndarray in it", hvd.broadcast_variables, ([np.ones(2)], 0)),
    ("its state: found 5", hvd.elastic.run(lambda state: state), (5,)),
    ("a model of Keras: found NoneType", hvd.elastic.TensorFlowKerasState, (None,)),
    ("a list of process sets: found 'all'", hvd.init, (None, "all")),
]


def test_what_is_passed_by_mistake_is_named() -> None:
    for said, options in WRONG_OPTIONS:
        with pytest.raises(ValueError, match=re.escape(said)):
            hvd.DistributedOptimizer(SGD(), **options)
    for said, call, arguments in MISTAKES:
        with pytest.raises(ValueError, match=re.escape(said)):
            call(*arguments)
    with pytest.raises(ValueError, match="contradict each other"):
        hvd.DistributedOptimizer(SGD(gradient_accumulation_steps=3), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="groups needs a number that is not negative: found -1"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=-1)
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(SGD(0.01)), "mse", jit_compile=True)
    assert not model.jit_compile


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


@pytest.mark.parametrize("compiled", [True, False])
def test_a_tapes_gradients_are_those_of_the_joined_batch(compiled: bool) -> None:
    model = word_model()
    variables = model.trainable_variables

    def gradients(x: Any, y: Any, shared: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape) if shared else tape
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    run = tf.function(gradients) if compiled else gradients
    for step in range(2):
        mine = run(tf.constant(WORDS[step, R]), tf.constant(Y[step, R]), True)
        whole = gradients(joined(WORDS[step]), joined(Y[step]), False)
        for a, b in zip(mine, whole, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_a_step_of_a_tape_whose_reduction_fails_is_not_counted() -> None:
    model, optimizer = dense_model(), Adam(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def train() -> None:
        step(tf.constant(X[0, R]), tf.constant(Y[0, R]))
        if R == N - 1:
            raise ValueError("no more data")
        step(tf.constant(X[1, R]), tf.constant(Y[1, R]))

    error = in_a_cell(train)
    assert isinstance(error, ValueError if R == N - 1 else RankLeft), error
    next_cell_works()
    assert int(optimizer.iterations) == 1


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


def test_none_gradients_are_left_out() -> None:
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as recorded:
        loss = a * float(R)
    made = hvd.DistributedGradientTape(recorded).gradient(loss, {"a": a, "b": b})
    assert float(made["a"]) == (N - 1) / 2
    assert made["b"] is None


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_different_variables_are_a_mismatch(passes: int) -> None:
    variables = [keras.Variable([0.0, 0.0], name=name) for name in ("first", "second")]
    optimizer = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=passes)
    optimizer.build(variables)
    step = lambda: optimizer.apply_gradients([(tf.ones(2), variables[R % 2])])  # noqa: E731
    error = in_a_cell(lambda: [step() for _ in range(passes)])
    assert isinstance(error, CollectiveMismatch), error
    assert "gradient 0" in str(error)
    next_cell_works()
    assert [one.numpy().tolist() for one in variables] == [[0.0, 0.0]] * 2


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
    make = OPTIMIZERS["AdamW"]
    scaled = keras.optimizers.LossScaleOptimizer(make(), initial_scale=16.0)
    follows(hvd.DistributedOptimizer(scaled), make())


def private_names() -> list[tuple[Any, str, Callable[[], Any]]]:
    """Returns the owners of private names, and the features that need them."""
    from keras.src.utils import file_utils
    from tensorflow.python.autograph.core import config
    from tensorflow.python.eager import execute

    from allranks.tensorflow import compat, graph_errors, patches

    distribute = functools.partial(hvd.DistributedOptimizer, SGD())
    checkpoint = functools.partial(hvd_keras.callbacks.BestModelCheckpoint, "best.keras")
    trainer = next(kind for kind in keras.Model.__mro__ if "jit_compile" in vars(kind))
    base = next(kind for kind in SGD.__mro__ if "_clip_gradients" in vars(kind))
    return [
        (keras.layers.BatchNormalization, "_moments", hvd.SyncBatchNormalization),
        (base, "_clip_gradients", distribute),
        (LossScale, "check_finite", distribute),
        (trainer, "jit_compile", distribute),
        (keras.callbacks.ModelCheckpoint, "_save_model", checkpoint),
        (file_utils, "urlretrieve", patches.install),
        (execute, "quick_execute", graph_errors.install),
        (config, "CONVERSION_RULES", graph_errors.skip_autograph),
        (base, "_get_current_learning_rate", compat._patch_optimizers),
    ]


def test_what_another_version_lacks_is_named() -> None:
    for owner, name, use in private_names():
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(owner, name)
            with pytest.raises(MissingDependency, match=rf"needs [\w.]+\.{name}, and") as raised:
                use()
        assert re.search(r'pip install "(keras|tensorflow)<[\d.]+"', str(raised.value))


class SlowHandler(BaseHTTPRequestHandler):
    """Sends half of the file; and the rest when all ranks have asked, or for /short never."""

    def do_GET(self) -> None:
        data = ARCHIVE if "tar" in self.path else DATA
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        self.wfile.write(data[:half])
        if "short" not in self.path:
            ALL_ASK.wait(30)
            self.wfile.write(data[half:])

    def log_message(self, *_: object) -> None:
        pass


def archive(data: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("folder/data.bin")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


ALL_ASK = threading.Barrier(N)
DATA = random.Random(1).randbytes(1 << 20)
ARCHIVE = archive(DATA)


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a slow server of the first rank."""
    url, http = "", None
    if R == 0:
        http = ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
    yield hvd.broadcast_object(url)
    if http is not None:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize("name", ["data.bin", "data.tar"])
def test_ranks_that_download_a_file_at_the_same_time_get_all_of_it(server: str, name: str) -> None:
    home = Path(hvd.broadcast_object(tempfile.mkdtemp() if R == 0 else None))
    extract = name == "data.tar"
    path = Path(keras.utils.get_file(name, f"{server}/{name}", cache_dir=home, extract=extract))
    assert (path / "folder" / "data.bin" if extract else path).read_bytes() == DATA
    hvd.broadcast_object(None)
    assert list(home.rglob("*.part")) == []


def test_a_download_that_fails_leaves_nothing(server: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="retrieval incomplete"):
        keras.utils.get_file("data.bin", f"{server}/short", cache_dir=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    hvd.broadcast_object(None)
