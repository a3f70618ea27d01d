"""What the environment's ``ALLRANKS_…`` variables say. Both sides."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

from allranks.errors import UsageError

#: What the ranks of the kernel "allranks" are started with, as it would stand behind
#: ``%distributed start``.
START_WITH = "ALLRANKS_START"


def horovod() -> str:
    """Returns ``on``, ``off``, or ``name``: found, but older lines of scripts are not mended.

    Raises:
        UsageError: ALLRANKS_HOROVOD says something else.
    """
    return chosen("ALLRANKS_HOROVOD", ("on", "name", "off"), "on")


def chosen(name: str, choices: Sequence[str], default: str) -> str:
    """Returns which of some words a variable says; the default where it is not set.

    Raises:
        UsageError: it says something else.
    """
    said = os.environ.get(name, default)
    if said not in choices:
        words = ", ".join(choices[:-1])
        raise UsageError(
            f"expected {name} to be {words} or {choices[-1]}, found {said!r}. "
            f"Unset it for {default}."
        )
    return said


def seconds(name: str, default: float) -> float:
    """Returns how many seconds a variable says; the default where it is not set.

    Raises:
        UsageError: it says no number above 0.
    """
    said = os.environ.get(name)
    if said is None:
        return default
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise UsageError(
            f"expected {name} to be seconds above 0, found {said!r}. Unset it for {default:g}."
        )
    return found


_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def nbytes(name: str, default: int, least: int) -> int:
    """Returns how many bytes a variable says, as ``500 MB``; the default where it is not set.

    Raises:
        UsageError: it says no such number, or less than ``least``.
    """
    said = os.environ.get(name)
    if said is None:
        return default
    found = re.fullmatch(r"\s*([0-9.]+)\s*(|kB|MB|GB|TB)\s*", said)
    try:
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except ValueError:
        size = 0
    if size < least:
        raise UsageError(
            f"expected {name} to be a size of {least:,} bytes or more, as 500 MB, found {said!r}. "
            f"Unset it for {default:,} bytes."
        )
    return size
