"""The frames of a recorded allreduce, and questions about each round for the quiz.

A frame has the values of every rank, and the messages that led to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from allranks.lessons.records import AllreduceRun, Explained, Scalar, Step
from allranks.records.ranks import compact
from allranks.widgets.dashboard.tables import Table, seconds

#: In these phases received values replace the old ones; in the others they are added.
_REPLACED = {"allgather", "unfold", "broadcast"}
_SPOKEN_MESSAGES = 8
_SPOKEN_VALUES = 8

_TEXT_LINES = 64


@dataclass(frozen=True)
class ChunkMessage:
    """Elements ``start`` to ``stop`` from one rank to another, and their effect there."""

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
        # (1, 2) + (10, 20) = (11, 22), or: (1, 2) becomes (11, 22)
        if self.adds:
            return f"{listed(self.before)} + {listed(self.received)} = {listed(self.after)}"
        return f"{listed(self.before)} becomes {listed(self.after)}"


@dataclass(frozen=True)
class Frame:
    """All ranks at one moment: before the first round, or after one."""

    phase: str
    #: The messages since the frame before, all at the same time.
    messages: tuple[ChunkMessage, ...]
    #: One array per rank.
    values: tuple[tuple[Scalar, ...], ...]
    #: From how many ranks each of these values has a share.
    shares: tuple[tuple[int, ...], ...]

    def words(self, number: int, rounds: int) -> str:
        # For screen readers. `rounds` is the number of frames after the first.
        ranks = len(self.values)
        if not number:
            return f"Start: each of {ranks} ranks has its own array."
        count = len(self.values[0])
        parts = [
            f"rank {m.sender} sends {_elements(m, count)} to rank {m.receiver}: {m.what}"
            for m in self.messages[:_SPOKEN_MESSAGES]
        ]
        if len(self.messages) > _SPOKEN_MESSAGES:
            parts.append(f"and {len(self.messages) - _SPOKEN_MESSAGES} more messages")
        done = [rank for rank, row in enumerate(self.shares) if all(n == ranks for n in row)]
        end = f" Complete: {'all ranks' if len(done) == ranks else f'rank {compact(done)}'}."
        return f"Round {number} of {rounds}, {self.phase}: {'; '.join(parts)}." + end * bool(done)


def frames(run: AllreduceRun) -> list[Frame]:
    """Returns the frames of a sum with all values recorded; none for rounds without messages."""
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
    # Number, first element, end (exclusive); without empty chunks.
    every = {(step.chunk, step.start, step.stop) for step in run.steps}
    return sorted(chunk for chunk in every if chunk[2] > chunk[1])


def shown(value: Scalar) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(values: Sequence[Scalar]) -> str:
    # Only the first of many values.
    said = [shown(value) for value in values[:_SPOKEN_VALUES]]
    if len(values) > _SPOKEN_VALUES:
        said.append("…")
    return said[0] if len(values) == 1 else f"({', '.join(said)})"


def _message(step: Step) -> ChunkMessage:
    adds = step.phase not in _REPLACED
    values = step.before.items, step.received.items, step.after.items
    return ChunkMessage(
        step.sender, step.receiver, step.chunk, step.start, step.stop, adds, *values
    )


def _elements(message: ChunkMessage, count: int) -> str:
    if message.stop - message.start == count:
        return "its whole array"
    if message.stop == message.start:
        return f"chunk {message.chunk}, which is empty,"
    last = message.stop - 1
    span = f"s {message.start}–{last}" if last > message.start else f" {last}"
    return f"chunk {message.chunk} (element{span})"


def _frame(
    phase: str,
    messages: tuple[ChunkMessage, ...],
    values: Sequence[Sequence[Scalar]],
    owners: Sequence[Sequence[set[int]]],
) -> Frame:
    shares = tuple(tuple(map(len, row)) for row in owners)
    return Frame(phase, messages, tuple(map(tuple, values)), shares)


def title(told: Explained) -> str:
    run = told.run
    count = run.inputs[0].count
    return f"{run.algorithm} allreduce of {count} {run.dtype} over {run.size} ranks"


def cost(told: Explained) -> str:
    fabric = told.prediction.fabric
    return (
        f"measured: {seconds(told.seconds)} (shortest of {told.repeats}); "
        f"simulated: {seconds(told.prediction.seconds)} (model of {fabric})"
    )


def steps(frames: list[Frame]) -> Table:
    # Only the first of very many messages.
    rows = [
        [str(number), frame.phase, f"rank {m.sender} → {m.receiver}", str(m.chunk), m.what]
        for number, frame in enumerate(frames)
        for m in frame.messages
    ]
    more = f"… {len(rows) - _TEXT_LINES} more messages" if len(rows) > _TEXT_LINES else ""
    head = ["round", "phase", "message", "chunk", "values"]
    return Table("", head, rows[:_TEXT_LINES], more, words=tuple(range(len(head))))


def text(told: Explained, frames: list[Frame]) -> str:
    end = f"every rank has {listed(told.run.result.items)}"
    return "\n".join([title(told), cost(told), steps(frames).text(), end])


_MOST_ANSWERS = 6


@dataclass(frozen=True)
class QuizAnswer:
    """A possible answer, and the explanation for it."""

    said: str
    right: bool
    why: str
    #: The chunk that it names, which can be clicked on the rank as well.
    chunk: int | None = None


@dataclass(frozen=True)
class Question:
    """A question before a round."""

    asked: str
    #: The rank in question.
    rank: int
    answers: tuple[QuizAnswer, ...]


def questions(frames: Sequence[Frame]) -> list[list[Question]]:
    # No question before the first frame.
    return [[]] + [_of(frames, number) for number in range(1, len(frames))]


def _of(frames: Sequence[Frame], number: int) -> list[Question]:
    messages = [one for one in frames[number].messages if one.stop > one.start]
    if not messages:
        return []
    # Another rank each time; the second question is about the message of the first one.
    message = messages[3 * number % len(messages)]
    whole = message.stop - message.start == len(frames[0].values[0])
    several = any(one.chunk != message.chunk for frame in frames for one in frame.messages)
    first = _which(frames, number, message) if several or not whole else _whom(frames, number)
    asked = [first, _value(frames[number], number, message)]
    return [one for one in asked if len(one.answers) > 1]


def _which(frames: Sequence[Frame], number: int, message: ChunkMessage) -> Question:
    rank, chunk = message.sender, message.chunk
    every = {one.chunk for frame in frames for one in frame.messages if one.stop > one.start}
    why = f"Rank {rank} sends chunk {chunk}: {_reason(frames, number, message)}."
    answers = [
        QuizAnswer(f"chunk {one}", one == chunk, why, one)
        for one in _near(chunk, rank, sorted(every), len(frames[0].values))
    ]
    return Question(f"Which chunk does rank {rank} send in round {number}?", rank, tuple(answers))


def _reason(frames: Sequence[Frame], number: int, message: ChunkMessage) -> str:
    rank, chunk = message.sender, message.chunk
    if number == 1:
        return "each rank begins with the chunk of its own number"
    came = [one for one in frames[number - 1].messages if one.receiver == rank]
    before = next((one for one in came if one.chunk == chunk), None)
    if before is None:
        return "it is the next one that the others lack"
    if before.adds and not message.adds:
        return "it became complete in the round before, and now complete chunks go around"
    done = "its own share added" if before.adds else "complete"
    return f"it passes on what rank {before.sender} sent it in the round before, {done}"


def _near(right: int, own: int, every: Sequence[int], size: int) -> list[int]:
    likely = [right, own, right + 1, right - 1, own - 1, own + 1, *every]
    found = dict.fromkeys(one % size for one in likely)
    return sorted([one for one in found if one in every][:_MOST_ANSWERS])


def _whom(frames: Sequence[Frame], number: int) -> Question:
    frame, size = frames[number], len(frames[0].values)
    to = {one.sender: one.receiver for one in frame.messages}
    # Every third time a rank that does not send, if there is one.
    resting = [rank for rank in range(size) if rank not in to]
    chosen = resting if resting and number % 3 == 2 else list(to)
    rank = chosen[3 * number % len(chosen)]
    right = to.get(rank)
    why = _rests(frames, number, rank) if right is None else _sends(frame.phase, rank, right, size)
    likely = [right, (rank - 1) // 2, rank ^ 1, rank ^ 2, rank + 1, rank - 1, *range(size)]
    offered = [one for one in dict.fromkeys(likely) if one in range(size) and one != rank]
    answers = [
        QuizAnswer(f"rank {one}", one == right, why)
        for one in sorted(one for one in offered[: _MOST_ANSWERS - 1] if one is not None)
    ]
    answers.append(QuizAnswer("nobody", right is None, why))
    asked = f"To which rank does rank {rank} send its array in round {number}?"
    return Question(asked, rank, tuple(answers))


def _sends(phase: str, rank: int, to: int, size: int) -> str:
    reasons = {
        "reduce": f"that is its parent, ({rank} − 1) // 2, and it has what its children send",
        "broadcast": "the sum goes down again, and that is a child of it",
        "double": f"the numbers of partners differ in one bit, here by {abs(to - rank)}",
        "fold": f"{size} is no power of two, so the last ranks first send their arrays to others",
        "unfold": "that rank sent its array in the first round, and now gets the sum",
    }
    return f"Rank {rank} sends to rank {to}: {reasons[phase]}."


def _rests(frames: Sequence[Frame], number: int, rank: int) -> str:
    phase = frames[number].phase
    later = any(one.sender == rank for frame in frames[number:] for one in frame.messages
                if frame.phase == phase)  # fmt: skip
    if phase in ("fold", "unfold"):
        why = "only those without a partner take part in this round"
    elif phase == "double":
        why = "it has sent its array, and waits for the sum"
    elif later:
        why = "it waits for its turn: a rank handles one message at a time"
    elif phase == "reduce":
        why = "it has sent its sum up, and waits for the total" if rank else "it is the root"
    else:
        why = "no child of it still waits for the sum"
    return f"Rank {rank} sends nothing: {why}."


def _value(frame: Frame, number: int, message: ChunkMessage) -> Question:
    before, received, after = (
        shown(row[0]) for row in (message.before, message.received, message.after)
    )
    rank, sender, place = message.receiver, message.sender, message.start
    if message.adds:
        why = f"In {frame.phase} the received value is added: {before} + {received} = {after}."
    else:
        done = f"{before} becomes {after}"
        why = f"In {frame.phase} the received value is complete and replaces the old one: {done}."
    mistakes = {
        before: f"{before} is what rank {rank} holds already. {why}",
        received: f"{received} is what rank {sender} sends. {why}",
        _sum(message): f"Values are no longer added. {why}",
    }
    answers = [QuizAnswer(after, True, why)]
    answers += [
        QuizAnswer(said, False, mistake) for said, mistake in mistakes.items() if said != after
    ]
    answers.sort(key=lambda one: (len(one.said), one.said))
    asked = (
        f"Rank {sender} sends its element {place} to rank {rank}. "
        f"What does rank {rank} hold there after round {number}?"
    )
    return Question(asked, rank, tuple(answers))


def _sum(message: ChunkMessage) -> str:
    before, received = message.before[0], message.received[0]
    if isinstance(before, str) or isinstance(received, str):
        return shown(received)
    return shown(before + received)
