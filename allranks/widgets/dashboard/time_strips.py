"""Pictures and tables of each rank's time: start-up, imports, computing, waiting, transfer."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.records.ranks import label
from allranks.widgets.dashboard.svg import MANY, draw_box, draw_swatch, draw_words, svg_page, ticks
from allranks.widgets.dashboard.tables import Table, labels, number, seconds, seconds_like
from allranks.widgets.dashboard.timings import KINDS, WAITING, RankTime, Shares, Strips

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
    # A kind in which no rank spent time has no column.
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


#: Start-up, importing, computing, waiting, transfer: distinct with any kind of colour vision,
#: and 3:1 against the paper at least.
COLOURS = ("#7a67b8", "#c96a9d", "#00805b", "#c27300", "#1f83c9")
_LEFT, _STRIP, _GAP, _BAR, _RIGHT = 58, 560, 16, 170, 56
_TOP, _BOTTOM = 24, 18
_STEP, _LOW_STEP = 20, 7
#: Columns of a strip, and of a strip among very many ranks.
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
    width = longest / count
    found: list[Shares | None] = []
    for at in range(count):
        if (at + 0.5) * width > time.seconds:
            # The strip of this rank has ended.
            found.append(None)
            continue
        sums = time.between(at * width, (at + 1) * width)
        whole = sum(sums) or 1.0
        a, b, c, d, e = (value / whole for value in sums)
        found.append((a, b, c, d, e))
    return found


def _heights(shares: Shares | None, height: int) -> tuple[int, ...]:
    if shares is None:
        return ()
    tall, upto, before = [], 0.0, 0
    for share in shares:
        upto += share
        # Rounding the edges, not the heights, keeps their sum at ``height``.
        edge = round(upto * height)
        tall.append(edge - before)
        before = edge
    return tuple(tall)


def _runs(columns: Sequence[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for at, column in enumerate(columns):
        if found and found[-1][2] == column:
            found[-1] = found[-1][0], at + 1, column
        else:
            found.append((at, at + 1, column))
    return found


def _numbers(time: RankTime, y: float, longest: float) -> str:
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
