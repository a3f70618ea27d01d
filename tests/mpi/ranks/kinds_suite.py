"""Arrays of other libraries: each operation gives back the kind, dtype and device that came in.

A library that is not installed is skipped. The GPU's own arrays need a GPU and are not here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import util
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from libraries import (
    DLPack,
    Interface,
    Jax,
    Kind,
    Strict,
    TensorFlow,
    Torch,
    equal,
    results,
    total,
    values,
)

import allranks.collectives as c
from allranks.errors import CollectiveMismatch, MissingDependency, UsageError

# Read when the libraries are imported: no GPU, and two devices for JAX to spread an array over.
os.environ.update(
    CUDA_VISIBLE_DEVICES="-1",
    JAX_PLATFORMS="cpu",
    TF_CPP_MIN_LOG_LEVEL="3",
    XLA_FLAGS="--xla_force_host_platform_device_count=2",
)
SHAPES = [(), (1,), (0,), (3, 0, 2), (4, 3), (300, 301)]


KINDS = [Interface, DLPack, Strict, Torch, Jax, TensorFlow]
CASES = [(kind, dtype) for kind in KINDS for dtype in kind.dtypes]


def cases() -> Any:
    return pytest.mark.parametrize(
        ("make_kind", "name"), CASES, ids=[f"{kind.__name__}-{dtype}" for kind, dtype in CASES]
    )


@cases()
def test_every_operation_gives_the_kind_back(make_kind: Callable[[], Kind], name: str):
    kind = make_kind()
    mine = kind.make(values(c.rank(), (2 * c.size(), 3), name))
    other = kind.make(values(c.rank(), (c.rank() + 1, 3), name))
    for found, wanted in results(mine, other, name):
        kind.check(found, mine)
        equal(kind.back(found), wanted)
    equal(kind.back(mine), values(c.rank(), (2 * c.size(), 3), name))
    equal(kind.back(other), values(c.rank(), (c.rank() + 1, 3), name))


@cases()
def test_any_shape_and_layout_works(make_kind: Callable[[], Kind], name: str):
    kind = make_kind()
    for shape in SHAPES:
        array = values(c.rank(), shape, name)
        for mine in (kind.make(array), kind.strided(array)):
            found = c.allreduce(mine, c.Sum)
            kind.check(found, mine)
            equal(kind.back(found), total(shape, name))
            equal(kind.back(c.broadcast(mine)), values(0, shape, name))
            equal(kind.back(mine), array)


@pytest.mark.parametrize("make_kind", KINDS)
def test_each_rank_gets_back_what_it_brought(make_kind: Callable[[], Kind]):
    theirs, own = make_kind(), Kind()
    kind = own if c.rank() % 2 else theirs
    mine = kind.make(np.full(3, 1.0 + c.rank(), "float32"))
    for compression in (c.Compression.none, c.Compression.fp16):
        found = c.allreduce(mine, c.Sum, compression=compression)
        kind.check(found, mine)
        equal(kind.back(found), np.full(3, c.size() * (c.size() + 1) / 2, "float32"))


@pytest.mark.parametrize("make_kind", [Kind, Torch])
def test_results_are_nobody_elses(make_kind: Callable[[], Kind]):
    kind = make_kind()
    for shape in [(2 * c.size(), 3), (2 * c.size(), 200_000)]:
        array = values(c.rank(), shape, "float32")
        mine = kind.make(array)
        for found, _ in results(mine, mine, "float32"):
            found[...] = -1
        equal(kind.back(mine), array)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64"])
def test_a_tensor_is_written_to(name: str):
    """In its own memory, in another layout, in place, and where it is a parameter."""
    kind = Torch()
    array = values(c.rank(), (300, 3), name)
    mine, wanted = kind.make(array), total((300, 3), name)
    for out in (kind.make(array * 0), kind.strided(array * 0), mine.clone().requires_grad_(True)):
        assert c.allreduce(mine, c.Sum, out=out) is out
        equal(kind.back(out.detach()), wanted)
        equal(kind.back(mine), array)
    if name == "complex64":
        out = kind.make(array).conj()
        equal(kind.back(c.allreduce(mine, c.Sum, out=out)), wanted)
    found = c.allreduce(mine, c.Sum, out=None if c.rank() % 2 else mine)
    equal(kind.back(found), wanted)
    with pytest.raises(
        UsageError, match=r"expected a tensor of torch\.\w+ \(300, 3\) on cpu, found"
    ):
        c.allreduce(kind.make(array), c.Sum, out=array)


def test_arrays_that_cannot_be_written_to_are_refused():
    mine = Jax().make(np.ones(3, "float32"))
    with pytest.raises(UsageError, match="an out of numpy, cupy or torch: found jax"):
        c.allreduce(mine, c.Sum, out=mine)


def test_numbers_and_lists():
    size = c.size()
    for number in (2, 2.5, 1 + 2j, True):
        found = c.allreduce(number, c.Sum)
        assert type(found) is type(number)
        assert found == (number if number is True else number * size)
    half = c.allreduce(ml_dtypes.bfloat16(2), c.Sum)
    assert type(half) is ml_dtypes.bfloat16
    assert half == 2 * size
    equal(c.allreduce([[1, 2]], c.Sum), np.array([[1, 2]]) * size)
    equal(c.allgather([True]), np.ones(size, bool))
    equal(c.allreduce([], c.Sum), np.empty(0))


@pytest.mark.parametrize(
    "value",
    [None, "text", ["a", "b"], [None], 2**70, {"a": 1}, np.array(["a"]), np.array([None])],
    ids=repr,
)
def test_what_is_no_number_is_refused(value: Any):
    with pytest.raises(TypeError, match=r"needs .*numbers or bool.*broadcast_object"):
        c.allreduce(value)


def test_floats_of_one_byte_are_refused():
    with pytest.raises(TypeError, match="numbers or bool, found an array of float8_e5m2"):
        c.allreduce(np.ones(2, ml_dtypes.float8_e5m2))


@pytest.mark.parametrize("of", [lambda x: x, lambda x: [x], lambda x: [[x], [x]]])
def test_masked_arrays_are_refused(of: Callable[[Any], Any]):
    with pytest.raises(TypeError, match=r"this one is masked\. Pass x\.filled"):
        c.allreduce(of(np.ma.masked_array([1, 2], [True, False])))


def test_a_list_of_unequal_parts_is_refused():
    with pytest.raises(TypeError, match="found a list whose parts differ in shape"):
        c.allreduce([[1], [2, 3]])


def test_groups_are_iterated_once():
    ones = [np.ones(c.size()), np.ones(c.size())]
    for call in (c.grouped_allreduce, c.grouped_reducescatter, c.grouped_allgather):
        for found, wanted in zip(call(iter(ones)), call(ones), strict=True):
            equal(found, wanted)
    for group in (np.float64(1), {"a": np.ones(1)}, None):
        with pytest.raises(UsageError, match="grouped_allreduce expected a list of arrays"):
            c.grouped_allreduce(group)


def test_factors_are_numbers():
    with pytest.raises(UsageError, match="expected a number for prescale_factor"):
        c.allreduce(np.ones(2), prescale_factor=np.ones(2))
    equal(c.allreduce(np.ones(2), prescale_factor=np.array(2.0)), np.full(2, 2.0))


def test_horovods_second_argument_is_no_reduction():
    """There, it is `average`."""
    for average, op in ((True, "Average"), (False, "Sum")):
        with pytest.raises(UsageError, match=rf"found {average}\. Type: allreduce\(x, op={op}\)"):
            c.allreduce(np.ones(2), average)


def test_a_mask_and_floats_are_no_ranks():
    with pytest.raises(UsageError, match=r"Type for a mask: add_process_set\(np\.flatnonzero"):
        c.add_process_set(np.arange(c.size()) == 0)
    with pytest.raises(UsageError, match=r"needs the numbers of ranks: found \[0\.0\]"):
        c.add_process_set([0.0])


def test_tables_of_pandas_need_the_same_labels():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    mine, odd = [1.0, 2.0], c.rank() == c.size() - 1 and c.size() > 1
    equal(c.allreduce(pandas.Series(mine, ["a", "b"]), c.Sum), np.array(mine) * c.size())
    equal(c.allreduce(pandas.Series(mine), c.Sum), np.array(mine) * c.size())
    tables = [
        lambda: c.allreduce(pandas.Series(mine, ["b", "a"] if odd else ["a", "b"])),
        lambda: c.grouped_allreduce([pandas.Series(mine, ["b", "a"] if odd else ["a", "b"])]),
        lambda: c.allgather(pandas.DataFrame([mine], columns=["b", "a"] if odd else ["a", "b"])),
        lambda: c.alltoall(
            pandas.DataFrame([mine] * c.size(), columns=["b", "a"] if odd else ["a", "b"])
        ),
        lambda: c.allreduce(pandas.Series(mine)[:: -1 if odd else 1]),
        lambda: c.allreduce(pandas.Series(mine * 2)[2 * odd : 2 * odd + 2]),
    ]
    for table in tables[: len(tables) * (c.size() > 1)]:
        with pytest.raises(CollectiveMismatch, match=r"needs the same shape and labels") as caught:
            table()
        assert "Sort them alike on every rank: x.reindex(labels)" in str(caught.value)
        c.renew()
    counted = pandas.Series(mine, [0, 1] if odd else None)
    equal(c.allreduce(counted, c.Sum), np.array(mine) * c.size())
    rows = pandas.DataFrame([mine], index=[f"row {c.rank()}"], columns=["a", "b"])
    equal(c.allgather(rows), np.array([mine] * c.size()))
    rows = pandas.DataFrame([mine] * c.size(), columns=["a", "b"])
    equal(c.alltoall(rows), np.array([mine] * c.size()))


def test_a_matrix_stays_one():
    mine = np.array([[1.0, 2.0], [3.0, 4.0]]).view(np.matrix)
    found = c.allreduce(mine, c.Sum)
    assert type(found) is np.matrix
    equal(np.asarray(found), np.asarray(mine) * c.size())
    whole = c.allgather(mine)
    assert type(whole) is np.matrix
    assert whole.shape == (2 * c.size(), 2)


def test_integers_that_jax_would_cut_are_refused():
    kind = Jax()
    like, cut = kind.make(np.ones(1, "int32")), np.array([2**40] * c.size())
    if c.rank():
        with pytest.raises(TypeError, match=r"jax\.config\.update\('jax_enable_x64', True\)"):
            c.scatter(like)
    else:
        equal(c.scatter(cut), cut[:1])
    c.renew()
    found = c.scatter(np.arange(c.size()) if c.rank() == 0 else like)
    assert int(found[0]) == c.rank()


def test_arrays_on_a_gpu_need_cupy():
    if util.find_spec("cupy"):
        pytest.skip("the package cupy is here, and is what this test does without")

    class Only:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False)}

    class OnlyDLPack:
        __dlpack__ = None

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    for value in (Only(), OnlyDLPack()):
        with pytest.raises(MissingDependency, match=r"cupy on every rank\. pip install 'allranks"):
            c.allreduce(value)


@pytest.mark.parametrize("make_kind", [Strict, Torch, Jax, TensorFlow])
def test_recv_takes_the_kind_from_like_and_the_dtype_from_the_sender(
    make_kind: Callable[[], Kind],
):
    kind = make_kind()
    name = kind.dtypes[-1]
    if c.rank() == 0 and c.size() > 1:
        c.send(values(0, (2, 3), name), 1)
    elif c.rank() == 1:
        like = kind.make(np.ones(1, "int32"))
        found = c.recv(0, like=like)
        assert type(found) is type(like)
        equal(kind.back(found), values(0, (2, 3), name))


def test_scatter_gives_the_others_their_own_kind():
    kind = Strict()
    root = c.rank() == 0
    mine = np.arange(2.0 * c.size()) if root else kind.make(np.empty(0, "float32"))
    found = c.scatter(mine)
    assert type(found) is type(mine)
    equal(Kind.back(kind, found) if root else kind.back(found), np.arange(2.0) + 2 * c.rank())
    assert type(c.scatter(mine if root else None)) is np.ndarray


def test_an_array_stays_on_its_device():
    library = Strict().library
    device = library.Device("device1")
    found = c.allreduce(library.ones(3, device=device), c.Sum)
    assert found.device == device
    assert library.all(found == library.full(3, float(c.size()), device=device))


def test_torch_tensors_of_every_making():
    torch = Torch().library

    class Mine(torch.Tensor):
        pass

    leaf = torch.ones(3, requires_grad=True)
    size = c.size()
    for tensor in (
        leaf,
        leaf * 2,
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3).as_subclass(Mine),
    ):
        found = c.allreduce(tensor, c.Sum)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert torch.equal(found, tensor.detach() * size)
    for tensor in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag):
        assert torch.equal(c.allreduce(tensor, c.Sum), tensor * size)
    with pytest.raises(TypeError, match=r"dense tensor, and this one is torch\.sparse_coo"):
        c.allreduce(torch.ones(2, 2).to_sparse())


@pytest.mark.parametrize("by_interface", [False, True])
def test_torch_tensors_stay_resizable(by_interface, monkeypatch):
    torch = Torch().library
    from allranks.collectives.arrays import torch_memory

    if by_interface:  # as with an older numpy or torch
        monkeypatch.setattr(torch_memory, "_read", np.asarray)
        monkeypatch.setattr(torch_memory, "_handed_over", torch_memory._ByInterface)
    for dtype in (torch.float32, torch.int8, torch.bool, torch.complex128, torch.bfloat16):
        whole = torch.arange(6).reshape(2, 3).to(dtype)
        for tensor in (whole, whole.T, whole[0, 0], whole[:0], whole[:, ::2]):
            assert torch.equal(c.allgather(tensor.reshape(-1)), tensor.reshape(-1).repeat(c.size()))
            assert torch.equal(c.broadcast(tensor, 0), tensor)
        assert whole.untyped_storage().resizable()


def test_jax_arrays_keep_their_sharding_where_it_fits():
    jax = Jax().library
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    mine = jax.device_put(np.arange(4.0, dtype="float32"), sharding)
    found = c.allreduce(mine, c.Sum)
    assert found.sharding == sharding
    equal(np.asarray(found), np.arange(4, dtype="float32") * c.size())
    odd = c.alltoall(mine, [3, *[0] * (c.size() - 2), 1] if c.size() > 1 else [4])[0]
    equal(np.asarray(odd)[:1], np.array([0 if c.rank() == 0 else 3], "float32")[: len(odd)])


def test_jax_inside_jit_says_so():
    jax = Jax().library
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(c.allreduce)(jax.numpy.ones(2))


def test_tensorflows_strings_are_refused():
    tf = TensorFlow().library
    ragged = tf.ragged.constant([[1], [2, 3]])
    for value in (tf.constant("a"), tf.constant(["a", "b"]), ragged, tf.sparse.eye(2)):
        for call in (c.allreduce, c.broadcast, c.allgather, c.alltoall, c.reducescatter):
            with pytest.raises(TypeError, match=r"found .*Tensor\..*broadcast_object"):
                call(value)


def test_tensorflows_variables_stay_as_they_are():
    tf = TensorFlow().library
    variable = tf.Variable([1.0, 2.0])
    found = c.allreduce(variable, c.Sum)
    assert isinstance(found, tf.Tensor)
    equal(found.numpy(), np.array([1, 2], "float32") * c.size())
    found = c.broadcast(variable)
    variable.assign_add([1.0, 1.0])
    equal(found.numpy(), np.array([1, 2], "float32"))


def test_operations_of_torch_name_the_same_reductions():
    torch = Torch().library
    ops = torch.distributed.ReduceOp
    mine, found = torch.tensor([1.0, c.rank()]), []
    for theirs, ours in ((ops.SUM, c.Sum), (ops.AVG, c.Average), (ops.PRODUCT, c.Product)):
        for op in (theirs, ops(theirs)):
            found.append((c.allreduce(mine, op), c.allreduce(mine, ours)))
    assert all(torch.equal(one, other) for one, other in found)
    with pytest.raises(UsageError, match="expected op Sum, Average"):
        c.allreduce(mine, ops.BAND)
