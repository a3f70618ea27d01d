"""The features: one package for each, and the list of them. The core works without.

A feature's package has a module for each side on which it does something:

- ``host.py``, loaded in the agent of each host before it starts the ranks;
- ``rank.py``, loaded there before the ranks are forked, which have it then;
- ``notebook.py``, loaded once in the notebook.

Each sets ``FEATURE`` to a subclass of `allranks.engine.features.HostFeature`,
`allranks.engine.features.RankFeature` or `allranks.cluster.features.NotebookFeature`. Other
distributions add features by the entry point ``allranks.features``, whose value is a package made
in the same way.

Only `allranks.agent` and `allranks.notebook` import this package; the core does not. The notebook's
part of the other features is still in `allranks.cluster`, `allranks.magics` and
`allranks.ensemble`. Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from functools import cache
from typing import Any

#: Packages below this one, in the order in which their hooks are called.
BUILT_IN: tuple[str, ...] = (
    "horovod_alias",
    "torch_jax",
    "prompts",
    "rank_widgets",
    "profile",
    "gpu",
    "heal",
    "attach",
    "ensemble",
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
    name = f"{package}.{side}"
    if importlib.util.find_spec(name) is None:
        return []
    return [importlib.import_module(name).FEATURE]


@cache
def _of_others(group: str) -> tuple[str, ...]:
    # The look-up takes up to 50 ms.
    return tuple(entry.value for entry in importlib.metadata.entry_points(group=group))
