"""How long ranks stay, as it is typed and as it is told."""

from __future__ import annotations

import re

from allranks.errors import UsageError

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MOST_DAYS = 365
_TYPED = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def seconds_of(text: str, command: str) -> float:
    """Returns the seconds of a time as ``90s``, ``30m``, ``2h`` or ``1d``.

    Raises:
        UsageError: it is none.
    """
    found = _TYPED.fullmatch(text)
    if found is None or not float(found[1]):
        raise UsageError(
            f"expected a time as 90s, 30m, 2h or 1d, found {text!r}. "
            f"Type for example: %distributed {command} 30m"
        )
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > _MOST_DAYS * _UNITS["d"]:
        raise UsageError(
            f"expected a time of at most {_MOST_DAYS}d, found {text!r:.60}. "
            f"Type for example: %distributed {command} 7d"
        )
    return seconds


def as_time(seconds: float) -> str:
    """Returns it as ``45 s``, ``30 min`` or ``2 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h"
