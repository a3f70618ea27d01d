"""The data of one cell: what its ranks report while they run it."""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from allranks.records.config import size_text
from allranks.records.ranks import ENDINGS, IDLE, RUNNING, Activity, counted, label
from allranks.records.telemetry import Points, Pulse, Strip, Telemetry, Timings
from allranks.records.wire import Hello, Output
from allranks.widgets.dashboard.curves import Curves, Key, Logged
from allranks.widgets.dashboard.tables import Table
from allranks.widgets.dashboard.timings import Strips, TimingTable


class PanelSection:
    """One section of a cell's panel; an object is made for each cell.

    Args:
        ranks: the ranks that run the cell.

    Attributes:
        title: the heading of the section; no other section has the same.
    """

    title = ""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def take(self, record: Telemetry, payloads: Sequence[bytes]) -> None:
        """Handles a record of one rank.

        Args:
            record: any record of ``allranks.records.telemetry``.
            payloads: the arrays that belong to it, as bytes.
        """

    def worth_showing(self) -> bool:
        """Returns whether the section alone is a reason to show the panel."""
        return False

    def tables(self) -> Sequence[Table]:
        """Returns the section's tables; a section without tables and pictures is hidden."""
        return ()

    def pictures(self) -> Sequence[tuple[str, str]]:
        """Returns the section's pictures: SVG without scripts, and the text that replaces it."""
        return ()


#: A list, not a lookup of entry points: it is read at the begin of every cell.
SECTIONS: list[type[PanelSection]] = []


def add_section(section: type[PanelSection]) -> None:
    """Adds a section to the panels of all cells that begin from now on.

    A section that has the title of an earlier one replaces it, so that a cell which defines a
    section can be run again.

    Raises:
        ValueError: the section has no title.
    """
    if not section.title:
        raise ValueError(f"expected a title of {section.__name__}, found none. Set: title = ...")
    SECTIONS[:] = [one for one in SECTIONS if one.title != section.title]
    SECTIONS.append(section)


_RANK_MEMORY, _GPU_MEMORY = "memory in MB, by second", "GPU memory in MB, by second"
_MB = 1e6
#: A smaller change of memory does not show its picture by itself.
_CHANGE_MB, _CHANGE_SHARE = 100, 0.1
_MEMORY_ROWS = 16


@dataclass
class Tile:
    """One rank, and what it does."""

    rank: int
    host: str
    device: str
    pid: int
    doing: Activity = RUNNING
    line: str = ""
    rss_nbytes: int = 0
    cpu_percent: int = -1
    gpu_nbytes: int = 0
    gpu_own_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: int = -1
    gpu_celsius: int = -1
    step: float | None = None
    member: int | None = None
    gone: bool = False

    def fields(self) -> dict[str, Any]:
        """Returns it for the front end, without what is known of GPUs only."""
        # asdict() copies every value: for 64 ranks, ten times a second, a core would feel it.
        found = {
            name: value
            for name, value in vars(self).items()
            if name not in _OF_GPUS or value != _OF_GPUS[name]
        }
        state = self.doing.state
        shown = {"state": state.word, "mark": state.mark, "look": state.look}
        return {**found, **shown, "doing": self.doing.brief}


#: The fields that say nothing of a rank without a GPU, and what they have then.
_OF_GPUS = {
    name: getattr(Tile, name)
    for name in ("gpu_nbytes", "gpu_own_nbytes", "gpu_total_nbytes", "gpu_percent", "gpu_celsius")
}


class Tiles:
    """The tiles of the ranks that run a cell."""

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.tiles = {h.rank: Tile(h.rank, h.host, h.device, h.pid) for h in hellos}
        self._changed = set(self.tiles)

    def take(self, pulse: Pulse) -> None:
        tile = self.tiles.get(pulse.rank)
        # A pulse may arrive after the reply of its rank.
        if tile is None or tile.gone:
            return
        tile.doing, tile.line = pulse.doing, pulse.line
        tile.rss_nbytes, tile.gpu_nbytes = pulse.rss_nbytes, pulse.gpu_nbytes
        tile.gpu_own_nbytes, tile.gpu_total_nbytes = pulse.gpu_own_nbytes, pulse.gpu_total_nbytes
        tile.cpu_percent, tile.gpu_percent = pulse.cpu_percent, pulse.gpu_percent
        tile.gpu_celsius = pulse.gpu_celsius
        self._changed.add(pulse.rank)

    def at_step(self, rank: int, step: float | None) -> None:
        tile = self.tiles.get(rank)
        if tile is not None and tile.step != step:
            tile.step = step
            self._changed.add(rank)

    def works_on(self, rank: int, member: int | None) -> None:
        # None: the rank is idle.
        tile = self.tiles[rank]
        tile.member, tile.doing = member, IDLE if member is None else RUNNING
        tile.line, tile.cpu_percent, tile.step = "", -1, None
        self._changed.add(rank)

    def left(self, rank: int, status: str) -> None:
        tile = self.tiles.get(rank)
        if tile is not None:
            tile.doing, tile.gone = ENDINGS[status], True
            tile.cpu_percent = tile.gpu_percent = -1
            self._changed.add(rank)

    def news(self) -> list[dict[str, Any]]:
        # The tiles that have changed since the last time.
        changed = [self.tiles[rank].fields() for rank in sorted(self._changed)]
        self._changed.clear()
        return changed

    def everything(self) -> list[dict[str, Any]]:
        return [tile.fields() for tile in self.tiles.values()]

    def said(self) -> str:
        """Returns the states of the ranks, as ``3 running, 1 waits for rank 1``."""
        doing = {rank: tile.doing for rank, tile in self.tiles.items()}
        return ", ".join(counted(doing, count_all=False))


