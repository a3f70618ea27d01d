"""Modules that every rank begins with."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from allranks.errors import MissingDependency, UsageError

_EXTRAS = {"tensorflow": "allranks[tensorflow]", "keras": "allranks[tensorflow]"}


def check_preload(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of modules that can be imported before the ranks are made.

    Args:
        names: one a module, or all in one text with commas between.

    Raises:
        UsageError: one of them is no module's name.
        MissingDependency: one of them is not installed.
    """
    if isinstance(names, str):
        names = names.split(",") if names else ()
    try:
        chosen = tuple(name.strip() for name in names)
    except (TypeError, AttributeError):
        raise _no_names(names) from None
    for name in chosen:
        if not all(part.isidentifier() for part in name.split(".")):
            raise _no_names(name)
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"expected {package} to preload, found none installed. "
                f"Type: pip install '{_EXTRAS.get(package, package)}'"
            )
    return chosen


def _no_names(found: object) -> UsageError:
    return UsageError(
        f"expected names of modules, found {found!r}. Type for example: --preload tensorflow"
    )
