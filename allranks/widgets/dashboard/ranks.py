"""The state of every rank of a cell, as one tile for each rank, and its memory over time."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allranks.records.ranks import label
from allranks.records.telemetry import Pulse
from allranks.records.wire import Hello
from allranks.widgets.dashboard.curves import Curves, Key
from allranks.widgets.dashboard.tables import Table, nbytes

_LEFT = {
    "ok": "finished",
    "error": "failed",
    "waiting": "waiting",
    "interrupted": "interrupted",
    "lost": "lost",
    "replaced": "replaced",
}
#: What a rank is doing that waits in a call, as ``waiting in allreduce(Sum) for rank 1``.
_WAITS = re.compile(r"waiting in (.+) for (.+)")
#: States in which it is worth saying which ranks they are.
_NAMED = ("failed", "interrupted", "lost", "replaced")
_RANK_MEMORY, _GPU_MEMORY = "memory in MB, by second", "GPU memory in MB, by second"
_MB = 1e6
#: Memory that changes by less is not worth a picture that nobody has asked for.
_CHANGE_MB, _CHANGE_SHARE = 100, 0.1
_MEMORY_ROWS = 16


@dataclass
class Tile:
    """One rank. ``state`` is running, waiting, idle, finished, failed, interrupted,
    lost or replaced.

    ``activity`` is what it waits in, or for; ``waits_for`` the ranks that it waits for, if any.
    """

    rank: int
    host: str
    device: str
    pid: int
    state: str = "running"
    activity: str = ""
    waits_for: str = ""
    line: str = ""
    rss_nbytes: int = 0
    cpu_percent: int = -1
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: int = -1
    gpu_celsius: int = -1
    step: float | None = None
    member: int | None = None
    gone: bool = False


class Tiles:
    """The tiles of the ranks that run a cell."""

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.tiles = {h.rank: Tile(h.rank, h.host, h.device, h.pid) for h in hellos}
        self._changed = set(self.tiles)

    def take(self, pulse: Pulse) -> None:
        """Takes in what a rank is doing now."""
        tile = self.tiles.get(pulse.rank)
        if tile is None or tile.gone:
            return
        tile.state = "waiting" if pulse.activity else "running"
        waits = _WAITS.fullmatch(pulse.activity)
        tile.activity, tile.waits_for = waits.groups() if waits else (pulse.activity, "")
        tile.line = pulse.line
        tile.rss_nbytes, tile.gpu_nbytes = pulse.rss_nbytes, pulse.gpu_nbytes
        tile.gpu_total_nbytes = pulse.gpu_total_nbytes
        tile.cpu_percent, tile.gpu_percent = pulse.cpu_percent, pulse.gpu_percent
        tile.gpu_celsius = pulse.gpu_celsius
        self._changed.add(pulse.rank)

    def at_step(self, rank: int, step: float | None) -> None:
        """Takes in the step that a rank logged last."""
        tile = self.tiles.get(rank)
        if tile is not None and tile.step != step:
            tile.step = step
            self._changed.add(rank)

    def works_on(self, rank: int, member: int | None) -> None:
        """Takes in which member of an ensemble a rank runs now; None where it runs none."""
        tile = self.tiles[rank]
        tile.member, tile.state = member, "idle" if member is None else "running"
        tile.activity = tile.waits_for = tile.line = ""
        tile.cpu_percent, tile.step = -1, None
        self._changed.add(rank)

    def left(self, rank: int, status: str) -> None:
        """Takes in how a rank left the cell."""
        tile = self.tiles.get(rank)
        if tile is not None:
            tile.state, tile.gone = _LEFT[status], True
            tile.activity = tile.waits_for = ""
            tile.cpu_percent = tile.gpu_percent = -1
            self._changed.add(rank)

    def news(self) -> list[dict[str, Any]]:
        """Returns the tiles that have changed since the last time."""
        # asdict() copies every value: for 64 ranks, ten times a second, a core would feel it.
        changed = [vars(self.tiles[rank]).copy() for rank in sorted(self._changed)]
        self._changed.clear()
        return changed

    def everything(self) -> list[dict[str, Any]]:
        """Returns all tiles."""
        return [vars(tile).copy() for tile in self.tiles.values()]

    def said(self) -> str:
        """Returns how the ranks are, as ``3 running, 1 waits for rank 1``."""
        found: dict[tuple[str, str], list[int]] = {}
        for tile in self.tiles.values():
            found.setdefault((tile.state, tile.waits_for), []).append(tile.rank)
        # Those that go on come first.
        order = sorted(found.items(), key=lambda pair: pair[0][0] not in ("running", "idle"))
        return ", ".join(_said(*key, ranks, len(found) == 1) for key, ranks in order)


def _said(state: str, whom: str, ranks: list[int], every: bool) -> str:
    if every:
        return f"{state} for {whom}" if whom else state
    if state in _NAMED:
        return f"{label(ranks)} {state}"
    if whom:
        return f"{len(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {whom}"
    return f"{len(ranks)} {state}"


class Memory:
    """What ranks have told of their memory in one cell; ``asked``, it is shown in any case."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.asked = False

    def take(self, pulse: Pulse, seconds: float) -> None:
        """Takes in what a rank has now, so many seconds after the cell began."""
        for name, size in ((_RANK_MEMORY, pulse.rss_nbytes), (_GPU_MEMORY, pulse.gpu_nbytes)):
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
            for key, series in list(self.curves.of(name).items())[:_MEMORY_ROWS]:
                values = [*series.values, series.last[1]]
                sizes = (values[0], max(values), values[-1])
                rows.append([f"rank {key.rank}", *(nbytes(size * _MB) for size in sizes)])
            title = name.partition(" in ")[0]
            found.append(Table(title, ["", "first", "most", "last"], rows))
        return found