class Memory:
    """The memory of ranks during one cell; with ``asked`` it is always shown."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.asked = False

    def take(self, pulse: Pulse, seconds: float) -> None:
        on_gpu = pulse.gpu_own_nbytes or pulse.gpu_nbytes
        for name, size in ((_RANK_MEMORY, pulse.rss_nbytes), (_GPU_MEMORY, on_gpu)):
            if size > 0:
                at, value = array("d", (seconds,)), array("d", (size / _MB,))
                self.curves.add(Key(name, pulse.rank, ""), at, value)

    @property
    def shown(self) -> list[str]:
        return [name for name in self.curves.names if self.asked or self._changes(name)]

    def _changes(self, name: str) -> bool:
        for series in self.curves.of(name).values():
            values = [*series.values, series.last[1]]
            if max(values) - min(values) >= max(_CHANGE_MB, _CHANGE_SHARE * max(values)):
                return True
        return False

    def tables(self) -> list[Table]:
        # The first, greatest and last memory of each rank.
        found = []
        for name in self.shown:
            rows = []
            for key, series in list(self.curves.of(name).items())[:_MEMORY_ROWS]:
                values = [*series.values, series.last[1]]
                sizes = (values[0], max(values), values[-1])
                rows.append([f"rank {key.rank}", *(size_text(size * _MB) for size in sizes)])
            title = name.partition(" in ")[0]
            found.append(Table(title, ["", "first", "most", "last"], rows))
        return found


#: So much text a rank is sent at once, ten times a second; and so much of what was before.
PIECE_NBYTES = 512 * 1024
BEHIND_NBYTES = 32 << 20


class Piece(NamedTuple):
    """Some bytes of a rank's output. ``skipped`` bytes before it are in the log file only.

    ``err_spans`` are the ranges of it that are standard error.
    """

    rank: int
    text: bytes
    err_spans: list[list[int]]
    skipped: int


class _RankOutput:
    """The output of a rank of another host: only what it sends for the screen can be had."""

    start = 0

    def __init__(self) -> None:
        self.at = self.known = self.start
        self.spans: list[list[int]] = []
        self._text = b""

    def take(self, batch: Output) -> None:
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                piece = rest[0].encode("utf-8", "replace")
                if kind == "err":
                    self.spans.append([self.known, self.known + len(piece)])
                self._text += piece
                self.known = len(self._text)

    def bytes(self, at: int, count: int) -> bytes:
        return self._text[at : at + count]

    def read(self, rank: int, behind_nbytes: int) -> Piece | None:
        at = max(self.at, self.known - behind_nbytes)
        skipped, self.at = at - self.at, at
        text = self.bytes(at, min(self.known - at, PIECE_NBYTES))
        if not text:
            return None
        end = self.at = at + len(text)
        spans = [[max(a, at) - at, min(b, end) - at] for a, b in self.spans if a < end and b > at]
        return Piece(rank, text, spans, skipped)


class _LogFile(_RankOutput):
    """A rank's log from where the cell began, as far as it is known to be complete."""

    def __init__(self, path: str) -> None:
        self._path = path
        with suppress(OSError):  # another process has removed it
            self.start = os.path.getsize(path)
        super().__init__()

    def take(self, batch: Output) -> None:
        self.known = max(self.known, batch.log_nbytes)
        self.spans += batch.err_spans

    def bytes(self, at: int, count: int) -> bytes:
        # What stands behind ``known`` may end in the middle of a write.
        with suppress(OSError), open(self._path, "rb") as log:
            log.seek(at)
            return log.read(count)
        return b""  # the log has been removed


