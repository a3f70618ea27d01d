"""Where each rank's time went: start-up, imports, computing, waiting for whom, and transfer."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.records.ranks import label
from allranks.records.telemetry import Strip
from allranks.widgets.dashboard.svg import MANY, draw_box, draw_swatch, draw_words, svg_page, ticks
from allranks.widgets.dashboard.tables import Table, labels, number, seconds, seconds_like

KINDS = ("start-up", "importing", "computing", "waiting", "transfer")
"""What a rank is at. Start-up is computing before the first step that the cell has logged."""
START_UP, IMPORTING, COMPUTING, WAITING, TRANSFER = range(5)

#: A page is told at most so many bins of all ranks together, and so many of one.
_BINS, _MOST_BINS, _LEAST_BINS = 4096, 256, 32
#: Of so many ranks: more are not drawn.
MOST_RANKS = 128
_KINDS_TOLD = 3
_DIGITS = 4

Shares = tuple[float, float, float, float, float]
"""How much of a time was of each kind, in the order of :data:`KINDS`."""


@dataclass(frozen=True)
class RankTime:
    """One rank's time in a cell, in bins of ``width`` seconds; the last one may not be full."""

    rank: int
    seconds: float
    width: float
    bins: tuple[Shares, ...]
    """Seconds of each kind in each bin."""
    whom: tuple[int, ...]
    """For whom it waited longest in each bin; -1 where it did not wait."""
    waits: tuple[tuple[int, float], ...]
    importing: tuple[tuple[str, float], ...]
    steps: tuple[float, ...]

    @property
    def sums(self) -> Shares:
        """Seconds of each kind; together they are ``seconds``."""
        return _summed(self.bins)

    def between(self, began: float, ended: float) -> Shares:
        """Returns the seconds of each kind between two times, a bin counted by the part of it."""
        found = []
        for at, shares in enumerate(self.bins):
            start, length = at * self.width, sum(shares)
            inside = max(0.0, min(ended, start + self.width) - max(began, start))
            part = inside / self.width if length else 0.0
            found.append(_scaled(shares, part))
        return _summed(found)


@dataclass(frozen=True)
class StepTime:
    """What a step took a rank, as a mean over ``steps`` of them."""

    rank: int
    steps: float
    each: Shares

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.each)


@dataclass
class _RankStrip:
    """What one rank has told so far, bin by bin: shares of each kind, and for whom it waited."""

    record: Strip
    shares: list[bytes]
    whom: array[int]
    unsent: int | None = 0
    """The first bin that has changed since a page was told."""


