"""Numbers as people read them: 0.0123, 1.5 ms, 4 MB."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float, digits: int = 4) -> str:
    """Returns a number with so many digits, as ``0.01234`` or ``1.5e-07``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}"


def labels(values: Sequence[float]) -> list[str]:
    """Returns different numbers as different words, with as few digits as that takes."""
    for digits in range(4, 17):
        words = [number(value, digits) for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def seconds(value: float) -> str:
    """Returns a duration, as ``12.3 s``, ``4.5 ms`` or ``67 µs``."""
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.0f} µs"


def nbytes(value: float) -> str:
    """Returns a size, as ``4 MB``, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def gbps(value: float | None) -> str:
    """Returns a bandwidth, or n/a where there is none."""
    return "n/a" if value is None else f"{nbytes(value * 1e9)}/s"
