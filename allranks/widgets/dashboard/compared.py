"""The curves of several cells over each other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from allranks.widgets.dashboard.after import alive
from allranks.widgets.dashboard.curves import Key
from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.kept import Kept
from allranks.widgets.dashboard.live import Live
from allranks.widgets.dashboard.logs import Logs
from allranks.widgets.dashboard.look import Look
from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.dashboard.still import bundle


def compared(cells: Sequence[Kept], ranks: Sequence[int] | None = None) -> dict[str, str]:
    """Returns a view of the curves of several cells, one a cell: the mean of its ranks.

    Args:
        cells: what is kept of each.
        ranks: only these ranks of each, or members of an ensemble.
    """
    figures = Figures([])
    figures.noun = "cell"
    for cell in cells:
        for (name, member), points in _means(cell, ranks).items():
            steps, values = zip(*points, strict=True)
            figures.curves.add(
                Key(name, cell.number, member), array("d", steps), array("d", values)
            )
    took = (f"In[{cell.number}] took {seconds(cell.seconds)}" for cell in cells)
    whose = "all its ranks" if ranks is None else f"the chosen {cells[0].noun}s"
    figures.title = f"{', '.join(took)}; each curve is the mean of {whose}"
    live = Live(figures, Logs([]), "auto")
    return alive(bundle(figures, Look.of({})), live)


def _means(
    cell: Kept, ranks: Sequence[int] | None
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Returns for each name, and member of what is no ensemble, the mean at each step."""
    sums: dict[tuple[str, str], dict[float, list[float]]] = {}
    for key, points in cell.points():
        if ranks is None or key.rank in ranks:
            member = "" if cell.noun == "member" else key.member
            curve = sums.setdefault((key.name, member), {})
            for step, value in points:
                curve.setdefault(step, []).append(value)
    return {
        key: [(step, sum(values) / len(values)) for step, values in sorted(curve.items())]
        for key, curve in sums.items()
    }
