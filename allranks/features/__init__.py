"""The features: one package or module for each, and the list of them. The core works without.

A feature that does something on a rank only may be a single module. Any other one is a package with
a module for each side:

- ``host.py``, loaded in the agent of each host before it starts the ranks;
- ``rank.py``, loaded there before the ranks are forked, which have it then;
- ``notebook.py``, loaded once in the notebook.

Each module sets ``FEATURE`` to a subclass of `allranks.engine.host.features.HostFeature`,
`allranks.engine.features.RankFeature` or `allranks.cluster.features.NotebookFeature`. Other
distributions add features by the entry point ``allranks.features``, whose value is a package or
module made in the same way.

Only `allranks.agent`, `allranks.notebook`, `allranks.px`, `allranks.relay` and ``allranks.run``
import this package; the core does not.
Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Any

from allranks import installed

#: What is below this package, in the order in which the hooks are called.
BUILT_IN: tuple[str, ...] = (
    "horovod_alias",
    "tensorflow_files",
    "shared_files",
    "progress_bars",
    "torch_jax",
    "ipyparallel",
    "prompts",
    "rank_widgets",
    "output_replay",
    "hosts",
    "attach",  # before those that ask the ranks after a cell, which an interrupt may end
    "profile",
    "verdict",
    "gpu",
    "heal",
    "ensemble",
    "toolbar",
    "busy_kernel",
    "completion",
    "classroom",
    "sinks",
    "history",
    "simulate",
    "debugger",
    "grading",
    "pytest",
)
GROUP = "allranks.features"


def load(side: str) -> list[Any]:
    """Returns the classes of all features for one side: ``host``, ``rank`` or ``notebook``.

    A feature of another distribution that cannot be imported is left out, with a warning.
    """
    found = []
    for name in BUILT_IN:
        package = f"{__name__}.{name}"
        if importlib.util.find_spec(package) is not None:  # else it was deleted
            found += _side(package, side)
    for package in _of_others(GROUP):
        try:
            found += _side(package, side)
        except Exception as error:
            warnings.warn(
                f"expected the feature {package} to be importable, found "
                f"{type(error).__name__}: {error}. It is left out: install it again, or remove it.",
                stacklevel=2,
            )
    return found


def _side(package: str, side: str) -> list[Any]:
    spec, name = importlib.util.find_spec(package), f"{package}.{side}"
    if spec is not None and spec.submodule_search_locations is None:
        names = [package] if side == "rank" else []
    else:
        names = [name] if importlib.util.find_spec(name) is not None else []
    return [importlib.import_module(name).FEATURE for name in names]


@cache
def _of_others(group: str) -> tuple[str, ...]:
    # The look-up takes up to 50 ms.
    return tuple(entry.value for entry in installed.entry_points(group))
