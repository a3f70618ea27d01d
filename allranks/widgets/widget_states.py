"""The ranks' widgets in this kernel, as views need them: their states, and bars of several ranks.

`allranks.features.rank_widgets` keeps the states. Progress bars that tqdm draws as widgets on
several ranks become one bar here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
MODEL = "IPY_MODEL_"
#: The widgets of which tqdm makes a bar: text, bar, text.
_PARTS = (("HTMLModel",), ("FloatProgressModel", "IntProgressModel"), ("HTMLModel",))
_PERCENT = re.compile(r"[:\s]*(\d+%)?\s*$")

State = dict[str, Any]

#: The states of all ranks' widgets in this kernel, by their ids.
STATES: dict[str, dict[str, Any]] = {}
#: What says something above a widget that is displayed, by its id.
TITLES: dict[str, Callable[[str], object]] = {}


def state_of(name: str) -> dict[str, Any] | None:
    """Returns what a rank's widget is now, None where there is none of that name."""
    return STATES.get(name)


def stands_below(name: str, say: Callable[[str], object]) -> None:
    """Notes how something is said above a widget that is displayed."""
    TITLES[name] = say


@dataclass
class _RankBar:
    """One rank's bar: its name, and the states of the words before it, the bar, the words after."""

    name: str
    before: State
    bar: State
    after: State

    @property
    def share(self) -> float:
        return float(self.bar["value"]) / (float(self.bar["max"]) or 1.0)


@dataclass
class _Folded:
    """The notebook's bar for those of several ranks."""

    own: dict[int, _RankBar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from ipywidgets import HTML, FloatProgress, HBox

        self.before, self.bar, self.after = HTML(), FloatProgress(), HTML()
        self.box = HBox([self.before, self.bar, self.after])

    def refresh(self) -> None:
        if all(state_of(own.name) is None for own in self.own.values()):
            self.box.layout.display = "none"  # every rank has taken its own away
            return
        rank = min(self.own, key=lambda rank: self.own[rank].share)
        slowest, shares = self.own[rank], [own.share for own in self.own.values()]
        styles = [own.bar.get("bar_style", "") for own in self.own.values()]
        self.bar.max, self.bar.value = slowest.bar["max"], slowest.bar["value"]
        worst = "danger" if "danger" in styles else slowest.bar.get("bar_style", "")
        self.bar.bar_style = worst
        self.before.value = slowest.before.get("value", "")
        mean = f"  slowest: {rank}, mean {100 * sum(shares) / len(shares):.0f}%"
        self.after.value = slowest.after.get("value", "") + (mean if len(set(shares)) > 1 else "")


class DrawnBars:
    """The bars of one cell."""

    def __init__(self) -> None:
        self._folded: dict[tuple[str, float, int], _Folded] = {}
        self._count: Counter[tuple[int, str, float]] = Counter()

    def fold(self, rank: int, data: dict[str, Any]) -> dict[str, Any]:
        """Returns a display of the bar that stands for one of several ranks; others as they are."""
        own = _rank_bar(data)
        if own is None:
            return data
        title, total = _PERCENT.sub("", own.before.get("value", "")), float(own.bar["max"])
        self._count[rank, title, total] += 1
        key = (title, total, self._count[rank, title, total])
        folded = self._folded.get(key)
        if folded is None:
            folded = self._folded[key] = _Folded()
        folded.own[rank] = own
        folded.refresh()
        view = {"version_major": 2, "version_minor": 0, "model_id": folded.box.model_id}
        return {"text/plain": f"{title} {total:g}".strip(), VIEW: view}

    def refresh(self) -> None:
        for folded in self._folded.values():
            folded.refresh()


def _rank_bar(data: dict[str, Any]) -> _RankBar | None:
    name = data.get(VIEW, {}).get("model_id", "")
    children = (state_of(name) or {}).get("children", ())
    if len(children) != len(_PARTS):
        return None
    parts = [state_of(str(child).removeprefix(MODEL)) for child in children]
    found = [part for part in parts if part is not None]
    kinds = [part.get("_model_name") for part in found]
    if len(found) < len(_PARTS) or not all(
        kind in one for kind, one in zip(kinds, _PARTS, strict=True)
    ):
        return None
    before, bar, after = found
    # Without a total there is no share that could be compared.
    return None if bar.get("bar_style") == "info" else _RankBar(name, before, bar, after)
