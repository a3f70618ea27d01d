"""From the story of an allreduce to frames: what every rank holds, who has sent what to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from allranks.records.lessons import AllreduceRun, Explained, Scalar, Step
from allranks.records.ranks import compact
from allranks.widgets.dashboard.tables import Table, seconds

_REPLACED = {"allgather", "unfold", "broadcast"}
"""Phases in which what has come takes the place of what was there; in the others it is added."""
_SPOKEN_MESSAGES = 8
_SPOKEN_VALUES = 8

_TEXT_LINES = 64


@dataclass(frozen=True)
class Message:
    """Elements ``start`` to ``stop`` that one rank sent to another, and what they did there."""

    sender: int
    receiver: int
    chunk: int
    start: int
    stop: int
    adds: bool
    before: tuple[Scalar, ...]
    received: tuple[Scalar, ...]
    after: tuple[Scalar, ...]

    @property
    def what(self) -> str:
        """What was done, as ``(1, 2) + (10, 20) = (11, 22)`` or ``(1, 2) becomes (11, 22)``."""
        if self.adds:
            return f"{listed(self.before)} + {listed(self.received)} = {listed(self.after)}"
        return f"{listed(self.before)} becomes {listed(self.after)}"


@dataclass(frozen=True)
class Frame:
    """All ranks at one moment: before the first round, or after one."""

    phase: str
    messages: tuple[Message, ...]
    """What has travelled since the frame before, all at the same time."""
    values: tuple[tuple[Scalar, ...], ...]
    """What every rank holds: one array a rank."""
    shares: tuple[tuple[int, ...], ...]
    """From how many ranks each of these values has a share."""

    def words(self, number: int, rounds: int) -> str:
        """Returns what has happened, for who listens instead of looking.

        Args:
            number: which frame this is, from 0.
            rounds: how many frames come after the first.
        """
        ranks = len(self.values)
        if not number:
            return f"Start: each of {ranks} ranks has its own array."
        count = len(self.values[0])
        parts = [
            f"rank {m.sender} sends {_elements(m, count)} to rank {m.receiver}: {m.what}"
            for m in self.messages[:_SPOKEN_MESSAGES]
        ]
        if len(self.messages) > _SPOKEN_MESSAGES:
            parts.append(f"and {len(self.messages) - _SPOKEN_MESSAGES} messages more")
        done = [rank for rank, row in enumerate(self.shares) if all(n == ranks for n in row)]
        end = f" Complete: {'all ranks' if len(done) == ranks else f'rank {compact(done)}'}."
        return f"Round {number} of {rounds}, {self.phase}: {'; '.join(parts)}." + end * bool(done)


def frames(run: AllreduceRun) -> list[Frame]:
    """Returns the frames of a run whose values were all recorded; rounds without messages are none.

    Args:
        run: a sum, with every value of every chunk.
    """
    values = [list(one.items) for one in run.inputs]
    owners = [[{rank} for _ in row] for rank, row in enumerate(values)]
    told = [_frame("start", (), values, owners)]
    for _, steps in groupby(run.steps, key=lambda step: step.number):
        messages = []
        sent = [list(row) for row in owners]
        phase = ""
        for step in steps:
            phase = step.phase
            message = _message(step)
            messages.append(message)
            values[step.receiver][step.start : step.stop] = message.after
            for at in range(step.start, step.stop):
                mine = owners[step.receiver][at] if message.adds else set()
                owners[step.receiver][at] = mine | sent[step.sender][at]
        told.append(_frame(phase, tuple(messages), values, owners))
    return told


def chunks(run: AllreduceRun) -> list[tuple[int, int, int]]:
    """Returns number, first element and the one past the last of each chunk that is not empty."""
    every = {(step.chunk, step.start, step.stop) for step in run.steps}
    return sorted(chunk for chunk in every if chunk[2] > chunk[1])


def shown(value: Scalar) -> str:
    """Returns a value as it stands in its cell."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(values: Sequence[Scalar]) -> str:
    """Returns ``5`` or ``(1, 2, 3)``; the first of many."""
    said = [shown(value) for value in values[:_SPOKEN_VALUES]]
    if len(values) > _SPOKEN_VALUES:
        said.append("…")
    return said[0] if len(values) == 1 else f"({', '.join(said)})"


def _message(step: Step) -> Message:
    return Message(
        sender=step.sender,
        receiver=step.receiver,
        chunk=step.chunk,
        start=step.start,
        stop=step.stop,
        adds=step.phase not in _REPLACED,
        before=step.before.items,
        received=step.received.items,
        after=step.after.items,
    )


def _elements(message: Message, count: int) -> str:
    if message.stop - message.start == count:
        return "its whole array"
    if message.stop == message.start:
        return f"chunk {message.chunk}, which is empty,"
    last = message.stop - 1
    span = f"s {message.start}–{last}" if last > message.start else f" {last}"
    return f"chunk {message.chunk} (element{span})"


def _frame(
    phase: str,
    messages: tuple[Message, ...],
    values: Sequence[Sequence[Scalar]],
    owners: Sequence[Sequence[set[int]]],
) -> Frame:
    return Frame(
        phase=phase,
        messages=messages,
        values=tuple(tuple(row) for row in values),
        shares=tuple(tuple(len(one) for one in row) for row in owners),
    )


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
    more = f"… {len(rows) - _TEXT_LINES} more messages" if len(rows) > _TEXT_LINES else ""
    head = ["round", "phase", "message", "chunk", "values"]
    return Table("", head, rows[:_TEXT_LINES], more, words=tuple(range(len(head))))


def text(told: Explained, frames: list[Frame]) -> str:
    """Returns all of it as lines of text."""
    end = f"every rank has {listed(told.run.result.items)}"
    return "\n".join([title(told), cost(told), steps(frames).text(), end])
