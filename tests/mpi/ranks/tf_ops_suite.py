"""Collectives on tensors are numpy's sums, now and in graphs, and so are their gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import allranks.tensorflow as hvd  # noqa: E402
from allranks import collectives  # noqa: E402
from allranks.errors import CollectiveMismatch, UsageError  # noqa: E402
from allranks.tensorflow import places  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
DTYPES = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]


def keep_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go to `allranks.collectives` as they do from a GPU, though there is none."""
    monkeypatch.setattr(places, "_sees_gpu", lambda: True)
    monkeypatch.setattr(places, "kinds", SimpleNamespace(is_on_gpu=lambda tensor: True))


@pytest.fixture(params=["eager", "graph", "graph, tensors kept"])
def run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function of no arguments, as it is or inside a tf.function."""
    if "kept" in request.param:
        keep_tensors(monkeypatch)
    if request.param == "eager":
        return lambda function: function()
    return lambda function: tf.function(function)()


def numbers(rank: int = R, shape: tuple[int, ...] = (5, 2)) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 9, shape)


EVERY = [numbers(rank) for rank in range(N)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_allreduce_sums(run: Any, dtype: Any) -> None:
    x = tf.cast(numbers(), dtype)
    out = run(lambda: hvd.allreduce(x, op=hvd.Sum))
    assert out.dtype == dtype
    assert out.shape == x.shape
    np.testing.assert_array_equal(tf.cast(out, tf.float64).numpy(), sum(EVERY))


@pytest.mark.parametrize("dtype", [tf.int32, tf.float32, tf.float64], ids=lambda d: d.name)
def test_allreduce_averages(run: Any, dtype: Any) -> None:
    out = run(lambda: hvd.allreduce(tf.cast(numbers(), dtype)))
    mean = sum(EVERY) / N
    expected = np.trunc(mean) if dtype.is_integer else mean
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "function"), [(hvd.Min, np.min), (hvd.Max, np.max), (hvd.Product, np.prod)]
)
def test_allreduce_takes_every_op(run: Any, op: Any, function: Any) -> None:
    out = run(lambda: hvd.allreduce(tf.constant(numbers()), op=op))
    np.testing.assert_array_equal(out.numpy(), function(EVERY, axis=0))


def test_bool_is_any(run: Any) -> None:
    out = run(lambda: hvd.allreduce(tf.constant([R == 0, False]), op=hvd.Max))
    assert out.numpy().tolist() == [True, False]


def test_factors_and_compression(run: Any) -> None:
    x = tf.constant(numbers(), tf.float32)
    out = run(
        lambda: hvd.allreduce(
            x,
            op=hvd.Sum,
            prescale_factor=0.5,
            postscale_factor=4.0,
            compression=hvd.Compression.fp16,
        )
    )
    assert out.dtype == tf.float32
    np.testing.assert_allclose(out.numpy(), 2.0 * sum(EVERY))
    wide = tf.constant([1e20, 1e-20], tf.bfloat16)
    out = run(lambda: hvd.allreduce(wide, compression=hvd.Compression.fp16))
    np.testing.assert_array_equal(out.numpy(), wide.numpy())


def test_average_is_still_an_argument() -> None:
    with pytest.warns(DeprecationWarning, match="op=Average"):
        out = hvd.allreduce(tf.ones(2), average=False)
    assert out.numpy().tolist() == [N, N]
    with pytest.raises(ValueError, match="both"):
        hvd.allreduce(tf.ones(2), average=False, op=hvd.Sum)


def test_grouped_allreduce_takes_dtypes_and_slices_together(run: Any) -> None:
    slices = tf.IndexedSlices(tf.ones([2, 3]) * (R + 1), tf.constant([0, R]), tf.constant([N, 3]))

    def reduce() -> Any:
        a, b, c = hvd.grouped_allreduce([tf.ones(3), tf.ones(2, tf.int64), slices], op=hvd.Sum)
        return a, b, tf.convert_to_tensor(c)

    a, b, dense = run(reduce)
    assert a.numpy().tolist() == [N] * 3
    assert b.numpy().tolist() == [N] * 2
    expected = np.zeros((N, 3))
    for rank in range(N):
        expected[0] += rank + 1
        expected[rank] += rank + 1
    np.testing.assert_array_equal(dense.numpy(), expected)


def test_slices_are_averaged_and_nothing_else() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([R]), tf.constant([N, 2]))
    dense = tf.convert_to_tensor(hvd.allreduce(slices))
    np.testing.assert_allclose(dense.numpy(), np.full((N, 2), 1 / N))
    whole = tf.IndexedSlices(tf.constant([[7]]), tf.constant([R]), tf.constant([N, 1]))
    found = hvd.allreduce(whole)
    np.testing.assert_array_equal(found.values.numpy(), np.full((N, 1), 7 / N))
    with pytest.raises(NotImplementedError, match="Max"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="factors"):
        hvd.allreduce(slices, prescale_factor=2.0)


@pytest.mark.parametrize("wrong", [{"op": hvd.Adasum}, {"op": hvd.Sum, "postscale_factor": 2.0}])
def test_a_list_with_slices_is_refused_before_anything_moves(wrong: dict[str, Any]) -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([R]), tf.constant([N, 2]))
    before = len(collectives.records())
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        hvd.grouped_allreduce([tf.ones(3), slices], **wrong)
    assert len(collectives.records()) == before


def test_the_gradient_of_alltoall_goes_back_where_rows_differ(run: Any) -> None:
    """Rank r has r + 1 rows for everybody; what came from rank s is weighed with s + 1."""
    x = tf.ones([N * (R + 1), 2])

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.alltoall(x)) * (R + 1)
        return tape.gradient(loss, x)

    expected = np.repeat(np.arange(1, N + 1), R + 1)
    np.testing.assert_array_equal(run(gradient).numpy(), np.stack([expected, expected], 1))


MISTAKES: dict[str, Callable[[], Any]] = {
    "root": lambda: hvd.broadcast(tf.ones(2), N),
    "splits": lambda: hvd.alltoall(tf.ones([2 * N]), tf.fill([N + 1], 1)),
    "rows": lambda: hvd.alltoall(tf.ones([2 * N + 1])),
    "set": lambda: hvd.allreduce(tf.ones(2), process_set=hvd.ProcessSet([0])),
    "no set": lambda: hvd.allreduce(tf.ones(2), process_set=[0]),
    "op": lambda: hvd.allreduce(tf.ones(2), op="sum"),
    "op of reducescatter": lambda: hvd.reducescatter(tf.ones(N), op=77),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_arguments_that_are_wrong_here_are_tensorflows_error(run: Any, mistake: str) -> None:
    if N == 1 and mistake == "rows":
        return
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        run(MISTAKES[mistake])
    assert isinstance(raised.value, UsageError)
    assert isinstance(raised.value, ValueError)


def test_a_compression_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Compression\.fp16, found 'fp16'"):
        hvd.allreduce(tf.ones(2), compression="fp16")


def test_allgather_of_different_rows(run: Any) -> None:
    out = run(lambda: hvd.allgather(tf.fill([R + 1, 2], R)))
    assert out.numpy()[:, 0].tolist() == [r for r in range(N) for _ in range(r + 1)]
    a, b = run(lambda: hvd.grouped_allgather([tf.fill([R + 1], R), tf.ones([1, 2])]))
    assert a.shape == [N * (N + 1) // 2]
    assert b.shape == [N, 2]


def test_broadcast_is_the_roots(run: Any) -> None:
    out = run(lambda: hvd.broadcast(tf.constant(numbers()), N - 1))
    np.testing.assert_array_equal(out.numpy(), EVERY[N - 1])


def test_reducescatter_gives_each_its_rows(run: Any) -> None:
    rows = 2 * N + 1
    x = tf.range(rows, dtype=tf.float32)
    out = run(lambda: hvd.reducescatter(x, op=hvd.Sum))
    first = R * 2 + min(R, 1)
    expected = np.arange(rows)[first : first + (3 if R == 0 else 2)] * N
    np.testing.assert_array_equal(out.numpy(), expected)


def test_alltoall_with_and_without_splits(run: Any) -> None:
    even = run(lambda: hvd.alltoall(tf.fill([N], R)))
    assert even.numpy().tolist() == list(range(N))
    splits = tf.range(1, N + 1)
    pieces, received = run(lambda: hvd.alltoall(tf.fill([N * (N + 1) // 2], R), splits))
    assert received.numpy().tolist() == [R + 1] * N
    assert pieces.numpy().tolist() == [r for r in range(N) for _ in range(R + 1)]


def gradient(function: Callable[[Any], Any], x: Any, upstream: Any) -> Any:
    def compute() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x, upstream)

    eager, graph = compute(), tf.function(compute)()
    np.testing.assert_array_equal(eager.numpy(), graph.numpy())
    assert eager.shape == x.shape
    return eager.numpy()


def test_gradients_are_horovods() -> None:
    x, ones = tf.constant(EVERY[R], tf.float32), tf.ones([5, 2])
    assert (gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), x, ones * (R + 1))).mean() == (
        N * (N + 1) / 2
    )
    np.testing.assert_allclose(gradient(hvd.allreduce, x, ones * (R + 1)), (N + 1) / 2)
    on_root = gradient(lambda x: hvd.broadcast(x, 0), x, ones * (R + 1))
    np.testing.assert_allclose(on_root, (N + 1) / 2 if R == 0 else 0)
    weights = tf.range(N * 5, dtype=tf.float32)[:, None] * tf.ones([1, 2])
    own = gradient(hvd.allgather, x, weights)
    np.testing.assert_allclose(own, weights.numpy()[R * 5 : R * 5 + 5])
    long = tf.ones([2 * N])
    np.testing.assert_allclose(
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), long, tf.fill([2], R + 1.0)),
        np.repeat(np.arange(1, N + 1), 2) * N,
    )
    np.testing.assert_allclose(
        gradient(hvd.alltoall, tf.ones([N]), tf.fill([N], R + 1.0)), np.arange(1, N + 1)
    )


def given(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[bool, ...]]:
    """Notes for every call of a collective which of its arrays are tensors."""
    seen: list[tuple[bool, ...]] = []
    real = getattr(owner, name)

    def noted(arrays: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(tuple(map(tf.is_tensor, arrays)))
        return real(arrays, *arguments, **options)

    monkeypatch.setattr(owner, name, noted)
    return seen


@pytest.mark.parametrize("graph", [False, True])
def test_devices_say_which_gradients_leave_the_gpu(monkeypatch: Any, graph: bool) -> None:
    keep_tensors(monkeypatch)
    dense = given(monkeypatch, collectives, "grouped_allreduce")
    rows = given(monkeypatch, collectives, "grouped_allgather")
    weights, table = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4, 2]))

    def step(**devices: str) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * (R + 1.0)) + tf.reduce_sum(tf.gather(table, [R % 4]))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **devices)
        return tape.gradient(loss, [weights, table])

    cases = [({}, True, True), ({"device_dense": "/cpu:0"}, False, True)]
    cases += [({"device_sparse": "/device:CPU:0"}, True, False)]
    cases += [({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, False, False)]
    for devices, dense_stays, rows_stay in cases:
        dense.clear()
        rows.clear()
        made = tf.function(lambda: step(**devices))() if graph else step(**devices)  # noqa: B023
        np.testing.assert_array_equal(made[0].numpy(), np.full(3, N * (N + 1) / 2))
        assert made[1].indices.numpy().tolist() == [rank % 4 for rank in range(N)]
        if N > 1:
            assert set(dense) == ({(True,)} if dense_stays else {(False,)})
            assert set(rows) == {(rows_stay, rows_stay)}


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected a device as '/cpu:0' .*found 'first gpu'"):
        hvd.allreduce(tf.ones(2), device_dense="first gpu")


def test_calls_in_a_function_keep_their_order() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def many() -> Any:
        return [hvd.allreduce(tf.fill([3], float(i)), op=hvd.Sum) for i in range(20)]

    assert [float(x[0]) for x in many()] == [i * N for i in range(20)]


def test_inputs_and_constants_are_left_alone() -> None:
    x = tf.Variable(tf.ones(100_000) * (R + 1))

    @tf.function  # type: ignore[untyped-decorator]
    def twice() -> Any:
        return hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x, op=hvd.Sum)

    assert twice()[0] == N * (N + 1)
    assert (x.numpy() == R + 1).all()


def test_results_outlive_later_calls() -> None:
    first = hvd.allreduce(tf.fill([50_000], float(R)), op=hvd.Sum)
    for _ in range(5):
        hvd.allreduce(tf.fill([50_000], 100.0), op=hvd.Sum)
    assert (first.numpy() == N * (N - 1) / 2).all()


def test_process_sets(sets: Any) -> None:
    if N < 2:
        pytest.skip("a process set takes two ranks")
    half = sets["half"]
    out = hvd.allreduce(tf.ones(2), op=hvd.Sum, process_set=half)
    assert out.numpy().tolist() == [half.size()] * 2
    assert hvd.size_op(half.process_set_id).numpy() == half.size()
    assert hvd.process_set_included_op(half.process_set_id).numpy() == 1
    with pytest.raises(UsageError, match="does not exist"):
        hvd.size_op(99)


def test_ranks_as_tensors(run: Any) -> None:
    told = run(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])
    assert [int(t) for t in told] == [R, N, hvd.local_rank(), hvd.local_size()]


def test_objects() -> None:
    assert hvd.broadcast_object({"rank": R}, 0) == {"rank": 0}
    assert hvd.broadcast_object_fn(0)((R, "x")) == (0, "x")
    assert hvd.allgather_object(R) == list(range(N))


def test_what_is_built() -> None:
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not hvd.gloo_built()
    assert isinstance(hvd.nccl_built(), int)
    assert hvd.is_initialized()


def test_variables_are_the_roots(run: Any) -> None:
    kinds = [tf.Variable(tf.cast(numbers(), d)) for d in (tf.float32, tf.int64, tf.float32)]
    run(lambda: hvd.broadcast_variables(kinds, 0))
    for variable in kinds:
        np.testing.assert_array_equal(variable.numpy(), EVERY[0])


@pytest.mark.skipif(N < 2, reason="a mistake takes two ranks")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (lambda: [tf.Variable(1.0, name="a")] * (2 - R % 2), "variables"),
        (lambda: [tf.Variable(tf.ones(2 + R % 2), name="kernel")], "kernel of shape"),
    ],
)
def test_variables_that_differ_are_named(variables: Any, said: str) -> None:
    with pytest.raises(CollectiveMismatch, match=said):
        hvd.broadcast_variables(variables(), 0)


def test_timeline(tmp_path: Any) -> None:
    path = hvd.broadcast_object(str(tmp_path / "trace.json"), 0)
    hvd.start_timeline(path)
    hvd.allreduce(tf.ones(2), name="told")
    hvd.stop_timeline()
    with open(path) as trace:
        assert "told" in trace.read()
    with pytest.raises(ValueError, match="start_timeline"):
        hvd.stop_timeline()


def test_join_brings_zeros() -> None:
    steps = 2 + R
    totals = [float(hvd.allreduce(tf.ones(3), op=hvd.Sum)[0]) for _ in range(steps)]
    assert int(hvd.join()) == N - 1
    assert totals == [N, N, *range(N - 1, N - 1 - R, -1)]


def test_a_graph_of_version_1_matches_calls_by_name() -> None:
    """Each rank is ready for them in another order."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        outs = []
        for i in range(6):
            pause = 0.05 * ((i + 3 * R) % 6)

            def late(value: Any = float(i), pause: float = pause) -> Any:
                time.sleep(pause)
                return np.float32(value)

            value = tf.reshape(tf.numpy_function(late, [], tf.float32), [])
            outs.append(hvd.allreduce(value, op=hvd.Sum))
        with v1.Session() as session:
            assert session.run(outs) == [i * N for i in range(6)]
            assert session.run(outs[3]) == 3 * N
