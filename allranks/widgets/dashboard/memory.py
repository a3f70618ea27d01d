"""The memory of each rank, and of its GPU, over the time of a cell: about one look a second."""

from __future__ import annotations

from array import array

from allranks.records.telemetry import Pulse
from allranks.widgets.dashboard.curves import Curves, Key
from allranks.widgets.dashboard.numbers import nbytes
from allranks.widgets.dashboard.table import Table

RANKS, GPUS = "memory in MB, by second", "GPU memory in MB, by second"
_MB = 1e6
#: Memory that changes by less is not worth a picture that nobody has asked for.
_CHANGE_MB, _CHANGE_SHARE = 100, 0.1
_ROWS = 16


class Memory:
    """What ranks have told of their memory in one cell; ``asked``, it is shown in any case."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.asked = False

    def take(self, pulse: Pulse, seconds: float) -> None:
        """Takes in what a rank has now, so many seconds after the cell began."""
        for name, size in ((RANKS, pulse.rss_nbytes), (GPUS, pulse.gpu_nbytes)):
            if size > 0:
                at, value = array("d", (seconds,)), array("d", (size / _MB,))
                self.curves.add(Key(name, pulse.rank, ""), at, value)

    @property
    def shown(self) -> list[str]:
        """The names of the curves that are worth a picture."""
        return [name for name in self.curves.names if self.asked or self._changes(name)]

    def _changes(self, name: str) -> bool:
        for series in self.curves.of(name).values():
            values = [*series.values, series.last[1]]
            if max(values) - min(values) >= max(_CHANGE_MB, _CHANGE_SHARE * max(values)):
                return True
        return False

    def tables(self) -> list[Table]:
        """Returns what each rank had first, at most and last."""
        found = []
        for name in self.shown:
            rows = []
            for key, series in list(self.curves.of(name).items())[:_ROWS]:
                values = [*series.values, series.last[1]]
                sizes = (values[0], max(values), values[-1])
                rows.append([f"rank {key.rank}", *(nbytes(size * _MB) for size in sizes)])
            title = name.partition(" in ")[0]
            found.append(Table(title, ["", "first", "most", "last"], rows))
        return found
