"""Every function of Horovod 0.28, as documented: eager, in tf.function, in a session.

docs/horovod.md lists the names and their modes; a name without a case fails.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.horovod  # noqa: E402, F401  from here on `horovod` is found
from tests.horovod.names import EAGER, FUNCTION, MODULES, SESSION  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
v1 = tf.compat.v1
Case = Callable[["Mode"], None]
CASES: dict[tuple[str, str], Case] = {}
TENSORS, KERAS = "horovod.tensorflow", "horovod.tensorflow.keras"


class Mode:
    """One of three ways to run a function that returns tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, make: Callable[[], Any]) -> Any:
        """Returns the numbers of the result."""
        if self.name == EAGER:
            return numbers(make())
        if self.name == FUNCTION:
            return numbers(tf.function(make)())
        with tf.Graph().as_default(), v1.Session() as session:
            made = tf.nest.map_structure(tf.convert_to_tensor, make())
            session.run(v1.global_variables_initializer())
            return session.run(made)

    def gradient(self, function: Callable[[Any], Any], value: Any, weight: Any) -> Any:
        """Returns the gradient of the weighted sum of a function's result."""

        def make() -> Any:
            x = tf.constant(value)
            if self.name == SESSION:
                return tf.gradients(tf.reduce_sum(function(x) * weight), x)[0]
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) * weight)
            return tape.gradient(loss, x)

        return self(make)

    @property
    def eagerly(self) -> bool:
        """Returns whether Keras runs its steps eagerly."""
        return self.name == EAGER


def numbers(made: Any) -> Any:
    return tf.nest.map_structure(lambda t: t.numpy() if hasattr(t, "numpy") else t, made)


