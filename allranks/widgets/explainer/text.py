"""An allreduce as text: one line a message, what it took, and what the model foretells."""

from __future__ import annotations

from allranks.records.explained import Explained
from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.dashboard.tables import Table
from allranks.widgets.explainer.frames import Frame, listed

_LINES = 64


def title(told: Explained) -> str:
    """Returns what was run."""
    run = told.run
    count = run.inputs[0].count
    return f"{run.algorithm} allreduce of {count} {run.dtype} over {run.size} ranks"


def cost(told: Explained) -> str:
    """Returns what it took, and what the model foretells, which says that it is simulated."""
    fabric = told.prediction.fabric
    return (
        f"measured: {seconds(told.seconds)} (shortest of {told.repeats}); "
        f"simulated: {seconds(told.prediction.seconds)} (model of {fabric})"
    )


def steps(frames: list[Frame]) -> Table:
    """Returns one row a message; the first of very many."""
    rows = [
        [str(number), frame.phase, f"rank {m.sender} → {m.receiver}", str(m.chunk), m.what]
        for number, frame in enumerate(frames)
        for m in frame.messages
    ]
    more = f"… {len(rows) - _LINES} more messages" if len(rows) > _LINES else ""
    head = ["round", "phase", "message", "chunk", "values"]
    return Table("", head, rows[:_LINES], more, words=tuple(range(len(head))))


def text(told: Explained, frames: list[Frame]) -> str:
    """Returns all of it as lines of text."""
    end = f"every rank has {listed(told.run.result.items)}"
    return "\n".join([title(told), cost(told), steps(frames).text(), end])