class Strips:
    """The time of every rank in one cell.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int = 1) -> None:
        #: So many bins of a rank a page is told.
        self.bins = _MOST_BINS
        while self.bins > _LEAST_BINS and self.bins * min(ranks, MOST_RANKS) > _BINS:
            self.bins //= 2
        self._told: dict[int, _RankStrip] = {}
        self._times: list[RankTime] = []

    def __bool__(self) -> bool:
        return bool(self._told)

    @property
    def changed(self) -> bool:
        """Whether there is something that a page has not been told."""
        return any(told.unsent is not None for told in self._told.values())

    def seconds(self, rank: int) -> float:
        """Returns up to when a rank has told of itself."""
        told = self._told.get(rank)
        return told.record.seconds if told is not None else 0.0

    def take(self, record: Strip, payloads: Sequence[bytes]) -> None:
        """Takes in what a rank tells: all of its bins, or those that have changed."""
        shares, whom = payloads
        count, first = len(shares) // _KINDS_TOLD, record.first
        kinds = [shares[kind * count : (kind + 1) * count] for kind in range(_KINDS_TOLD)]
        told, ranks = self._told.get(record.rank), array("h", whom)
        if first:
            if told is None or told.record.width_seconds != record.width_seconds:
                return  # it begins anew when somebody looks again
            kinds = [old[:first] + new for old, new in zip(told.shares, kinds, strict=True)]
            ranks = told.whom[:first] + ranks
            unsent = first if told.unsent is None else min(first, told.unsent)
        self._told[record.rank] = _RankStrip(record, kinds, ranks, unsent if first else 0)
        self._times.clear()

    def news(self) -> dict[str, Any]:
        """Returns what has changed since the last time, as a page takes it."""
        changed = [(one, one.unsent) for one in self._told.values() if one.unsent is not None]
        for told, _ in changed:
            told.unsent = None
        return self._page(changed)

    def everything(self) -> dict[str, Any]:
        """Returns all of it as a page takes it."""
        return self._page((told, 0) for told in self._told.values())

    def _page(self, told: Iterable[tuple[_RankStrip, int]]) -> dict[str, Any]:
        rows, bins = [], b""
        shown = set(sorted(self._told)[:MOST_RANKS])
        for one, first in sorted(told, key=lambda pair: pair[0].record.rank):
            record = one.record
            if record.rank not in shown:
                continue
            each = 1
            while len(one.whom) > each * self.bins:
                each *= 2
            # Bins of which some are told as one are told all.
            first = first if each == 1 else 0
            shares = [_joined(kind[first:], each) for kind in one.shares]
            width = record.width_seconds * each
            rows.append(
                [record.rank, first, len(shares[0]), width, round(record.seconds, _DIGITS)]
                + [[round(value, _DIGITS) for value in record.steps]]
                + [[[name, round(value, _DIGITS)] for name, value in pairs]
                   for pairs in (record.waits, record.importing)]
            )  # fmt: skip
            bins += b"".join(shares) + _joined_whom(one, first, each)
        return {"rows": rows, "bins": base64.b64encode(bins).decode("ascii")}

    def by_rank(self) -> list[RankTime]:
        """Returns the ranks' times, in order of rank."""
        if not self._times:
            self._times = [
                _rank_time(told.record, b"".join(told.shares), told.whom)
                for _, told in sorted(self._told.items())
            ]
        return list(self._times)

    def steps(self) -> list[StepTime]:
        """Returns what a step took each rank, of those that have logged two or more."""
        found = []
        for time in self.by_rank():
            if len(time.steps) == 4 and time.steps[2] > time.steps[0]:
                first, first_at, last, last_at = time.steps
                sums = _scaled(time.between(first_at, last_at), 1 / (last - first))
                # Within the bin of the first step the two are not told apart.
                before, importing, computing, waiting, transfer = sums
                each = 0.0, importing, before + computing, waiting, transfer
                found.append(StepTime(time.rank, last - first, each))
        return found


def _joined(shares: bytes, each: int) -> bytes:
    """Returns the mean of every so many bins."""
    if each == 1:
        return shares
    return bytes(round(sum(shares[at : at + each]) / each) for at in range(0, len(shares), each))


def _joined_whom(told: _RankStrip, first: int, each: int) -> bytes:
    """Returns for whom it waited in that of every so many bins in which it waited longest."""
    if each == 1:
        return told.whom[first:].tobytes()
    waiting = told.shares[1]
    found = array("h")
    for at in range(0, len(waiting), each):
        most = max(range(at, min(at + each, len(waiting))), key=lambda one: waiting[one])
        found.append(told.whom[most])
    return found.tobytes()


def _rank_time(record: Strip, shares: bytes, whom: Sequence[int]) -> RankTime:
    count = len(shares) // 3
    first_at = record.steps[1] if record.steps else 0.0
    bins = []
    for at in range(count):
        start = at * record.width_seconds
        # The cell ends within its last bin.
        length = max(0.0, min(record.width_seconds, record.seconds - start))
        said = [shares[kind * count + at] / 255 * record.width_seconds for kind in range(3)]
        busy = sum(said)
        # Calls of several threads at once take more than the time that there is.
        scale = min(1.0, length / busy) if busy else 1.0
        importing, waiting, transfer = (value * scale for value in said)
        rest = max(0.0, length - importing - waiting - transfer)
        before = min(rest, max(0.0, first_at - start)) if first_at else 0.0
        bins.append((before, importing, rest - before, waiting, transfer))
    return RankTime(
        record.rank,
        record.seconds,
        record.width_seconds,
        tuple(bins),
        tuple(whom),
        tuple((rank, seconds) for rank, seconds in record.waits),
        tuple((module, seconds) for module, seconds in record.importing),
        record.steps,
    )


