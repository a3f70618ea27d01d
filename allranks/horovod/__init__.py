"""Horovod's name for allranks: ``import allranks.horovod`` lets ``import horovod`` find allranks.

In a notebook that is so on every rank without this line, and nowhere where Horovod itself is
installed. ``python -m allranks.horovod train.py`` runs a script as it is. Both sides; standard
library only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from allranks.errors import UsageError
from allranks.horovod import alias

__version__ = "0.28.1"
"""The version of Horovod whose functions these are."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[Any]:
    """Calls a function on every rank and returns its results, in order of rank.

    In the notebook and in a script it is `allranks.run`. In a cell on the ranks, the ranks that
    are there call the function, and each of them gets all results.

    Args:
        func: what every rank calls, with ``args`` and ``kwargs``.
        num_proc: how many ranks; the older name ``np`` is taken as well.
        options: as for `allranks.run`.

    Raises:
        UsageError: on the ranks, another number of them was asked for.

    Collective over all ranks, on the ranks.
    """
    if not on_rank():
        modules = tuple(name for name in alias.OLD_SCRIPTS if name in sys.modules)
        result: list[Any] = importlib.import_module("allranks").run(
            Called(func, modules) if modules else func, args, kwargs, num_proc, **options
        )
        return result
    collectives = importlib.import_module("allranks.collectives")
    asked = options.get("np") if num_proc is None else num_proc
    if asked != collectives.size():
        raise UsageError(
            f"on the ranks, run() calls the function on all {collectives.size()} that are there, "
            f"found num_proc={asked}. Type: run(func, num_proc={collectives.size()}), or call "
            "allranks.run in the notebook."
        )
    gathered: list[Any] = collectives.allgather_object(func(*args, **(kwargs or {})))
    return gathered


class Called(NamedTuple):
    """A function that finds on a rank what a script has imported above it.

    A function is sent with the modules that it names, but by allranks' own names: on the rank
    nobody would have imported ``horovod.tensorflow``, and no older line would be mended.
    """

    func: Callable[..., Any]
    modules: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Imports the modules and calls the function."""
        for name in self.modules:
            importlib.import_module(name)
        return self.func(*args, **kwargs)


def on_rank() -> bool:
    """Whether this process is a rank whose collectives have begun."""
    collectives = sys.modules.get("allranks.collectives")
    return collectives is not None and bool(collectives.is_initialized())


alias.install()