def case(module: str, names: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        for name in names.split():
            CASES[module, name] = function
        return function

    return add


def everything() -> Iterator[tuple[str, str, str]]:
    for module, rows in MODULES.items():
        for row in rows:
            for name in row.names:
                yield from ((module, name, mode) for mode in row.tried)


done: set[tuple[Case, str]] = set()


@pytest.mark.parametrize(("module", "name", "mode"), [*everything()])
def test_every_name_does_what_horovod_says(module: str, name: str, mode: str) -> None:
    once(CASES[module, name], Mode(mode))


def once(tried: Case, mode: Mode) -> None:
    """Runs a case, which may have several names, once in each mode."""
    if (tried, mode.name) not in done:
        done.add((tried, mode.name))
        tried(mode)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_the_names_that_the_table_lists_and_no_others(module: str) -> None:
    found = importlib.import_module(module)
    assert not found.__name__.startswith("horovod"), "a second copy of a module of allranks"
    here = {name for row in MODULES[module] for name in row.names if row.tried}
    absent = {name for row in MODULES[module] for name in row.names if not row.tried}
    assert all(hasattr(found, name) for name in here)
    assert not any(hasattr(found, name) for name in absent)
    if module in (TENSORS, KERAS + ".callbacks"):
        assert {name for name in found.__all__ if not name.startswith("_")} <= here


def test_keras_has_both_of_its_names() -> None:
    assert importlib.import_module("horovod.keras") is sys.modules["horovod.tensorflow.keras"]


import horovod.tensorflow as hvd  # noqa: E402
import horovod.tensorflow.keras as hvd_keras  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
HALF = list(range((N - 1) % 2, N, 2))  # with two ranks the second one, the first of the set
MINE = np.arange(6, dtype=np.float32).reshape(3, 2) + R
EVERY = np.stack([MINE - R + rank for rank in range(N)])


def close(found: Any, expected: Any, **options: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, **options)


@case(TENSORS, "init is_initialized rank size local_rank local_size cross_rank cross_size")
@case(TENSORS, "is_homogeneous shutdown")
def places(mode: Mode) -> None:
    def ask() -> Any:
        hvd.init()
        return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]

    assert [int(n) for n in mode(ask)] == [R, N, R, N, 0]
    assert (hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (1, True, True)
    hvd.shutdown()  # each scope of the suite is a cell
    assert hvd.is_initialized()


@case(TENSORS, "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built")
@case(TENSORS, "ddl_built ccl_built sycl_built cuda_built rocm_built gpu_available")
def built(mode: Mode) -> None:
    def ask() -> Any:
        return [hvd.mpi_enabled(), hvd.mpi_built(), hvd.gloo_enabled(), hvd.gloo_built()]

    assert [bool(one) for one in mode(ask)] == [True, True, False, False]
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert not hvd.sycl_built()
    assert isinstance(hvd.nccl_built(), int)
    assert hvd.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
    for told in (hvd.mpi_threads_supported(), hvd.cuda_built(), hvd.rocm_built()):
        assert told in (True, False)


@case(TENSORS, "rank_op local_rank_op size_op local_size_op process_set_included_op")
def asked_when_it_runs(mode: Mode) -> None:
    def ask() -> Any:
        own = [hvd.rank_op(), hvd.local_rank_op(), hvd.size_op(), hvd.local_size_op()]
        return [*own, hvd.process_set_included_op(0)]

    assert mode(ask) == [R, R, N, N, 1]


@case(TENSORS, "start_timeline stop_timeline")
def timeline(mode: Mode) -> None:
    path = Path(hvd.broadcast_object(_folder())) / "timeline.json"
    hvd.start_timeline(str(path))
    hvd.allreduce(tf.ones(2), name="seen")
    hvd.stop_timeline()
    if R == 0:
        assert "seen" in json.dumps(json.loads(path.read_text()))


def _folder() -> str:
    import tempfile

    return tempfile.mkdtemp() if R == 0 else ""


@case(TENSORS, "Average Sum Adasum Min Max Product")
def operations(mode: Mode) -> None:
    ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [int(op) for op in ops] == list(range(6))
    expected = [np.mean, np.sum, None, np.min, np.max, np.prod]
    for op, function in zip(ops, expected, strict=True):
        if function is not None:
            close(mode(lambda op=op: hvd.allreduce(tf.constant(MINE), op=op)), function(EVERY, 0))
    # Adasum adds orthogonal vectors and averages equal ones; it needs 2, 4, 8, … ranks.
    with half() as two:
        if two.included():
            options = {"op": hvd.Adasum, "process_set": two}
            close(mode(lambda: hvd.allreduce(tf.one_hot(two.rank(), 2), **options)), np.ones(2))
            close(mode(lambda: hvd.allreduce(tf.ones(2), **options)), np.ones(2))


@case(TENSORS, "Compression")
def compression(mode: Mode) -> None:
    module = importlib.import_module("horovod.tensorflow.compression")
    assert module.Compression is hvd.Compression
    assert issubclass(module.NoneCompressor, module.Compressor)

    def pack() -> Any:
        small, context = hvd.Compression.fp16.compress(tf.constant(MINE))
        assert small.dtype == tf.float16
        plain, nothing = hvd.Compression.none.compress(tf.constant(MINE))
        return [
            hvd.Compression.fp16.decompress(small, context),
            hvd.Compression.none.decompress(plain, nothing),
            hvd.Compression.fp16.compress(tf.constant([R]))[0],
            hvd.allreduce(tf.constant(MINE), op=hvd.Sum, compression=hvd.Compression.fp16),
        ]

    fp16, none, whole, reduced = mode(pack)
    assert fp16.dtype == np.float32
    assert whole.dtype == np.int32
    close(fp16, MINE)
    close(none, MINE)
    close(reduced, EVERY.sum(0))


@case(TENSORS, "allreduce")
def allreduce(mode: Mode) -> None:
    close(mode(lambda: hvd.allreduce(tf.constant(MINE))), EVERY.mean(0))
    scaled = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0, "name": "x"}
    close(mode(lambda: hvd.allreduce(tf.constant(MINE), **scaled)), 2 * EVERY.sum(0))
    with pytest.warns(DeprecationWarning, match="average="):
        close(mode(lambda: hvd.allreduce(tf.constant(MINE), average=False)), EVERY.sum(0))
    for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64):
        found = mode(lambda dtype=dtype: hvd.allreduce(tf.ones(2, dtype), op=hvd.Sum))
        assert (found == N).all()
        assert found.dtype == dtype.as_numpy_dtype

    def slices() -> Any:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([R]), tf.constant([N, 2]))
        return tf.convert_to_tensor(hvd.allreduce(rows))

    close(mode(slices), np.full((N, 2), 1 / N))
    for op, factor in ((hvd.Average, (N + 1) / 2), (hvd.Sum, N * (N + 1) / 2)):
        found = mode.gradient(lambda x, op=op: hvd.allreduce(x, op=op), MINE, R + 1.0)
        close(found, np.full_like(MINE, factor))


