"""Reading the ``ALLRANKS_…`` environment variables. Both sides."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

from allranks.errors import UsageError

#: The options with which the kernel "allranks" starts its ranks: those of ``%distributed start``.
START_WITH = "ALLRANKS_START"


def chosen(name: str, choices: Sequence[str], default: str) -> str:
    """Returns the value of a variable, one of some words; the default where it is not set.

    Raises:
        UsageError: it has another value.
    """
    value = os.environ.get(name, default)
    if value not in choices:
        words = ", ".join(choices[:-1])
        raise UsageError(
            f"expected {name} to be {words} or {choices[-1]}, found {value!r}. "
            f"Unset it for {default}."
        )
    return value


def seconds(name: str, default: float) -> float:
    """Returns the seconds of a variable; the default where it is not set.

    Raises:
        UsageError: it is no number above 0.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise UsageError(
            f"expected {name} to be seconds above 0, found {value!r}. Unset it for {default:g}."
        )
    return found


_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def nbytes(name: str, default: int, least: int) -> int:
    """Returns the bytes of a variable like ``500 MB``; the default where it is not set.

    Raises:
        UsageError: it is no such number, or less than ``least``.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    found = re.fullmatch(r"\s*([0-9.]+)\s*(|kB|MB|GB|TB)\s*", value)
    try:
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except ValueError:
        size = 0
    if size < least:
        raise UsageError(
            f"expected {name} to be a size of {least:,} bytes or more, as 500 MB, found {value!r}. "
            f"Unset it for {default:,} bytes."
        )
    return size