class Logs:
    """The output of the ranks of one cell."""

    def __init__(self, hellos: Sequence[Hello]) -> None:
        here = socket.gethostname()
        self.paths = {h.rank: h.log for h in hellos}
        self._ranks = {
            h.rank: _LogFile(h.log) if h.host == here and os.path.exists(h.log) else _RankOutput()
            for h in hellos
        }

    def take(self, batch: Output) -> None:
        rank = self._ranks.get(batch.rank)
        if rank is not None:
            rank.take(batch)

    def read(self, behind_nbytes: int = BEHIND_NBYTES) -> list[Piece]:
        """Returns what each rank has written since the last time, in bounded pieces.

        What is farther from the end than ``behind_nbytes`` is skipped.
        """
        pieces = [reader.read(rank, behind_nbytes) for rank, reader in self._ranks.items()]
        return [piece for piece in pieces if piece is not None]

    def ends(self, nbytes: int) -> list[Piece]:
        # The last output of each rank, so much of all ranks together.
        self.rewind()
        return self.read(nbytes // max(1, len(self._ranks)))

    def rewind(self) -> None:
        # For a new reader.
        for reader in self._ranks.values():
            reader.at = reader.start


class Imports:
    """The modules that ranks import, and the ranks that have finished importing them."""

    def __init__(self) -> None:
        self._now: dict[int, str] = {}
        #: By module: the ranks that have imported it, or do.
        self.ranks: dict[str, set[int]] = {}

    def take(self, pulse: Pulse) -> None:
        self._now[pulse.rank] = pulse.importing
        if pulse.importing:
            self.ranks.setdefault(pulse.importing, set()).add(pulse.rank)

    def left(self, rank: int) -> None:
        self._now[rank] = ""

    def line(self) -> tuple[str, int, int] | None:
        """Returns the module that most ranks wait for, and how many of how many ranks have it.

        None if nothing is imported.
        """
        busy = [module for module in self._now.values() if module]
        if not busy:
            return None
        module = max(dict.fromkeys(busy), key=busy.count)
        ranks = self.ranks[module]
        done = sum(self._now[rank] != module for rank in ranks)
        return f"importing {module} on {label(sorted(ranks))}", done, len(ranks)


#: A panel appears once a rank has made this many calls and spent this time in them.
_BUSY_CALLS, _BUSY_SECONDS = 20, 1.0


class MemberRows(Protocol):
    """Runs of a cell that a page shows in place of ranks: a row of a table for each."""

    def news(self) -> dict[str, Any] | None:
        # The changes since the last time; None without any.
        ...

    def everything(self) -> dict[str, Any]:
        # All members, in the form of `news`.
        ...


class CellModel:
    """The data that the ranks of a cell report beside their output.

    With ``members``, curves belong to these instead of ranks, by their numbers.
    """

    def __init__(self, hellos: Sequence[Hello], members: MemberRows | None = None) -> None:
        self.members = members
        self.noun = "rank" if members is None else "member"
        #: A headline, in place of the states of the ranks.
        self.title = ""
        self.ranks = tuple(hello.rank for hello in hellos)
        self.sections = [section(self.ranks) for section in SECTIONS if members is None]
        self.tiles = Tiles(hellos)
        self.imports = Imports()
        self.memory = Memory()
        self.logged = Logged()
        self.curves = Curves(self.logged)
        self.timings = TimingTable()
        self.strips = Strips(len(self.ranks))
        self._has_records = False
        self.started = time.monotonic()
        self.seconds: float | None = None

    def take(self, record: Telemetry, payloads: Sequence[bytes]) -> None:
        self._has_records = True
        if isinstance(record, Points):
            self.curves.take(record, payloads[0])
            self.tiles.at_step(record.rank, self.curves.step(record.rank))
        elif isinstance(record, Timings):
            self.timings.take(record)
        elif isinstance(record, Strip):
            self.strips.take(record, payloads)
        elif isinstance(record, Pulse):
            self.tiles.take(record)
            self.imports.take(record)
            self.memory.take(record, self.elapsed)
        for section in self.sections:
            section.take(record, payloads)

    def left(self, rank: int, status: str) -> None:
        self.tiles.left(rank, status)
        self.imports.left(rank)

    def end(self) -> None:
        self.seconds = time.monotonic() - self.started

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started if self.seconds is None else self.seconds

    def worth_showing(self) -> bool:
        # Whether the data are a reason to show the panel.
        if not (self._has_records or self.sections or self.members):
            return False  # as after most cells, whose end must not take long
        busy = any(
            row.calls >= _BUSY_CALLS and row.wait_seconds + row.transfer_seconds >= _BUSY_SECONDS
            for row in self.timings.by_rank()
        )
        return bool(self.curves) or busy or any(one.worth_showing() for one in self.sections)