@case(TENSORS, "grouped_allreduce")
def grouped_allreduce(mode: Mode) -> None:
    def reduce() -> Any:
        return hvd.grouped_allreduce([tf.constant(MINE), tf.fill([4], float(R))], op=hvd.Sum)

    a, b = mode(reduce)
    close(a, EVERY.sum(0))
    close(b, [N * (N - 1) / 2] * 4)
    assert hvd.grouped_allreduce([]) == []
    twice = mode.gradient(lambda x: sum(hvd.grouped_allreduce([x, x])), MINE, R + 1.0)
    close(twice, np.full_like(MINE, N + 1))


@case(TENSORS, "allgather grouped_allgather")
def allgather(mode: Mode) -> None:
    rows = np.concatenate([np.full([r + 1, 2], r) for r in range(N)])
    close(mode(lambda: hvd.allgather(tf.fill([R + 1, 2], R))), rows)
    one, other = mode(lambda: hvd.grouped_allgather([tf.fill([R + 1, 2], R), tf.fill([1], R)]))
    close(one, rows)
    close(other, range(N))
    assert mode(lambda: hvd.allgather(tf.constant([True])))[0]
    mine = np.full([R + 1, 2], 1.0, np.float32)
    close(mode.gradient(hvd.allgather, mine, R + 1.0), np.full_like(mine, (N + 1) / 2))


@case(TENSORS, "broadcast")
def broadcast(mode: Mode) -> None:
    root = N - 1
    close(mode(lambda: hvd.broadcast(tf.constant(MINE), root)), EVERY[root])
    found = mode.gradient(lambda x: hvd.broadcast(x, root), MINE, R + 1.0)
    close(found, np.full_like(MINE, (N + 1) / 2 if root == R else 0))


@case(TENSORS, "alltoall")
def alltoall(mode: Mode) -> None:
    close(mode(lambda: hvd.alltoall(tf.range(N) + N * R)), np.arange(N) * N + R)
    splits = np.arange(1, N + 1, dtype=np.int32)
    pieces, received = mode(
        lambda: hvd.alltoall(tf.fill([int(splits.sum())], R), splits=tf.constant(splits))
    )
    close(pieces, np.repeat(np.arange(N), R + 1))
    close(received, [R + 1] * N)
    mine = np.ones(2 * N, np.float32)
    close(mode.gradient(hvd.alltoall, mine, R + 1.0), np.repeat(np.arange(1, N + 1), 2))


@case(TENSORS, "reducescatter grouped_reducescatter")
def reducescatter(mode: Mode) -> None:
    rows = N + 1  # the first rank has one more
    x = np.arange(rows, dtype=np.float32) * (R + 1)
    whole = np.arange(rows) * N * (N + 1) / 2
    mine = whole[:2] if R == 0 else whole[R + 1 : R + 2]
    close(mode(lambda: hvd.reducescatter(tf.constant(x), op=hvd.Sum)), mine)
    close(mode(lambda: hvd.reducescatter(tf.constant(x))), mine / N)
    both = mode(lambda: hvd.grouped_reducescatter([tf.constant(x), tf.constant(x)], op=hvd.Sum))
    for one in both:
        close(one, mine)
    found = mode.gradient(lambda y: hvd.reducescatter(y, op=hvd.Sum), x, R + 1.0)
    owners = np.array([1.0, 1.0, *range(2, N + 1)])
    close(found, owners * N)


@case(TENSORS, "join")
def join(mode: Mode) -> None:
    assert 0 <= int(mode(hvd.join)) < N
    if mode.name != SESSION:
        steps = [float(mode(lambda: hvd.allreduce(tf.ones([]), op=hvd.Sum))) for _ in range(1 + R)]
        assert steps == [float(N - step) for step in range(1 + R)]
        assert int(mode(hvd.join)) == N - 1


