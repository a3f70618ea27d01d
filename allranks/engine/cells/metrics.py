"""``log(step=…, loss=…)``: numbers that a cell names, on their way to the notebook's curves."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

from allranks.errors import UsageError

#: So many values may wait to be sent: a hundred thousand a second and more get through.
_WAITING = 50_000


class Metrics:
    """Collects what a rank logs until the wire takes it; may be used from any thread."""

    def __init__(self) -> None:
        self._points: deque[tuple[str, str, float, float]] = deque()
        self._next: dict[tuple[str, str], float] = {}
        self.dropped = 0

    def log(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        step: float | None = None,
        member: object = "",
        **named: Any,
    ) -> None:
        """Sends the named numbers to the notebook, which draws one curve per name.

        Example:
            ``log(step=i, loss=loss, accuracy=right / count)``

        Args:
            values: more of them, with names that are not valid in Python, as ``{"val/loss": 0.3}``.
            step: where on the horizontal axis; by default 0, 1, 2, … for each name.
            member: which model of several on this rank; each has its own curve.
            named: numbers, or arrays of one element.

        Raises:
            UsageError: a value has no name, or it or the step is not a number.
        """
        if not isinstance(values, Mapping | None):
            raise UsageError(
                f"log expected named numbers, found {values!r:.60}. "
                "Type for example: log(loss=0.5), or log({'val/loss': 0.5})"
            )
        if values is not None:
            named = {**values, **named}
        points, who = self._points, str(member)
        given = None if step is None else _number("step", step)
        if len(points) >= _WAITING:
            self.dropped += len(named)
            return
        for name, value in named.items():
            number = value if type(value) is float else _number(name, value)
            at = self._next.get((name, who), 0.0) if given is None else given
            self._next[name, who] = at + 1.0
            points.append((name, who, at, number))

    def begin(self) -> None:
        """A cell starts: steps count from 0 again."""
        self._points.clear()
        self._next.clear()
        self.dropped = 0

    def take(self) -> tuple[list[list[Any]], bytes]:
        """Returns what was logged since the last time (see ``allranks.records.telemetry.Points``).

        May be asked from another thread.
        """
        series: dict[tuple[str, str], array[float]] = {}
        for _ in range(len(self._points)):
            name, who, at, number = self._points.popleft()
            pairs = series.get((name, who))
            if pairs is None:
                pairs = series[name, who] = array("d")
            pairs.append(at)
            pairs.append(number)
        told = [[name, who, len(pairs) // 2] for (name, who), pairs in series.items()]
        return told, b"".join(pairs.tobytes() for pairs in series.values())


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)
    try:
        # An array's own float() takes one dimension less than item() does.
        return float(value if item is None else item())
    except (TypeError, ValueError):
        shape = getattr(value, "shape", None)
        found = f"{type(value).__name__} of shape {tuple(shape)}" if shape else f"{value!r:.60}"
        raise UsageError(
            f"log({name}=…) expected one number, found {found}. "
            f"Type for example: log({name}=float(value))"
        ) from None


#: This process's own, which the cells' ``log`` and callbacks write to.
process = Metrics()
log = process.log
