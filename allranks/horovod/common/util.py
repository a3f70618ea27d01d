"""Small questions that scripts ask Horovod. Standard library only until one is asked."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """A function that is called once for the same arguments; they can be hashed."""
    known: dict[Any, T] = {}
    lock = threading.Lock()

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> T:
        key = args, frozenset(kwargs.items())
        with lock:
            if key not in known:
                known[key] = f(*args, **kwargs)
            return known[key]

    return call


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Does nothing where allranks works with a framework here.

    Raises:
        ImportError: it does not.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            f"allranks works with TensorFlow and Keras: found {ext_name}. "
            'Install them: pip install "allranks[tensorflow]"'
        )


def get_ext_suffix() -> str:
    """The end of the name of a compiled module of this Python."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether allranks works with a framework here: ``tensorflow`` and ``keras``, if installed."""
    return ext_base_name in ("tensorflow", "keras") and (
        importlib.util.find_spec(ext_base_name) is not None
    )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU on this rank."""
    if ext_base_name not in ("tensorflow", "keras"):
        return False
    tensorflow = importlib.import_module("tensorflow")
    return bool(tensorflow.config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """True: collectives go over MPI."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """False: allranks has no Gloo."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """False: allranks has no DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: allranks has no oneCCL."""
    return False


def nccl_built(verbose: bool = False) -> bool:
    """Whether cupy and NCCL are installed."""
    return bool(importlib.import_module("allranks.tensorflow").nccl_built())


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets variables of the environment for as long as the block runs; None removes one."""
    before = {name: os.environ.get(name) for name in kwargs}
    try:
        _set(kwargs)
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, …."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """Returns a list cut into so many lists, whose lengths differ by one at most."""
    size, longer = divmod(len(items), parts)
    cuts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(cuts)]


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version, as ``2.21.0-rc1``, is at least another, as ``2.16.0``."""
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    return (*numbers, 0, 0, 0)[:3]