@case(TENSORS, "broadcast_ broadcast_variables")
def broadcast_variables(mode: Mode) -> None:
    root = N - 1
    if mode.name == SESSION:

        def make() -> Any:
            a = v1.get_variable("a", initializer=tf.constant(MINE))
            b = v1.get_variable("b", initializer=tf.constant(MINE), use_resource=True)
            return hvd.broadcast_([a, b], root)

        found = mode(make)
    else:
        other = tf.Variable(tf.cast(MINE, tf.int64))
        variables = [tf.Variable(MINE), other, tf.Variable(MINE), keras.Variable(MINE)]

        def assign() -> Any:
            hvd.broadcast_variables(variables[:3], root_rank=root)
            hvd.broadcast_(variables[3:], root_rank=root)
            return tf.constant(0)

        mode(assign)
        found = numbers(variables)
    for one in found:
        close(one, EVERY[root])


@case(TENSORS, "broadcast_object allgather_object broadcast_object_fn")
def objects(mode: Mode) -> None:
    def exchange(session: Any = None) -> None:
        mine = {"rank": R, "list": [1] * R}
        assert hvd.broadcast_object(mine, N - 1, session=session)["rank"] == N - 1
        assert hvd.broadcast_object_fn(0, session=session)(mine)["rank"] == 0
        assert [one["rank"] for one in hvd.allgather_object(mine, session=session)] == [*range(N)]

    if mode.name == SESSION:
        with tf.Graph().as_default(), v1.Session() as session:
            exchange(session)
    else:
        exchange()


@case(TENSORS, "broadcast_global_variables BroadcastGlobalVariablesHook")
def broadcast_global_variables(mode: Mode) -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=tf.constant(MINE))
        same = hvd.broadcast_global_variables(N - 1)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(same)
            close(session.run(w), EVERY[N - 1])
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            close(session.run(w), EVERY[0])


@case(TENSORS, "ProcessSet global_process_set add_process_set remove_process_set")
def process_sets(mode: Mode) -> None:
    assert (hvd.global_process_set.process_set_id, hvd.global_process_set.size()) == (0, N)
    if N > 1:
        half = hvd.add_process_set(hvd.ProcessSet(HALF))
        assert (half.ranks, half.size(), half.included()) == (HALF, len(HALF), R in HALF)
        assert hvd.add_process_set(HALF).process_set_id == half.process_set_id
        known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
        assert known == {0: list(range(N)), half.process_set_id: HALF}
        of_set = half.process_set_id
        asked = mode(lambda: [hvd.size_op(of_set), hvd.process_set_included_op(of_set)])
        assert list(asked) == [len(HALF), R in HALF]
        if half.included():
            assert half.rank() == R // 2
            total = mode(lambda: hvd.allreduce(tf.fill([2], R), op=hvd.Sum, process_set=half))
            close(total, [sum(HALF)] * 2)
            rooted = mode(lambda: hvd.broadcast(tf.fill([2], R), HALF[-1], process_set=half))
            close(rooted, [HALF[-1]] * 2)
        assert hvd.remove_process_set(half)
        assert half.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)


@contextmanager
def half() -> Iterator[Any]:
    """Yields a process set of every second rank."""
    made = hvd.add_process_set(HALF)
    yield made
    assert hvd.remove_process_set(made)


@case(TENSORS, "DistributedGradientTape PartialDistributedGradientTape")
def tapes(mode: Mode) -> None:
    def gradients(options: dict[str, Any], local: bool = False) -> Any:
        def make() -> Any:
            x, y = tf.constant([1.0, 2.0]), tf.constant([3.0])
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                loss = tf.reduce_sum(x) * (R + 1.0) + tf.reduce_sum(y) * (R + 1.0)
            tape = hvd.DistributedGradientTape(tape, **options)
            if local:
                tape.register_local_source(y)
            return tape.gradient(loss, [x, y])

        return mode(make)

    mean = (N + 1) / 2
    for factor, options in (
        (mean, {}),
        (mean, {"gradient_predivide_factor": 2.0, "groups": 1}),
        (mean * N, {"op": hvd.Sum, "compression": hvd.Compression.fp16}),
    ):
        a, b = gradients(options)
        close(a, [factor] * 2)
        close(b, [factor])
    a, b = gradients({}, local=True)
    close(a, [mean] * 2)
    close(b, [(R + 1) / N])
    if N > 1:
        with half() as some:
            a, b = gradients({"process_set": some})
            close(a, [np.mean(HALF) + 1 if some.included() else R + 1.0] * 2)
            _, b = gradients({"process_set": some}, local=True)
            close(b, [(R + 1) / (some.size() if some.included() else 1)])
    if mode.name != SESSION:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        layer.build((None, 2))

        def make() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.ones([1, 2]))) * (R + 1.0)
            tape = hvd.PartialDistributedGradientTape(
                tape, local_layers=layer, scale_local_gradients=False
            )
            return tape.gradient(loss, layer.trainable_weights)

        close(mode(make)[0], np.full([2, 1], R + 1.0))


