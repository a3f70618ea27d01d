"""One bar for those that tqdm draws as widgets on several ranks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from allranks.widgets.displays import VIEW
from allranks.widgets.extensions import DisplayFolder
from allranks.widgets.text import Data

MODEL = "IPY_MODEL_"
#: The states of all ranks' widgets in this kernel, by their ids.
STATES: dict[str, Data] = {}

#: The widgets of which tqdm makes a bar: text, bar, text.
_PARTS = (("HTMLModel",), ("FloatProgressModel", "IntProgressModel"), ("HTMLModel",))
_PERCENT = re.compile(r"[:\s]*(\d+%)?\s*$")


@dataclass
class _RankBar:
    """One rank's bar: its name, and the states of the text before it, the bar, the text after."""

    name: str
    before: Data
    bar: Data
    after: Data

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
        if all(own.name not in STATES for own in self.own.values()):
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


class DrawnBars(DisplayFolder):
    """The bars of one cell that are widgets."""

    def __init__(self) -> None:
        self._folded: dict[tuple[str, float, int], _Folded] = {}
        self._count: Counter[tuple[int, str, float]] = Counter()

    def fold(self, rank: int, data: Data) -> Data:
        """Returns a display of the bar that replaces one of several ranks; others unchanged."""
        own = _rank_bar(data)
        if own is None:
            return data
        title, total = _PERCENT.sub("", own.before.get("value", "")), float(own.bar["max"])
        self._count[rank, title, total] += 1
        key = (title, total, self._count[rank, title, total])
        if key not in self._folded:
            self._folded[key] = _Folded()
        folded = self._folded[key]
        folded.own[rank] = own
        folded.refresh()
        view = {"version_major": 2, "version_minor": 0, "model_id": folded.box.model_id}
        return {"text/plain": f"{title} {total:g}".strip(), VIEW: view}

    def refresh(self) -> None:
        for folded in self._folded.values():
            folded.refresh()


def _rank_bar(data: Data) -> _RankBar | None:
    name = data.get(VIEW, {}).get("model_id", "")
    children = STATES.get(name, {}).get("children", ())
    parts = [STATES.get(str(child).removeprefix(MODEL), {}) for child in children]
    if len(parts) != len(_PARTS) or not all(
        part.get("_model_name") in kinds for part, kinds in zip(parts, _PARTS, strict=True)
    ):
        return None
    before, bar, after = parts
    # Without a total there is no share that could be compared.
    return None if bar.get("bar_style") == "info" else _RankBar(name, before, bar, after)
