"""The fakes, and what allranks asks of cupy, NCCL and pynvml, held against the real ones.

Run by a Python that has the real ones: ``test_fakes_are_like_the_real_ones.py`` starts it. Nothing
here needs a GPU. What a GPU does is not said here; that names, arguments, types and constants are
the real ones' is.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import cupyx
import ml_dtypes
import numpy as np
import pynvml
import pytest
from cupy.cuda import nccl, runtime

import allranks.collectives as c
from allranks.cluster import devices
from allranks.collectives import loopback
from allranks.collectives.arrays.reductions import Arithmetic, ReduceOp, check, is_half
from allranks.collectives.gpu import cupy_api, device, dlpack
from allranks.collectives.gpu import nccl as nccl_transport
from allranks.collectives.gpu.nccl import cut
from allranks.errors import MissingDependency
from allranks.features.gpu import memory as gpu_memory
from allranks.features.gpu.memory import is_out_of_memory

FAKES = Path(__file__).parent
PACKAGE = FAKES.parents[1] / "allranks"
REAL = {
    "cupy": cupy,
    "cupyx": cupyx,
    "cupy.cuda": cupy.cuda,
    "cupy.cuda.runtime": runtime,
    "cupy.cuda.nccl": nccl,
    "pynvml": pynvml,
}
NUMBERS = {"int", "size_t", "intptr_t", "unsigned int", "uint32_t", "Py_ssize_t"}


class Parameter(NamedTuple):
    name: str
    kind: str
    """Its type as written; "" where none is."""
    needed: bool


def real_parameters(thing: Any) -> list[Parameter]:
    """Of a Python function by its signature, of a compiled one by the first line of its text."""
    try:
        found = inspect.signature(thing).parameters.values()
        return [
            Parameter(p.name, "", p.default is p.empty)
            for p in found
            if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
    except ValueError:
        written = re.match(r"\w*\.?\w+\((.*?)\)(?: -> .*)?$", thing.__doc__, re.M)
    assert written is not None, f"{thing} does not say what it takes"
    parts = [part.strip() for part in written[1].split(",") if part.strip()[:1] not in ("", "*")]
    made = []
    for part in parts:
        declared, _, default = part.partition("=")
        kind, _, name = declared.strip().rpartition(" ")
        made.append(Parameter(name, kind, not default))
    return [p for p in made if p.name != "self"]


def written_parameters(function: ast.FunctionDef) -> list[Parameter]:
    """Of a function in a file."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(arguments) - len(given.defaults)) + given.defaults + given.kw_defaults
    return [
        Parameter(a.arg, ast.unparse(a.annotation) if a.annotation else "", default is None)
        for a, default in zip([*arguments, *given.kwonlyargs], defaults, strict=True)
        if a.arg not in ("self", "cls")
    ]


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for each in body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield each


def classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def fits(mine: list[Parameter], theirs: list[Parameter]) -> str:
    """Why a call with all of mine is none that the real one takes; "" where it is."""
    if len(mine) > len(theirs):
        return f"the real one takes {len(theirs)} arguments: {theirs}"
    if any(p.needed for p in theirs[len(mine) :]):
        return f"the real one needs more: {theirs[len(mine) :]}"
    for own, real in zip(mine, theirs, strict=False):
        kind = "int" if real.kind in NUMBERS else real.kind
        if own.kind and kind in ("int", "bytes", "str") and own.kind != kind:
            return f"{own.name} is {real.kind} {real.name} in the real one, not {own.kind}"
    return ""


def parts_of_protocols() -> Iterator[Any]:
    """What ``collectives/gpu/cupy_api.py`` asks for, and where the real one is."""
    owners = {
        "CudaEvent": cupy.cuda.Event,
        "Stream": cupy.cuda.Stream,
        "Communicator": nccl.NcclCommunicator,
        "NcclModule": nccl,
        "Runtime": runtime,
        "Current": cupy.cuda.Device,
        "Cuda": cupy.cuda,
        "Pool": cupy.cuda.MemoryPool,
        "Cupy": cupy,
    }
    asked = classes(PACKAGE / "collectives" / "gpu" / "cupy_api.py")
    assert set(owners) == set(asked)
    for name, described in asked.items():
        for function in public(described.body):
            yield pytest.param(owners[name], function, id=f"{name}.{function.name}")


@pytest.mark.parametrize(("owner", "asked"), [*parts_of_protocols()])
def test_what_is_asked_of_a_library_is_there(owner, asked):
    assert fits(written_parameters(asked), real_parameters(getattr(owner, asked.name))) == ""