@case(TENSORS, "DistributedOptimizer")
def optimizers(mode: Mode) -> None:
    if mode.name != SESSION:
        once(keras_optimizers, mode)
        return
    options = [(1, hvd.global_process_set), (2, hvd.global_process_set)]
    with half() if N > 1 else nullcontext(hvd.global_process_set) as some:
        for passes, ranks in [*options, (1, some), (2, some)]:
            with tf.Graph().as_default():
                w = v1.get_variable("w", initializer=tf.ones([2]))
                made = hvd.DistributedOptimizer(
                    v1.train.GradientDescentOptimizer(1.0),
                    backward_passes_per_step=passes,
                    process_set=ranks,
                    device_dense="/cpu:0",
                    device_sparse="/cpu:0",
                )
                train = made.minimize(tf.reduce_sum(w) * (R + 1.0))
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    for _ in range(passes):
                        session.run(train)
                    step = np.mean(ranks.ranks) + 1 if ranks.included() else R + 1
                    close(session.run(w), [1 - passes * step] * 2)


def model(optimizer: Any = None, eagerly: bool = False) -> Any:
    keras.utils.set_random_seed(R)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    if optimizer is not None:
        made.compile(optimizer, "mse", run_eagerly=eagerly)
    return made


X = np.random.default_rng(1).normal(size=(N, 8, 3)).astype("float32")
Y = X.sum(-1, keepdims=True)


def alike(arrays: Any) -> bool:
    every = hvd.allgather_object([np.asarray(a).tobytes() for a in arrays])
    return all(one == every[0] for one in every)


def trained(mode: Mode, optimizer: Any, *callbacks: Any, **options: Any) -> Any:
    made = model(optimizer, mode.eagerly)
    begin = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    made.history = made.fit(X[R], Y[R], callbacks=[begin, *callbacks], **options)
    return made


@case(KERAS, "DistributedOptimizer PartialDistributedOptimizer")
@case(TENSORS, "PartialDistributedOptimizer")
def keras_optimizers(mode: Mode) -> None:
    options = {"backward_passes_per_step": 2, "groups": 1} if mode.eagerly else {}
    made = hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)
    assert type(made).__name__ == "Adam"
    assert alike(trained(mode, made).weights)
    with pytest.raises(ValueError, match="op=Average or op=Sum"):
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Min)
    own = model()
    made = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=own.layers[0])
    own.compile(made, "mse", run_eagerly=mode.eagerly)
    hvd.broadcast_variables(own.weights, 0)
    own.fit(X[R], Y[R], batch_size=4, verbose=0)
    assert alike(own.layers[1].weights)
    assert alike(own.layers[0].weights) == (N == 1)


@case(TENSORS, "SyncBatchNormalization")
def sync_batch_normalization(mode: Mode) -> None:
    layer = hvd.SyncBatchNormalization(epsilon=0.0)
    layer.build((None, 3))
    found = mode(lambda: layer(tf.constant(X[R]), training=True))
    whole = X.reshape(-1, 3).astype("float64")
    np.testing.assert_allclose(found, (X[R] - whole.mean(0)) / whole.std(0), atol=1e-4)


