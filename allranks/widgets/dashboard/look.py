"""How curves are drawn: what a reader has chosen on the page, for the picture without scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MOST_SMOOTHING = 0.99


@dataclass(frozen=True)
class Look:
    """How curves are drawn.

    ``log`` None: on a log scale where they fall steeply; ``mean`` None: as one band where there
    are many. ``smoothing`` is the weight of what was before. One may be ``selected``. Members of
    an ensemble are ``ordered`` by a column, a parameter's name behind ``=``, perhaps ``down``.
    """

    log: bool | None = None
    mean: bool | None = None
    smoothing: float = 0.0
    selected: int | None = None
    ordered: str = "number"
    down: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Look:
        """Returns what a page has told of itself; there an axis is linear until it is clicked."""
        mean, selected = settings.get("mean"), settings.get("selected")
        smoothing = settings.get("smoothing")
        smoothing = smoothing if isinstance(smoothing, int | float) else 0.0
        return cls(
            log=bool(settings.get("log")),
            mean=None if mean is None else bool(mean),
            smoothing=max(0.0, min(smoothing, _MOST_SMOOTHING)),
            selected=selected if isinstance(selected, int) else None,
            ordered=str(settings.get("sorted", "number")),
            down=bool(settings.get("down")),
        )


#: Where there is no page on which anybody could choose.
AS_IT_FALLS = Look()


def smoothed(points: list[tuple[float, float]], amount: float) -> list[tuple[float, float]]:
    """Returns an exponential mean of finite values that does not start at 0, as on the page."""
    if not amount:
        return points
    mean = weight = 0.0
    found = []
    for x, y in points:
        mean = amount * mean + (1 - amount) * y
        weight = amount * weight + (1 - amount)
        found.append((x, mean / weight))
    return found