def parts_of_fakes() -> Iterator[Any]:
    """The functions of the fakes and of their classes, and the real ones' owners."""
    gpu = FAKES / "gpu" / "cupy"
    bodies: list[tuple[str, Any, list[ast.stmt]]] = []
    for path in sorted(FAKES.glob("*/**/*.py")):
        inside = path.relative_to(FAKES).with_suffix("").parts[1:]
        module = ".".join(part for part in inside if part != "__init__")
        if module in REAL:
            bodies.append((module, REAL[module], ast.parse(path.read_text()).body))
    for path, name, real in (
        (gpu / "_arrays.py", "ndarray", cupy.ndarray),
        (gpu / "cuda" / "_queue.py", "Stream", cupy.cuda.Stream),
        (gpu / "cuda" / "_queue.py", "Event", cupy.cuda.Event),
        (gpu / "cuda" / "_memory.py", "MemoryPool", cupy.cuda.MemoryPool),
        (gpu / "cuda" / "nccl.py", "NcclCommunicator", nccl.NcclCommunicator),
    ):
        bodies.append((name, real, classes(path)[name].body))
    for name, real, body in bodies:
        for function in public(body):
            yield pytest.param(real, function, id=f"{name}.{function.name}")


@pytest.mark.parametrize(("owner", "faked"), [*parts_of_fakes()])
def test_what_a_fake_takes_the_real_one_takes(owner, faked):
    real = getattr(owner, faked.name)
    if any(isinstance(d, ast.Name) and d.id == "property" for d in faked.decorator_list):
        assert not callable(real)
        return
    mine, theirs = written_parameters(faked), real_parameters(real)
    assert fits([p for p in mine if p.needed], theirs) == ""
    assert {p.name for p in mine if not p.needed} <= {p.name for p in theirs}


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (cupy.cuda.Stream, {"non_blocking"}),
        (cupy.cuda.Event, {"disable_timing"}),
        (cupy.copyto, {"casting"}),
        (cupy.empty_like, {"dtype", "shape"}),
        (cupy.zeros_like, {"shape"}),
        (cupy.concatenate, {"out"}),
    ],
    ids=["Stream", "Event", "copyto", "empty_like", "zeros_like", "concatenate"],
)
def test_arguments_that_are_given_by_name_are_known(made, arguments):
    assert arguments <= {p.name for p in real_parameters(made)}


def test_a_stream_of_another_library_is_taken_over():
    """As the FAKE one: torch's are."""
    kind = type("Stream", (), {"__cuda_stream__": lambda self: (0, 4096)})
    assert cupy.cuda.Stream.from_external(kind()).ptr == 4096


def test_every_name_that_is_asked_of_the_driver_is_there():
    asked = set()
    for room in ("features/gpu/memory.py", "cluster/devices.py", "cluster/doctor.py"):
        asked |= set(re.findall(r"\.((?:nvml|NVML)\w+)", (PACKAGE / room).read_text()))
    assert len(asked) > 10
    assert [name for name in sorted(asked) if not hasattr(pynvml, name)] == []


def test_numbers_that_are_written_down_are_the_libraries_own():
    own = {code: f"NCCL_{name.upper()}" for name, code in nccl_transport.CODES.items()}
    assert own == {getattr(nccl, name): name for name in own.values()}
    assert cupy_api.BYTES == nccl.NCCL_UINT8
    for op, code in (
        (ReduceOp.Sum, nccl.NCCL_SUM),
        (ReduceOp.Max, nccl.NCCL_MAX),
        (ReduceOp.Min, nccl.NCCL_MIN),
        (ReduceOp.Product, nccl.NCCL_PROD),
    ):
        form = nccl_transport.nccl_form(op, np.dtype("i4"))
        assert form is not None
        assert form.op == code
    assert runtime.memcpyHostToDevice == device.TO_GPU
    assert runtime.memcpyDeviceToHost == device.FROM_GPU


def test_errors_of_the_driver_are_named_as_the_fakes():
    fake = classes(FAKES / "nvml" / "pynvml.py")
    assert all(issubclass(getattr(pynvml, name), pynvml.NVMLError) for name in fake)


def test_a_communicators_id_goes_from_one_rank_to_another():
    """As bytes, of which the other rank makes a communicator: on a GPU, which is missing here."""
    unique = nccl.get_unique_id()
    assert len(unique) == nccl_transport._ID_NBYTES
    crossed = np.frombuffer(unique, np.uint8).tobytes()
    with pytest.raises(nccl.NcclError, match="CUDA"):
        nccl.NcclCommunicator(1, crossed, 0)
    assert isinstance(nccl_transport.last_error(), str)


def test_a_call_that_is_in_progress_is_no_error_to_cupy():
    """What `nccl_transport.is_in_progress` takes for it is that alone."""
    for status in range(1, 7):
        assert isinstance(nccl.NcclError(status), RuntimeError)
    for status in (cupy_api.IN_PROGRESS, 8):
        with pytest.raises(KeyError) as caught:
            nccl.NcclError(status)
        assert caught.value.args == (status,)


def test_errors_of_a_capture_have_the_numbers_that_are_waited_out():
    named = [str(runtime.CUDARuntimeError(status)) for status in dlpack._CAPTURING]
    assert all("apture" in each for each in named)
    assert runtime.CUDARuntimeError(900).status == 900


def on_the_host(array: np.ndarray) -> Any:
    """A real cupy array at an address of host memory: it can be cut and seen, not computed with."""
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, 0)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


NAMES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool float16 float32 float64 complex64"
DTYPES = [np.dtype(name) for name in [*NAMES.split(), "complex128", ml_dtypes.bfloat16]]


