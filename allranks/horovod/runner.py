"""``horovod.run``, and the names that other packages import from ``horovod.runner``.

Both sides; standard library only.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from allranks.errors import UsageError

# As in `common`: this module is used for every module below `horovod.runner`.
__path__: list[str] = []
common = env = threads = util = sys.modules[__name__]

# Scripts that import these were written for an older TensorFlow.
OLD_SCRIPTS = ("horovod.tensorflow", "horovod.keras")
LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
# Names of variables that other processes must not inherit.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD"}
_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[Any]:
    """Calls a function on every rank and returns its results, in order of rank.

    In the notebook and in a script this is `allranks.run`. In a cell on the ranks, these ranks call
    the function, and each of them gets all results.

    Args:
        func: called on every rank with ``args`` and ``kwargs``.
        num_proc: how many ranks; the older name ``np`` is accepted as well.
        options: as for `allranks.run`.

    Raises:
        UsageError: on the ranks, if there are more or fewer of them.

    Collective over all ranks, on the ranks.
    """
    collectives: Any = sys.modules.get("allranks.collectives")
    if collectives is None or not collectives.is_initialized():
        modules = tuple(name for name in OLD_SCRIPTS if name in sys.modules)
        result: list[Any] = importlib.import_module("allranks").run(
            _WithImports(func, modules) if modules else func, args, kwargs, num_proc, **options
        )
        return result
    asked = options.get("np") if num_proc is None else num_proc
    if asked != collectives.size():
        raise UsageError(
            f"on the ranks, run() calls the function on all {collectives.size()} that are there, "
            f"found num_proc={asked}. Type: run(func, num_proc={collectives.size()}), or call "
            "allranks.run in the notebook."
        )
    gathered: list[Any] = collectives.allgather_object(func(*args, **(kwargs or {})))
    return gathered


class _WithImports(NamedTuple):
    """A function that first imports on a rank the modules that its script has imported.

    A pickled function refers to modules by their names in allranks. But only the name
    ``horovod.tensorflow`` adds the older names of TensorFlow and Keras on the rank.
    """

    func: Callable[..., Any]
    modules: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in self.modules:
            importlib.import_module(name)
        return self.func(*args, **kwargs)


def is_exportable(v: str) -> bool:
    """Returns whether other processes may inherit a variable of this name."""
    return not any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns the rank and the number of ranks that the launcher has set; 0 of 1 without one."""
    for rank, size in _RANK_AND_SIZE:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Returns a started thread that calls ``target(*args)``; ``silent`` drops its exceptions."""
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"args needs a tuple: found {type(args).__name__}. Type: args=(x,)")

    def quietly(*given: Any) -> None:
        with suppress(Exception):
            target(*given)

    thread = threading.Thread(
        target=quietly if silent else target, args=tuple(args), name=name, daemon=daemon
    )
    thread.start()
    return thread
