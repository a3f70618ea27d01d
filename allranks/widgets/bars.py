"""Progress bars in the text of several ranks: the same bar is one line, the slowest rank's.

Those of tqdm, of rich and of Keras. A bar is known by what it says before its percentage and by its
total; one of Keras that is full, by the metrics behind it, which are a result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MARKS = ("%|", "━", "[=", "[>.")
"""One of these is in every bar, and in hardly anything else."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TQDM = re.compile(
    r"(?P<name>.*?) *(?P<percent>\d+)%\|[^|]*\| *(?P<done>[\d.]+)(?P<unit>[a-zA-Z]*)"
    r"/(?P<total>[\d.]+[a-zA-Z]*) \[(?P<elapsed>[\d:]+)"
)
_RICH = re.compile(r"(?P<name>.*?) *[━╸╺]+ +(?P<percent>\d+)% (?P<elapsed>[\d:]*)")
_KERAS = re.compile(r" *(?P<done>\d+)/(?P<total>\d+) (?:━+|\[[=>.]+\])(?P<rest>.*)")
_METRIC = re.compile(r" - (\w+: \S+)")


class _Bar(NamedTuple):
    name: str
    total: str
    percent: int
    done: float
    elapsed: str


def may_be_bar(text: str) -> bool:
    """Whether a line has what every bar has: looking for that costs next to nothing."""
    return any(mark in text for mark in _MARKS)


def _bar(text: str) -> _Bar | None:
    if not may_be_bar(text):
        return None
    text = _COLOURS.sub("", text)
    if found := _TQDM.match(text):
        name, total, elapsed = found["name"], found["total"], found["elapsed"]
        return _Bar(name, total, int(found["percent"]), float(found["done"]), elapsed)
    if found := _KERAS.match(text):
        done, total = int(found["done"]), int(found["total"])
        name = " ".join(_METRIC.findall(found["rest"])) if done == total else ""
        return _Bar(name, f"{total}", 100 * done // max(1, total), done, "")
    if found := _RICH.match(text):
        percent = int(found["percent"])
        return _Bar(found["name"], "", percent, percent, found["elapsed"])
    return None


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
