"""Collectives of tensors: dtypes, devices, slices, graphs, errors.

`names_suite` compares the results and gradients of every operation with numpy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import allranks.tensorflow as hvd  # noqa: E402
from allranks import collectives  # noqa: E402
from allranks.errors import CollectiveMismatch, UsageError  # noqa: E402
from allranks.tensorflow import tf_bridge  # noqa: E402

hvd.init()
R, N = hvd.rank(), hvd.size()
MINE = np.random.default_rng(R).integers(0, 9, (5, 2))
EVERY = [np.random.default_rng(rank).integers(0, 9, (5, 2)) for rank in range(N)]
DTYPES = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]


def keep_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes tensors to `allranks.collectives` as from a GPU, without a GPU."""
    monkeypatch.setattr(tf_bridge, "_can_move_on_gpu", lambda: True)
    monkeypatch.setattr(tf_bridge.dlpack, "is_on_gpu", lambda tensor: True)


@pytest.fixture(params=["eager", "graph"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function without arguments, directly or inside a tf.function."""
    if request.param == "eager":
        return lambda function: function()
    return lambda function: tf.function(function)()


def test_tensors_that_stay_where_they_are_move_by_every_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_tensors(monkeypatch)

    @tf.function  # type: ignore[untyped-decorator]
    def move() -> Any:
        return [
            hvd.allgather(tf.fill([R + 1], R)),
            hvd.broadcast(tf.fill([2], R), N - 1),
            hvd.reducescatter(tf.range(N, dtype=tf.float32), op=hvd.Sum),
            *hvd.alltoall(tf.fill([N], R), tf.ones([N], tf.int32)),
        ], [hvd.allreduce(tf.cast(MINE, dtype), op=hvd.Sum) for dtype in DTYPES]

    moved, reduced = move()
    rows, rooted, scattered, pieces, received = [out.numpy().tolist() for out in moved]
    assert rows == [r for r in range(N) for _ in range(r + 1)]
    assert rooted == [N - 1] * 2
    assert scattered == [R * N]
    assert pieces == list(range(N))
    assert received == [1] * N
    for dtype, out in zip(DTYPES, reduced, strict=True):
        assert out.dtype == dtype
        np.testing.assert_array_equal(tf.cast(out, tf.float64).numpy(), sum(EVERY))


def test_integers_are_averaged_towards_zero_and_bool_is_any() -> None:
    out = hvd.allreduce(tf.constant(MINE, tf.int32))
    np.testing.assert_array_equal(out.numpy(), np.trunc(sum(EVERY) / N))
    out = hvd.allreduce(tf.constant([R == 0, False]), op=hvd.Max)
    assert out.numpy().tolist() == [True, False]
    with pytest.raises(TypeError, match="bool"):
        tf.function(lambda: hvd.allreduce(tf.constant([True])))()


CALLS = {
    "allreduce": hvd.allreduce,
    "allgather": hvd.allgather,
    "broadcast": lambda value: hvd.broadcast(value, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_no_dense_tensor_is_refused_with_what_to_type(call, run):
    ragged = tf.ragged.constant([[1], [2, 3]])
    for value, said in (
        (ragged, r"found a RaggedTensor of shape \(2, None\).*allgather_object\(x.to_list\(\)\)"),
        (
            tf.sparse.eye(2),
            r"found a SparseTensor of shape \(2, 2\)\. Pass tf.sparse.to_dense\(x\)",
        ),
        ([[1], [2, 3]], "found a list whose parts differ in shape.*broadcast_object"),
        (tf.constant(["a"]), "found strings.*broadcast_object"),
        (object(), "found object.*broadcast_object"),
    ):
        with pytest.raises(TypeError, match=f"(?s)a collective needs .*{said}"):
            run(lambda value=value: call(value))


def test_bfloat16_keeps_its_range_where_others_are_compressed() -> None:
    wide = tf.constant([1e20, 1e-20], tf.bfloat16)
    out = hvd.allreduce(wide, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(out.numpy(), wide.numpy())


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
    slices = tf.IndexedSlices(tf.constant([[7]]), tf.constant([R]), tf.constant([N, 1]))
    found = hvd.allreduce(slices)
    np.testing.assert_array_equal(found.values.numpy(), np.full((N, 1), 7 / N))
    before = len(collectives.records())
    for call, options, said in (
        (hvd.allreduce, {"op": hvd.Max}, "Max"),
        (hvd.allreduce, {"prescale_factor": 2.0}, "factors"),
        (hvd.grouped_allreduce, {"op": hvd.Adasum}, "IndexedSlices"),
        (hvd.grouped_allreduce, {"op": hvd.Sum, "postscale_factor": 2.0}, "IndexedSlices"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            call(slices if call is hvd.allreduce else [tf.ones(3), slices], **options)
    assert len(collectives.records()) == before


def test_the_gradient_of_alltoall_goes_back_where_rows_differ(run: Any) -> None:
    """Rank r has r + 1 rows for each rank; rows from rank s have the weight s + 1."""
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
    "op for average": lambda: hvd.allreduce(tf.ones(2), op=True),
    "op of reducescatter": lambda: hvd.reducescatter(tf.ones(N), op=77),
}


def test_arguments_that_are_wrong_here_are_tensorflows_error(run: Any) -> None:
    for mistake in MISTAKES.values():
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            run(mistake)
        assert isinstance(raised.value, UsageError)
        assert isinstance(raised.value, ValueError)


def test_other_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match=r"Compression\.fp16, found 'fp16'"):
        hvd.allreduce(tf.ones(2), compression="fp16")
    with pytest.raises(UsageError, match=r"expected a device such as '/cpu:0' .*found 'first gpu'"):
        hvd.allreduce(tf.ones(2), device_dense="first gpu")
    with pytest.raises(ValueError, match="both"):
        hvd.allreduce(tf.ones(2), average=False, op=hvd.Sum)
    with pytest.raises(ValueError, match="start_timeline"):
        hvd.stop_timeline()
    with pytest.raises(UsageError, match="does not exist"):
        hvd.size_op(99)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
def test_a_reduction_without_a_gradient_says_so(op: Any) -> None:
    x = tf.constant([1.0, float(R)])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(hvd.allreduce(x, op=op))
    with pytest.raises(UsageError, match=f"for Average, Sum and Adasum only: found {op.name}"):
        tape.gradient(y, x)


def arguments_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[bool, ...]]:
    """Records for every call of a collective which of its arrays are tensors."""
    seen: list[tuple[bool, ...]] = []
    real = getattr(collectives, name)

    def noted(arrays: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(tuple(map(tf.is_tensor, arrays)))
        return real(arrays, *arguments, **options)

    monkeypatch.setattr(collectives, name, noted)
    return seen


def test_devices_say_which_gradients_leave_the_gpu(run: Any, monkeypatch: Any) -> None:
    keep_tensors(monkeypatch)
    dense = arguments_of(monkeypatch, "grouped_allreduce")
    rows = arguments_of(monkeypatch, "grouped_allgather")
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
        made = run(lambda devices=devices: step(**devices))
        np.testing.assert_array_equal(made[0].numpy(), np.full(3, N * (N + 1) / 2))
        assert made[1].indices.numpy().tolist() == [rank % 4 for rank in range(N)]
        assert set(dense) == {(dense_stays,)}
        assert set(rows) == {(rows_stay, rows_stay)}


def test_calls_in_a_function_keep_their_order_and_leave_their_inputs_alone() -> None:
    x = tf.Variable(tf.ones(100_000) * (R + 1))

    @tf.function  # type: ignore[untyped-decorator]
    def many() -> Any:
        outs = [hvd.allreduce(tf.fill([3], float(i)), op=hvd.Sum) for i in range(20)]
        return outs, hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x, op=hvd.Sum)

    outs, twice = many()
    assert [float(out[0]) for out in outs] == [i * N for i in range(20)]
    assert twice[0] == N * (N + 1)
    assert (x.numpy() == R + 1).all()


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
