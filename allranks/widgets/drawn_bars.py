"""Bars that tqdm draws as widgets on several ranks: one bar in the notebook, the slowest rank's."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from allranks.widgets.mirrors import VIEW, state_of

_PARTS = (("HTMLModel",), ("FloatProgressModel", "IntProgressModel"), ("HTMLModel",))
_MODEL = "IPY_MODEL_"
_PERCENT = re.compile(r"[:\s]*(\d+%)?\s*$")

State = dict[str, Any]


@dataclass
class _Own:
    """One rank's bar: its name, and the states of the words before it, the bar, the words after."""

    name: str
    before: State
    bar: State
    after: State

    @property
    def share(self) -> float:
        """How much of it is done."""
        return float(self.bar["value"]) / (float(self.bar["max"]) or 1.0)


@dataclass
class _Folded:
    """The notebook's bar for those of several ranks."""

    own: dict[int, _Own] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from ipywidgets import HTML, FloatProgress, HBox

        self.before, self.bar, self.after = HTML(), FloatProgress(), HTML()
        self.box = HBox([self.before, self.bar, self.after])

    def refresh(self) -> None:
        """Shows the slowest rank's bar, and the mean of all."""
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
        own = _own(data)
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
        """Shows what the ranks have come to."""
        for folded in self._folded.values():
            folded.refresh()


def _own(data: dict[str, Any]) -> _Own | None:
    """Returns the bar that a display shows, None where it shows something else."""
    name = data.get(VIEW, {}).get("model_id", "")
    children = (state_of(name) or {}).get("children", ())
    if len(children) != len(_PARTS):
        return None
    parts = [state_of(str(child).removeprefix(_MODEL)) for child in children]
    found = [part for part in parts if part is not None]
    kinds = [part.get("_model_name") for part in found]
    if len(found) < len(_PARTS) or not all(
        kind in one for kind, one in zip(kinds, _PARTS, strict=True)
    ):
        return None
    before, bar, after = found
    # Without a total there is no share that could be compared.
    return None if bar.get("bar_style") == "info" else _Own(name, before, bar, after)
