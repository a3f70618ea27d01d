"""One member of an ensemble: its values, how it fared, and what it left."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.cluster.variables import reading
from allranks.errors import UsageError
from allranks.widgets.dashboard.curves import Series
from allranks.widgets.dashboard.tables import number, seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from allranks.ensemble.arrays import Place

#: So many points of each history are kept; of longer ones, every second, fourth, … and the last.
_POINTS = 20_000

#: What can become of a member.
WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
STOPPED, STOPPED_EARLY = "stopped", "stopped early"
#: A store keeps these, and a rerun does not run them again.
ENDED = (FINISHED, FAILED, STOPPED_EARLY)


class History(NamedTuple):
    """What a member logged under one name: (points,) steps, and as many values, float64."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(eq=False)
class Member:
    """One member, as ``runs[3]``.

    Attributes:
        number: its place in the ensemble, from 0.
        values: its parameters.
        state: waiting, running, finished, failed, stopped, or stopped early.
        ranks: the ranks that it runs on, or ran on last.
        seconds: how long it took, or None.
        error: why it failed, in a line; ``traceback`` is the whole report.
        text: what its result is, in a line.
    """

    number: int
    values: dict[str, Any]
    state: str = WAITING
    ranks: tuple[int, ...] = ()
    seconds: float | None = None
    error: str = ""
    traceback: str = field(default="", repr=False)
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict, repr=False)
    deaths: int = field(default=0, repr=False)
    place: Place | None = field(default=None, repr=False)
    problem: str = field(default="", repr=False)
    series: dict[str, Series] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """The parameters as a person types them, as ``lr=0.1 seed=3``."""
        return " ".join(f"{name}={short(value)}" for name, value in self.values.items())

    @property
    def rank(self) -> int | None:
        """The first of its ranks; None where it has not run."""
        return self.ranks[0] if self.ranks else None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of everything it logged, and every number in its result."""
        return {name: series.last[1] for name, series in self.series.items()} | self.numbers

    @property
    def history(self) -> dict[str, History]:
        """What it logged, by name; of long curves every second, fourth … value and the last."""
        import numpy as np

        return {
            name: History(np.array(series.steps), np.array(series.values))
            for name, series in self.series.items()
        }

    @property
    def result(self) -> Any:
        """What the body has left in ``result``, fetched now; a fresh copy each time.

        None where the member has not finished, or has left nothing.

        Raises:
            UsageError: the result could not be sent, or cannot be read here.
        """
        if self.problem:
            raise UsageError(
                f"expected a result that can be sent and kept, found in member {self.number}: "
                f"{self.problem}. Leave arrays and plain values in it, as model.get_weights()."
            )
        try:
            with reading(f"in member {self.number}"):
                return self.place.load() if self.place is not None else None
        except OSError as error:
            raise UsageError(
                f"the result of member {self.number} is not there any longer: {error}. "
                "Run the cell again."
            ) from error

    def log(self, name: str, steps: array[float], values: array[float]) -> None:
        """Takes in what it logged."""
        if name not in self.series:
            self.series[name] = Series(len(self.series))
        self.series[name].add(steps, values, _POINTS)

    def again(self) -> None:
        """Forgets how it fared: it is to run once more."""
        self.state, self.ranks, self.seconds = WAITING, (), None
        self.error = self.traceback = self.text = self.problem = ""
        self.numbers, self.series, self.place = {}, {}, None

    def become(self, other: Member) -> None:
        """Takes over how another one fared, with the same values."""
        for name in ("state", "ranks", "seconds", "error", "traceback", "text", "numbers", "place",
                     "problem", "series"):  # fmt: skip
            setattr(self, name, getattr(other, name))

    def __repr__(self) -> str:
        took = "" if self.seconds is None else f" in {seconds(self.seconds)}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        told = ", ".join(f"{name} {number(value)}" for name, value in self.metrics.items())
        said = f": {self.error or told}" if self.error or told else ""
        return f"<member {self.number} ({self.label}) {self.state}{where}{took}{said}>"


def comparable(value: Any) -> float | int | str:
    """Returns a parameter's value as a table sorts by it: a number, or a few characters."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A page has no whole numbers beyond these, and JSON none that are not finite.
    return value if is_number and abs(value) < 2**53 else short(value)


def short(value: Any) -> str:
    """Returns a parameter's value in a few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _cut(value)
    shape = getattr(value, "shape", None)
    if shape:
        return f"<{type(value).__name__} {tuple(shape)}>"
    told = f"<{type(value).__name__}>"
    if isinstance(value, Mapping | list | tuple | int | None | type):
        try:
            return _cut(getattr(value, "__name__", None) or repr(value))
        except Exception:  # what is in it may refuse to be shown in its own way
            return told
    return getattr(value, "__name__", told)


def _cut(text: str) -> str:
    text = text if len(text) <= 40 else f"{text[:39]}…"
    # A table has no place for lines and colours, nor a notebook for half a character.
    return text if text.isprintable() else repr(text)[1:-1]
