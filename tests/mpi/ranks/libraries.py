"""What the suites on other libraries' arrays share: the library, what ranks bring, numpy's sums."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import allranks.collectives as c

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def package(name: str, install: str = "") -> Any:
    """A library; skips the test where it is missing, and says what to install."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"the package {name} is missing: pip install {install or name}")


def values(rank: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    """What a rank brings: small whole numbers, whose sums every dtype holds exactly."""
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    base = (np.arange(int(np.prod(shape))) * 7 + rank * 3) % 11
    if dtype.kind == "b":
        return (base > 4).reshape(shape)
    return (base + (1j * rank if dtype.kind == "c" else 0)).astype(dtype).reshape(shape)


def total(shape: tuple[int, ...], name: str) -> np.ndarray:
    """What all ranks bring, summed up by numpy."""
    parts = np.stack([values(r, shape, name) for r in range(c.size())])
    return parts.any(axis=0) if name == "bool" else parts.sum(axis=0, dtype=parts.dtype)


def equal(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert (found == wanted).all()


class Kind:
    """One library's arrays: numpy's own, where nothing is overridden."""

    dtypes = ("int32", "float32", "float64", "bool", "complex64", "float16", "bfloat16")

    def make(self, array: np.ndarray) -> Any:
        return array.copy()

    def back(self, found: Any) -> np.ndarray:
        return found

    def strided(self, array: np.ndarray) -> Any:
        """The same values, in a view that is not contiguous."""
        return self.make(array.T).T

    def check(self, found: Any, brought: Any) -> None:
        assert type(found) is type(brought)
        assert found.dtype == brought.dtype
        assert found.device == brought.device


class Interface(Kind):
    """Objects that have `__array_interface__` and nothing else; numpy's arrays come back."""

    class Only:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array
            self.__array_interface__ = array.__array_interface__

    dtypes = ("int32", "float32", "bool", "complex64", "float16")

    def make(self, array: np.ndarray) -> Any:
        return self.Only(array.copy())

    def strided(self, array: np.ndarray) -> Any:
        return self.Only(array.T.copy().T)

    def check(self, found: Any, brought: Any) -> None:
        assert type(found) is np.ndarray
        assert found.dtype == brought.array.dtype

    def back(self, found: Any) -> np.ndarray:
        return getattr(found, "array", found)


class DLPack(Interface):
    """Objects that have `__dlpack__` and nothing else; numpy's arrays come back."""

    class Only:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array
            self.__dlpack_device__ = array.__dlpack_device__

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)


class Strict(Kind):
    """Arrays that do what the array API standard says, and nothing more."""

    dtypes = ("int32", "float32", "float64", "bool", "complex64")

    def __init__(self) -> None:
        self.library = package("array_api_strict", "array-api-strict")

    def make(self, array: np.ndarray) -> Any:
        return self.library.asarray(array, copy=True)

    def strided(self, array: np.ndarray) -> Any:
        return self.library.permute_dims(self.make(array.T), tuple(range(array.ndim))[::-1])

    def back(self, found: Any) -> np.ndarray:
        return np.from_dlpack(found)


class Torch(Kind):
    def __init__(self) -> None:
        self.library = package("torch")

    def make(self, array: np.ndarray) -> Any:
        if array.dtype == BFLOAT16:
            return self.library.tensor(array.astype("float32")).to(self.library.bfloat16)
        return self.library.tensor(array)

    def strided(self, array: np.ndarray) -> Any:
        return self.make(array.T).permute(tuple(range(array.ndim))[::-1])

    def back(self, found: Any) -> np.ndarray:
        if found.dtype == self.library.bfloat16:
            return found.float().numpy().astype(BFLOAT16)
        return found.detach().resolve_conj().numpy()


class Jax(Kind):
    dtypes = ("int32", "float32", "bool", "complex64", "float16", "bfloat16")

    def __init__(self) -> None:
        self.library = package("jax")

    def make(self, array: np.ndarray) -> Any:
        return self.library.numpy.array(array, copy=True)

    def back(self, found: Any) -> np.ndarray:
        return np.asarray(found)


class TensorFlow(Kind):
    def __init__(self) -> None:
        self.library = package("tensorflow")

    def make(self, array: np.ndarray) -> Any:
        return self.library.constant(array)

    def strided(self, array: np.ndarray) -> Any:
        return self.library.transpose(self.make(array.T))

    def back(self, found: Any) -> np.ndarray:
        return found.numpy() if found.shape.rank else np.asarray(found.numpy(), found.dtype.name)


def results(mine: Any, other: Any, name: str) -> Iterator[tuple[Any, np.ndarray]]:
    """Each operation's result and numpy's; arrays of (2 * size, 3), the other of (rank + 1, 3)."""
    me, size = c.rank(), c.size()
    whole = [values(r, (2 * size, 3), name) for r in range(size)]
    uneven = [values(r, (r + 1, 3), name) for r in range(size)]
    summed = total((2 * size, 3), name)
    last = size - 1

    yield c.allreduce(mine, c.Sum), summed
    for found in c.grouped_allreduce([mine, mine], c.Sum):
        yield found, summed
    yield c.reducescatter(mine, c.Sum), summed[2 * me : 2 * me + 2]
    yield c.allgather(other), np.concatenate(uneven)
    yield c.grouped_allgather([other, mine])[0], np.concatenate(uneven)
    yield c.broadcast(mine, last), whole[last]
    yield c.alltoall(mine), np.concatenate([part[2 * me : 2 * me + 2] for part in whole])
    yield c.scatter(mine, last), whole[last][2 * me : 2 * me + 2]
    reduced, gathered = c.reduce(mine, last, c.Sum), c.gather(other, last)
    if me == last:
        yield reduced, summed
        yield gathered, np.concatenate(uneven)
    else:
        assert reduced is gathered is None
    if me == 0 and size > 1:
        c.send(other, last)
    elif me == last and size > 1:
        yield c.recv(0, like=mine), uneven[0]