def _summed(bins: Sequence[Shares]) -> Shares:
    a, b, c, d, e = (sum(column) for column in zip(*bins, strict=True)) if bins else (0.0,) * 5
    return a, b, c, d, e


def _scaled(shares: Shares, factor: float) -> Shares:
    a, b, c, d, e = (value * factor for value in shares)
    return a, b, c, d, e


_TABLE_RANKS = 16
_NAMED = 3
#: Waits that are shorter than this part of the longest are not named.
_WORTH = 0.1


def strip_tables(strips: Strips) -> list[Table]:
    """Returns the tables that have something in them."""
    times, steps = strips.by_rank()[:_TABLE_RANKS], strips.steps()[:_TABLE_RANKS]
    found = [_time_table("time", [(time.rank, time.sums, _why(time)) for time in times])]
    if steps:
        count = number(max(step.steps for step in steps))
        title = f"a step, mean of {count}"
        found.append(_time_table(title, [(step.rank, step.each, "") for step in steps]))
    left = strips.by_rank()[_TABLE_RANKS:]
    if left:
        found[0] = Table(*_parts(found[0]), note=f"{label(t.rank for t in left)} not in this table")
    return found


def _parts(table: Table) -> tuple[str, list[str], list[list[str]]]:
    return table.title, table.head, table.rows


def _time_table(title: str, rows: Sequence[tuple[int, Shares, str]]) -> Table:
    """Returns a table without the kinds that nobody has spent time in."""
    kinds = [kind for kind in range(len(KINDS)) if any(sums[kind] for _, sums, _ in rows)]
    most = max((sum(sums) for _, sums, _ in rows), default=0.0)
    whys = any(why for *_, why in rows)
    told = [
        [
            f"rank {rank}",
            seconds_like(sum(sums), most),
            *(seconds_like(sums[kind], most) for kind in kinds),
            *([why] if whys else []),
        ]
        for rank, sums, why in rows
    ]
    head = ["", "all", *(KINDS[kind] for kind in kinds), *([""] if whys else [])]
    words = (0, len(head) - 1) if whys else (0,)
    return Table(title, head, told, words=words)


def _why(time: RankTime) -> str:
    """Returns for whom a rank waited most, and what it imported."""
    said = []
    waits = [(f"rank {rank}", value) for rank, value in time.waits if rank >= 0]
    for what, pairs in (("waits for", waits), ("imports", time.importing)):
        longest = max((value for _, value in pairs), default=0.0)
        named = [
            f"{name} {seconds(value)}"
            for name, value in pairs[:_NAMED]
            if value >= _WORTH * longest and value >= 0.01 * time.seconds
        ]
        if named:
            said.append(f"{what} {', '.join(named)}")
    return "; ".join(said)


#: Start-up, importing, computing, waiting, transfer: told apart with any kind of colour vision,
#: and 3:1 against the paper at least.
COLOURS = ("#7a67b8", "#c96a9d", "#00805b", "#c27300", "#1f83c9")
_LEFT, _STRIP, _GAP, _BAR, _RIGHT = 58, 560, 16, 170, 56
_TOP, _BOTTOM = 24, 18
_STEP, _LOW_STEP = 20, 7
#: So many columns of a strip, and of one of very many ranks, are drawn.
_COLUMNS, _FEW_COLUMNS = 140, 48
_MOST_RANKS = 128
#: A wait that is as wide as this has room for the rank that was waited for.
_NUMBER_WIDTH = 16


def draw_strips(times: Sequence[RankTime]) -> str:
    """Returns the picture of several ranks' time."""
    times = times[:_MOST_RANKS]
    step = _STEP if len(times) <= MANY else _LOW_STEP
    height = _TOP + step * len(times) + _BOTTOM
    longest = max((time.seconds for time in times), default=0.0) or 1.0
    body = _key(times)
    for row, time in enumerate(times):
        y = _TOP + step * row
        body += _strip(time, y, step - 3, longest) + _bar(time, y, step - 3, longest)
        if step == _STEP or row % 8 == 0:
            body += draw_words(_LEFT - 6, y + 11, f"rank {time.rank}", "end")
            end = _LEFT + _STRIP + _GAP + time.seconds / longest * _BAR
            body += draw_words(end + 6, y + 11, seconds(time.seconds))
    marks = ticks(0, longest, 5)
    for value, said in zip(marks, labels(marks), strict=True):
        x = _LEFT + value / longest * _STRIP
        body += draw_words(x, height - 4, f"{said} s", "middle" if value else "start")
    body += draw_words(_LEFT + _STRIP + _GAP, height - 4, "all together")
    return svg_page(_LEFT + _STRIP + _GAP + _BAR + _RIGHT, height, "", body, titled=False)


