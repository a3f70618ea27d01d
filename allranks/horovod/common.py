"""Horovod's modules ``horovod.common.util`` and ``horovod.common.exceptions``.

Standard library only: a function imports TensorFlow or cupy when it needs one of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

# `alias` uses this module in place of two modules below `horovod.common`. Python imports modules
# below a module only if that has a path, and accepts attributes as modules.
__path__: list[str] = []
exceptions = util = sys.modules[__name__]
_cache = functools.cache


class HorovodInternalError(RuntimeError):
    """A collective has failed on every rank; elastic training restores the last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed; ``skip_sync`` is true if all ranks still have the same state."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Returns the text for a package that was built for another version than the installed one."""
    return (
        f"{name} was built for version {version}, and {installed_version} is installed. "
        f"Install {name} {version}."
    )


class HorovodVersionMismatchError(ImportError):
    """A package was built for another version. Never raised: allranks compiles nothing."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Does nothing if allranks supports a framework and the framework is installed.

    Raises:
        ImportError: for any other framework.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            f"allranks works with TensorFlow and Keras: found {ext_name}. "
            'Install them: pip install "allranks[tensorflow]"'
        )


def get_ext_suffix() -> str:
    """Returns the file name suffix of this Python's compiled modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether allranks supports a framework: ``tensorflow`` or ``keras``."""
    return ext_base_name in ("tensorflow", "keras") and (
        importlib.util.find_spec(ext_base_name) is not None
    )


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Returns whether TensorFlow sees a GPU on this rank."""
    if ext_base_name not in ("tensorflow", "keras"):
        return False
    tensorflow = importlib.import_module("tensorflow")
    return bool(tensorflow.config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """Returns True: collectives use MPI."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Returns False: allranks does not use Gloo, DDL, oneCCL or SYCL."""
    return False


ddl_built = ccl_built = sycl_built = gloo_built


def nccl_built(verbose: bool = False) -> bool:
    """Returns whether cupy and NCCL are installed."""
    return bool(nccl_version())


def nccl_version() -> int:
    """Returns the version of the installed NCCL, as 22203 for 2.22.3; 0 without cupy or NCCL."""
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError:
        return 0
    return int(nccl.get_version()) if getattr(nccl, "available", False) else 0


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables while the block runs; None removes a variable."""
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
    """Returns whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number of ranks is 1, 2, 4, 8, …."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """Returns a list cut into ``parts`` lists, whose lengths differ by at most one."""
    size, longer = divmod(len(items), parts)
    cuts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(cuts)]


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether a version (``2.21.0-rc1``) is at least another one (``2.16.0``)."""
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    return (*numbers, 0, 0, 0)[:3]
