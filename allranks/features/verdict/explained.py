"""What ``%distributed why`` prints: the causes, where the time goes, a comparison of two cells."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import sqrt
from statistics import fmean, pstdev

from allranks.features.verdict import LEAST_STEPS
from allranks.features.verdict.loop import Loop
from allranks.features.verdict.records import CellParts
from allranks.features.verdict.rules import EXPLAINS, verdicts
from allranks.widgets.dashboard.tables import Table, seconds, seconds_like

#: Differences below this are not reported, nor those below twice the standard error.
_LEAST_DIFFERENCE = 0.05
_PARTS = 10
_SHOWN_RANKS = 64


def explain(cell: CellParts) -> str:
    """Returns the causes of a cell with their figures, or what takes its time; first its number."""
    loop = Loop.of(cell)
    lines = [f"{one.text}.\n  → {one.next}" for one in verdicts(cell)]
    if loop is None:
        lines.append(f"no loop of {LEAST_STEPS} steps")
        return f"In[{cell.number}]: " + "\n".join(lines)
    if not lines:
        lines = [
            f"nothing stands out: computing {loop.computing:.0%}, waiting {loop.waiting:.0%}, "
            f"transfer {loop.transfer:.0%}"
        ]
    return f"In[{cell.number}]: " + "\n".join([*lines, _table(cell, loop).text()])


def _table(cell: CellParts, loop: Loop) -> Table:
    rows = []
    for rank, one in sorted(loop.ranks.items())[:_SHOWN_RANKS]:
        ready = loop.ranks[rank].main_ready  # all threads together may lack several cores
        whom = max(one.waits, key=lambda other: one.waits[other], default=None)
        times = (one.seconds, one.computing, one.wait, one.transfer)
        rows.append(
            [
                f"rank {rank}",
                *(seconds_like(value / loop.steps, loop.step) for value in times),
                "n/a" if ready is None else f"{ready:.0%}",
                f"rank {whom}, {one.waits[whom] / one.seconds:.0%} of the time"
                if whom is not None and one.waits[whom]
                else "",
            ]
        )
    head = ["", "all", "computing", "waiting", "transfer", "no core", "waits most for"]
    title = f"In[{cell.number}], a step: the mean of {loop.steps:,}, each up to {loop.kind.place}"
    note = "no core: the time in which the main thread of the rank could run and had none"
    return Table(title, head, rows, note, words=(0, 6))


def compare(before: CellParts, after: CellParts) -> str:
    """Returns how much faster a step of the second cell is, and what explains most of that."""
    one, two = Loop.of(before), Loop.of(after)
    for cell, loop in ((before, one), (after, two)):
        if loop is None:
            return f"In[{cell.number}] has no loop of {LEAST_STEPS} steps."
    assert one is not None
    assert two is not None
    a, b = one.step, two.step
    named, other = f"In[{after.number}]", f"In[{before.number}]"
    noise = max(_LEAST_DIFFERENCE, 2 * _error(one), 2 * _error(two))
    if abs(a - b) <= noise * max(a, b):
        return (
            f"{named} is as fast as {other}: a step takes {seconds(b)}, there {seconds(a)}; "
            f"differences below {noise:.0%} are not told from noise"
        )
    shares, others = _parts(one), _parts(two)
    faster = b < a
    sign = 1 if faster else -1
    part = max({*shares, *others}, key=lambda name: sign * (shares[name] - others[name]))
    ratio = a / b if faster else b / a
    text = f"{named} is {ratio:.2g} times {'faster' if faster else 'slower'} than {other}"
    if sign * (shares[part] - others[part]) < EXPLAINS * abs(a - b):
        return f"{text}: a step takes {seconds(b)}, there {seconds(a)}"
    return (
        f"{text}: {'less' if faster else 'more'} {part} "
        f"({seconds(shares[part])} → {seconds(others[part])} per step)"
    )


def _parts(loop: Loop) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    ranks = len(loop.ranks)
    for one in loop.ranks.values():
        found["computing"] += one.computing / loop.steps / ranks
        found["transfer"] += one.transfer / loop.steps / ranks
        for rank, wait in one.waits.items():
            # The rank itself does not wait.
            found[f"waiting for rank {rank}"] += wait / loop.steps / (ranks - 1)
    return found


def _error(loop: Loop) -> float:
    """Returns the standard error of the mean step, relative, from ten parts of the loop."""
    gaps = [after - before for before, after in pairwise(loop.first.edges)]
    size = len(gaps) // _PARTS
    if size < 2:
        return _LEAST_DIFFERENCE
    means = [fmean(gaps[at : at + size]) for at in range(0, size * _PARTS, size)]
    mean = fmean(means)
    return pstdev(means) / mean / sqrt(_PARTS) if mean else _LEAST_DIFFERENCE