def _key(times: Sequence[RankTime]) -> str:
    x, body = float(_LEFT), ""
    for kind, name in enumerate(KINDS):
        if any(time.sums[kind] for time in times):
            said = "waiting for the rank of that number" if kind == WAITING else name
            body += draw_swatch(x, 6, COLOURS[kind], said)
            x += 28 + 6.2 * len(said)
    return body


def _strip(time: RankTime, y: float, height: int, longest: float) -> str:
    """Returns a strip: in each column the kinds stand one upon the other."""
    columns = _columns(time, longest, _COLUMNS if height > _LOW_STEP else _FEW_COLUMNS)
    paths: dict[int, list[str]] = {}
    for start, end, heights in _runs([_heights(column, height) for column in columns]):
        x, width = _LEFT + start * _STRIP / len(columns), (end - start) * _STRIP / len(columns)
        top = y
        for kind, tall in enumerate(heights):
            if tall:
                paths.setdefault(kind, []).append(
                    f"M{x:.4g} {top:g}h{width:.3g}v{tall}h-{width:.3g}z"
                )
                top += tall
    body = "".join(
        f'<path d="{"".join(parts)}" fill="{COLOURS[kind]}"/>' for kind, parts in paths.items()
    )
    return body + (_numbers(time, y, longest) if height > _LOW_STEP else "")


def _columns(time: RankTime, longest: float, count: int) -> list[Shares | None]:
    """Returns the kinds' shares in each column; None behind the rank's end."""
    width = longest / count
    found: list[Shares | None] = []
    for at in range(count):
        if (at + 0.5) * width > time.seconds:
            found.append(None)
            continue
        sums = time.between(at * width, (at + 1) * width)
        whole = sum(sums) or 1.0
        a, b, c, d, e = (value / whole for value in sums)
        found.append((a, b, c, d, e))
    return found


def _heights(shares: Shares | None, height: int) -> tuple[int, ...]:
    """Returns whole heights that together are ``height``."""
    if shares is None:
        return ()
    tall, upto, before = [], 0.0, 0
    for share in shares:
        upto += share
        edge = round(upto * height)
        tall.append(edge - before)
        before = edge
    return tuple(tall)


def _runs(columns: Sequence[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns equal columns side by side as one."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for at, column in enumerate(columns):
        if found and found[-1][2] == column:
            found[-1] = found[-1][0], at + 1, column
        else:
            found.append((at, at + 1, column))
    return found


def _numbers(time: RankTime, y: float, longest: float) -> str:
    """Returns for whom the rank waits, where it does little else for long enough to be read."""
    body, begun, rank = "", 0, -1
    scale = time.width * _STRIP / longest
    mostly = [
        whom if shares[WAITING] > sum(shares) / 2 else -1
        for shares, whom in zip(time.bins, time.whom, strict=True)
    ]
    for at, whom in enumerate([*mostly, -1]):
        if whom == rank:
            continue
        if rank >= 0 and (at - begun) * scale >= _NUMBER_WIDTH:
            middle = _LEFT + (begun + at) / 2 * scale
            body += draw_words(middle, y + 12.5, str(rank), "middle", "#000000")
        begun, rank = at, whom
    return body


def _bar(time: RankTime, y: float, height: int, longest: float) -> str:
    x, body = float(_LEFT + _STRIP + _GAP), ""
    for kind, value in enumerate(time.sums):
        width = value / longest * _BAR
        if width >= 0.1:
            body += draw_box(x, y, width, height, COLOURS[kind])
        x += width
    return body