@case(KERAS, "callbacks")
@case(KERAS + ".callbacks", "BroadcastGlobalVariablesCallback MetricAverageCallback")
@case(KERAS + ".callbacks", "LearningRateScheduleCallback LearningRateWarmupCallback")
@case(KERAS + ".callbacks", "BestModelCheckpoint LiveCurvesCallback")
def callbacks(mode: Mode) -> None:
    given = hvd_keras.callbacks
    best = Path(hvd.broadcast_object(_folder())) / "best.keras"
    made = trained(
        mode,
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1 * N)),
        given.MetricAverageCallback(),
        given.LearningRateWarmupCallback(0.1 * N, warmup_epochs=2),
        given.LearningRateScheduleCallback(0.1 * N, 0.5, start_epoch=2),
        given.BestModelCheckpoint(str(best), monitor="loss"),
        given.LiveCurvesCallback(),
        epochs=4,
    )
    history = made.history.history
    assert alike([history["loss"]])
    close(history["lr"][1:], [0.1 * N, 0.1 * N, 0.05 * N])
    assert best.exists()


@case(KERAS, "load_model")
def load_model(mode: Mode) -> None:
    path = Path(hvd.broadcast_object(_folder())) / "model.keras"
    made = trained(mode, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    if R == 0:
        made.save(path)
    hvd.broadcast_object(None)
    loaded = hvd_keras.load_model(path)
    assert int(loaded.optimizer.iterations) == int(made.optimizer.iterations)
    loaded.run_eagerly = mode.eagerly
    loaded.fit(X[R], Y[R], batch_size=4, verbose=0)
    assert alike(loaded.weights)


@case(KERAS, "allreduce allgather broadcast reducescatter")
def values(mode: Mode) -> None:
    mean = (N - 1) / 2
    for make, expected in (
        (lambda: hvd_keras.allreduce(float(R)), mean),
        (lambda: hvd_keras.allreduce([float(R)], op=hvd.Sum), [mean * N]),
        (lambda: hvd_keras.allgather([float(R)]), range(N)),
        (lambda: hvd_keras.broadcast(np.float32(R), N - 1), N - 1),
        (lambda: hvd_keras.reducescatter(np.full(N, R, "f4"), op=hvd.Sum), [mean * N]),
    ):
        close(mode(make), expected)
        assert tf.is_tensor(make())


@case(KERAS, "broadcast_global_variables")
def keras_broadcast_global_variables(mode: Mode) -> None:
    broadcast_global_variables(mode)
    assert hvd_keras.broadcast_global_variables is hvd.broadcast_global_variables


@case(KERAS, "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size")
@case(
    KERAS, "start_timeline stop_timeline mpi_threads_supported mpi_enabled mpi_built gloo_enabled"
)
@case(
    KERAS, "gloo_built nccl_built ddl_built ccl_built sycl_built cuda_built rocm_built ProcessSet"
)
@case(KERAS, "global_process_set add_process_set remove_process_set Average Sum Adasum Compression")
def the_same_names(mode: Mode) -> None:
    names = {name for (module, name), tried in CASES.items() if tried is the_same_names}
    assert all(getattr(hvd_keras, name) is getattr(hvd, name) for name in names if name in dir(hvd))
    assert names <= set(dir(hvd))


@case(TENSORS, "elastic")
@case(TENSORS + ".elastic", "run TensorFlowState TensorFlowKerasState")
@case("horovod.common.elastic", "State ObjectState run_fn")
def elastic(mode: Mode) -> None:
    from horovod.common.elastic import ObjectState, State, run_fn
    from horovod.common.exceptions import HorovodInternalError

    w = tf.Variable(float(R))
    state, resets = hvd.elastic.TensorFlowState(variables=[w], step=R), []
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    assert isinstance(state, State)
    assert issubclass(hvd.elastic.TensorFlowKerasState, ObjectState)

    @hvd.elastic.run
    def train(state: Any) -> tuple[float, int]:
        # All ranks begin with the first rank's values, and go back to the commit.
        if state.step == 0:
            mode(lambda: w.assign(7.0))
            state.step = 1
            state.commit()
            state.step = 2
            mode(lambda: w.assign(9.0))
            raise HorovodInternalError("once")
        return float(w), state.step

    assert train(state) == (7.0, 1)
    assert resets == [1]
    calls: list[int] = []

    def once(state: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            raise HorovodInternalError("once")
        return int(state.n)

    assert run_fn(once, lambda: calls.append(2))(ObjectState(n=R)) == 0
    assert calls == [1, 2, 1]


@case(KERAS, "elastic")
@case(KERAS + ".elastic", "run KerasState CommitStateCallback UpdateEpochStateCallback")
@case(KERAS + ".elastic", "UpdateBatchStateCallback")
def keras_elastic(mode: Mode) -> None:
    given = hvd_keras.elastic
    made = model(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), mode.eagerly)
    state = given.KerasState(made, batch=0, epoch=0)

    @given.run
    def train(state: Any) -> None:
        update = [given.UpdateBatchStateCallback(state), given.UpdateEpochStateCallback(state)]
        callbacks = [*update, given.CommitStateCallback(state, batches_per_commit=2)]
        options = {"batch_size": 4, "epochs": 2 - state.epoch, "verbose": 0}
        made.fit(X[R], Y[R], callbacks=callbacks, **options)

    train(state)
    assert (state.batch, state.epoch) == (0, 2)
    assert state.commits == 2 * 1 + 2
    assert alike(made.weights)


@case(TENSORS, "check_num_rank_power_of_2 handle_average_backwards_compatibility vars_to_refs")
@case(TENSORS, "refs_to_vars util")
def inside(mode: Mode) -> None:
    """Names that other packages import from Horovod."""
    from horovod.tensorflow import util
    from horovod.tensorflow.mpi_ops import _basics

    assert (_basics.rank(), _basics.size(), _basics.mpi_built()) == (R, N, True)
    assert [n for n in range(1, 9) if hvd.check_num_rank_power_of_2(n)] == [1, 2, 4, 8]
    variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
    again = hvd.refs_to_vars(hvd.vars_to_refs(variables))
    assert again[0] is variables[0]
    assert again[1][0] is variables[1][0]
    assert hvd.handle_average_backwards_compatibility(None, None) == hvd.Average
    assert hvd.util._executing_eagerly()
    assert not tf.function(util._executing_eagerly)()
    assert float(util._make_subgraph(lambda: variables[0] + 1)()) == 2


@case("horovod", "run __version__")
def around(mode: Mode) -> None:
    import horovod

    assert horovod.run(lambda add: hvd.rank() + add, args=(1,), np=N) == [r + 1 for r in range(N)]
    assert re.fullmatch(r"0\.28\.\d", horovod.__version__)


@case("horovod.common.exceptions", "HorovodInternalError HostsUpdatedInterrupt")
@case("horovod.common.exceptions", "HorovodVersionMismatchError get_version_mismatch_message")
def exceptions(mode: Mode) -> None:
    from horovod.common import exceptions as given

    assert issubclass(given.HorovodInternalError, RuntimeError)
    assert given.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    error = given.HorovodVersionMismatchError("tensorflow", "2.1", "2.2")
    assert isinstance(error, ImportError)
    assert str(error) == given.get_version_mismatch_message("tensorflow", "2.1", "2.2")


@case("horovod.common.util", "extension_available gpu_available mpi_built gloo_built nccl_built")
@case("horovod.common.util", "ddl_built ccl_built env is_iterable split_list num_rank_is_power_2")
@case("horovod.common.util", "is_version_greater_equal_than check_extension get_ext_suffix")
def utilities(mode: Mode) -> None:
    import os

    from horovod.common import util as given

    assert given.extension_available("tensorflow")
    assert given.gpu_available("tensorflow") == hvd.gpu_available("tensorflow")
    assert (given.mpi_built(), given.gloo_built(), given.ddl_built()) == (True, False, False)
    assert (given.ccl_built(), given.nccl_built()) == (False, bool(hvd.nccl_built()))
    os.environ["ALLRANKS_A"] = "old"
    with given.env(ALLRANKS_A=None, ALLRANKS_B="new"):
        assert ("ALLRANKS_A" in os.environ, os.environ["ALLRANKS_B"]) == (False, "new")
    assert ("ALLRANKS_B" in os.environ, os.environ.pop("ALLRANKS_A")) == (False, "old")
    assert given.is_iterable([]) and not given.is_iterable(1)  # noqa: PT018
    assert given.split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert given.split_list([1], 2) == [[1], []]
    assert given.num_rank_is_power_2(4)
    assert given.is_version_greater_equal_than("2.21.0-rc1", "2.16.0")
    assert not given.is_version_greater_equal_than("2.9", "2.16.0")
    given.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    assert given.get_ext_suffix().endswith(".so")
