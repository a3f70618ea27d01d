"""What ranks have been importing for a second or longer: one line with a bar."""

from __future__ import annotations

from allranks.records.ranks import label
from allranks.records.telemetry import Pulse


class Imports:
    """Which ranks import what, and which of them are through with it."""

    def __init__(self) -> None:
        self._now: dict[int, str] = {}
        self._ranks: dict[str, set[int]] = {}

    def take(self, pulse: Pulse) -> None:
        """Takes in what a rank imports now, if anything."""
        self._now[pulse.rank] = pulse.importing
        if pulse.importing:
            self._ranks.setdefault(pulse.importing, set()).add(pulse.rank)

    def left(self, rank: int) -> None:
        """Takes in that a rank has left the cell."""
        self._now[rank] = ""

    def line(self) -> tuple[str, int, int] | None:
        """Returns what is imported on which ranks, and how many of how many are through with it.

        None where nothing is imported. Of several modules it is the one that most ranks wait for.
        """
        busy = [module for module in self._now.values() if module]
        if not busy:
            return None
        module = max(dict.fromkeys(busy), key=busy.count)
        ranks = self._ranks[module]
        done = sum(self._now[rank] != module for rank in ranks)
        return f"importing {module} on {label(sorted(ranks))}", done, len(ranks)