def operations(dtype: np.dtype) -> Iterator[ReduceOp]:
    """Those that NCCL or cupy carries out for a dtype."""
    for op in set(ReduceOp) - {ReduceOp.Adasum}:
        with suppress(TypeError):
            check(op, dtype)
            yield op


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_are_cut_and_seen_as_numpys(dtype):
    host = np.zeros((6, 4), dtype)
    array = on_the_host(host)
    assert dlpack.library_of(array) == "cupy"
    assert dlpack.is_on_gpu(array)
    assert dlpack.to_cupy(array)[0] is array
    assert (array.dtype, array.nbytes, array.itemsize) == (dtype, host.nbytes, dtype.itemsize)
    assert array.data.ptr == host.ctypes.data
    assert array.device.id == 0
    assert not array.T.flags.c_contiguous
    flat, whole = array.reshape(-1), host.reshape(-1)
    for mine, numpys in zip(cut(flat, [5, 0, 19]), cut(whole, [5, 0, 19]), strict=True):
        assert mine.size == numpys.size
        assert not mine.size or mine.data.ptr == numpys.ctypes.data
    assert flat.view(np.uint8).shape == whole.view(np.uint8).shape
    for op in operations(dtype):
        form = nccl_transport.nccl_form(op, dtype)
        if form is not None and form.wider is None:
            assert form.view(flat).shape == form.view(whole).shape


class Tensor(ctypes.Structure):
    """DLManagedTensor, of a GPU.

    Source: dlpack.h.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )

    def __init__(self, array: np.ndarray) -> None:
        self.kept = array, (ctypes.c_int64 * array.ndim)(*array.shape)
        code = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}[array.dtype.kind]
        bits = array.itemsize * 8
        super().__init__(
            array.ctypes.data, 2, 0, array.ndim, code, bits, 1, self.kept[1], None, 0, None, None
        )

    def capsule(self) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self), b"dltensor", None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_dlpack_carries_becomes_cupys_without_a_copy(dtype):
    """A capsule is how TensorFlow's arrays come."""
    tensor = Tensor(np.zeros((3, 4), dtype))
    found = cupy.from_dlpack(tensor.capsule())
    assert (found.dtype, found.shape) == (dtype, (3, 4))
    assert found.data.ptr == tensor.kept[0].ctypes.data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arithmetic_is_known_to_cupy(dtype):
    """Each of numpy's functions that a reduction calls on the GPU has cupy's for its dtype."""
    for op in operations(dtype):
        how = Arithmetic(op, dtype, 3, 1.0, 1.0, "gpu")
        worked = np.dtype("f4") if is_half(dtype) else dtype
        loops = {each.partition("->")[0] for each in getattr(cupy, how.ufunc.__name__).types}
        assert worked.char * 2 in loops


def test_numpys_functions_reach_cupy_and_stop_at_the_missing_driver():
    array = on_the_host(np.zeros(6, "f4"))
    for call in (
        lambda: np.copyto(array[:3], array[3:], casting="unsafe"),
        lambda: np.add(array[:3], array[3:], out=array[:3]),
        lambda: np.divide(array, 3, out=array),
        lambda: np.empty_like(array, shape=(3,), dtype=np.float64),
        lambda: np.concatenate([array, array]),
        lambda: np.concatenate([array[:0], *[array[:1]] * 6], out=array),
        lambda: np.concatenate([array[:2]] * 9, out=on_the_host(np.zeros(18, "f4"))),
        lambda: np.zeros_like(array, shape=(3,)),
        lambda: array.astype(np.float64),
        lambda: cupy.empty((3,), ml_dtypes.bfloat16),
    ):
        with pytest.raises(runtime.CUDARuntimeError):
            call()


def test_an_exhausted_memory_is_known():
    assert is_out_of_memory(cupy.cuda.memory.OutOfMemoryError(1 << 30, 0))


def test_pools_are_emptied_by_functions_that_are_there(monkeypatch):
    monkeypatch.setattr(cupy, "is_available", lambda: True)
    with pytest.raises(runtime.CUDARuntimeError):
        gpu_memory._empty_pools()


def test_pinned_memory_is_an_array():
    assert [p.name for p in real_parameters(cupyx.empty_pinned)][:2] == ["shape", "dtype"]


def test_without_a_driver_a_call_says_so():
    assert loopback.run(1, lambda: c.allreduce(2.0)) == [2.0]
    with pytest.raises(MissingDependency) as raised:
        loopback.run(1, lambda: c.allreduce(np.ones(2), device="/gpu:0"))
    assert str(raised.value).startswith("arrays on a GPU need NVIDIA's driver, and CUDA says")
    assert "nvidia-smi" in str(raised.value)


def test_without_a_driver_no_gpu_is_found_and_it_is_said_why():
    assert devices.visible_gpus() == ()
    assert "NVIDIA's driver does not answer (NVMLError_LibraryNotFound" in devices.why_none()


def test_ncclGetLastError_is_there():
    cupy_api.load_nccl()
    assert ctypes.CDLL("libnccl.so.2").ncclGetLastError
