"""Progress bars of tqdm in the text of several ranks: the same bar is one line, the slowest rank's.

A bar is known by what it says before its percentage and by its total.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_BAR = re.compile(
    r"(?P<name>.*?) *(?P<percent>\d+)%\|[^|]*\| *(?P<done>[\d.]+)(?P<unit>[a-zA-Z]*)"
    r"/(?P<total>[\d.]+[a-zA-Z]*) \[(?P<elapsed>[\d:]+)"
)


class _Bar(NamedTuple):
    name: str
    total: str
    percent: int
    done: float
    elapsed: str


def _bar(text: str) -> _Bar | None:
    # Most lines are none: looking for two characters costs next to nothing.
    found = _BAR.match(text) if "%|" in text else None
    if found is None:
        return None
    return _Bar(
        found["name"], found["total"], int(found["percent"]), float(found["done"]), found["elapsed"]
    )


def name_of(text: str) -> str:
    """Returns what is the same on all ranks in a line: of a bar its name, else the line itself."""
    bar = _bar(text)
    return text if bar is None else f"\0{bar.name}\0{bar.total}"


def combined(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Returns one line for those of several ranks that have the same name.

    Args:
        texts: what each of them wrote.
        ranks: who they are.
    """
    bars = [bar for bar in map(_bar, texts) if bar is not None]
    if len(bars) < len(texts) or len(set(texts)) == 1:
        return texts[0]
    behind = [(bar.percent, bar.done) for bar in bars]
    if len(set(behind)) == 1:
        # All are as far; the one that took longest is as slow as any.
        return texts[
            max(range(len(bars)), key=lambda at: (len(bars[at].elapsed), bars[at].elapsed))
        ]
    slowest = min(range(len(bars)), key=lambda at: behind[at])
    mean = sum(bar.percent for bar in bars) / len(bars)
    return f"{texts[slowest]}  slowest: {ranks[slowest]}, mean {mean:.0f}%"
