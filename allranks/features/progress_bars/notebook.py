"""One line for text bars of several ranks with the same name and total: the slowest rank's.

The bars are those of tqdm, rich and Keras.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from allranks.cluster.features import NotebookFeature
from allranks.errors import COLOURS
from allranks.widgets.extensions import LineFolder

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


def _bar(text: str) -> _Bar | None:
    text = COLOURS.sub("", text)
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


class BarFolder(LineFolder):
    """Folds progress bars."""

    marks = ("%|", "━", "[=", "[>.")

    def name_of(self, text: str) -> str:
        bar = _bar(text) if any(mark in text for mark in self.marks) else None
        return "" if bar is None else f"\0{bar.name}\0{bar.total}"

    def folded(self, texts: Sequence[str], ranks: Sequence[int]) -> str:
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


class FoldedBars(NotebookFeature):
    """Shows the bars of several ranks as one."""

    line_folders = (BarFolder(),)


FEATURE = FoldedBars
