"""An allreduce that ranks have run and told: its steps, what it took, what the model foretells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from allranks.records.predictions import Prediction
from allranks.records.steps import Run


@dataclass(frozen=True)
class Explained:
    """One allreduce of a cluster's ranks."""

    run: Run
    """Every message, as the ranks recorded it."""
    seconds: float
    """Shortest time of the same allreduce without a recorder, each as long as its slowest rank."""
    repeats: int
    """How many were timed."""
    prediction: Prediction
    """Of the model, fitted to allreduces of other sizes by the same ranks."""

    def to_dict(self) -> dict[str, Any]:
        """The record as dictionaries, lists, numbers and text, ready for JSON."""
        return {
            "run": self.run.to_dict(),
            "seconds": self.seconds,
            "repeats": self.repeats,
            "prediction": asdict(self.prediction),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Explained:
        """The record that ``to_dict`` turned into ``data``, also after a trip through JSON."""
        told = {key: value for key, value in data["prediction"].items() if key != "simulated"}
        run, prediction = Run.from_dict(data["run"]), Prediction(**told)
        return cls(run, data["seconds"], data["repeats"], prediction)
