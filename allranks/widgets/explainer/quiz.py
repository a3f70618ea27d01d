"""What a reader may predict of each round: which piece is sent, to whom, and what is held then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.widgets.explainer.frames import Frame, Message, shown

_MOST_ANSWERS = 6


@dataclass(frozen=True)
class QuizAnswer:
    """One answer that is offered, and what is said when it is chosen."""

    said: str
    right: bool
    why: str
    chunk: int | None = None
    """The chunk that it names, which can be clicked on the rank as well."""


@dataclass(frozen=True)
class Question:
    """What is asked before a round is played."""

    asked: str
    rank: int
    """Whom it is about."""
    answers: tuple[QuizAnswer, ...]


def questions(frames: Sequence[Frame]) -> list[list[Question]]:
    """Returns for each frame what is asked before it; of the first one, nothing."""
    return [[]] + [_of(frames, number) for number in range(1, len(frames))]


def _of(frames: Sequence[Frame], number: int) -> list[Question]:
    messages = [one for one in frames[number].messages if one.stop > one.start]
    if not messages:
        return []
    # Another rank each time; the second question is about what the first one's piece does.
    message = messages[3 * number % len(messages)]
    whole = message.stop - message.start == len(frames[0].values[0])
    several = any(one.chunk != message.chunk for frame in frames for one in frame.messages)
    first = _which(frames, number, message) if several or not whole else _whom(frames, number)
    asked = [first, _value(frames[number], number, message)]
    return [one for one in asked if len(one.answers) > 1]


def _which(frames: Sequence[Frame], number: int, message: Message) -> Question:
    rank, chunk = message.sender, message.chunk
    every = {one.chunk for frame in frames for one in frame.messages if one.stop > one.start}
    why = f"Rank {rank} sends chunk {chunk}: {_reason(frames, number, message)}."
    answers = [
        QuizAnswer(f"chunk {one}", one == chunk, why, one)
        for one in _near(chunk, rank, sorted(every), len(frames[0].values))
    ]
    return Question(f"Which chunk does rank {rank} send in round {number}?", rank, tuple(answers))


def _reason(frames: Sequence[Frame], number: int, message: Message) -> str:
    rank, chunk = message.sender, message.chunk
    if number == 1:
        return "each rank begins with the chunk of its own number"
    came = [one for one in frames[number - 1].messages if one.receiver == rank]
    before = next((one for one in came if one.chunk == chunk), None)
    if before is None:
        return "it is the next one that the others lack"
    if before.adds and not message.adds:
        return "with what came in the round before it is complete, and now complete chunks go round"
    done = "its own share added" if before.adds else "complete"
    return f"it passes on what rank {before.sender} sent it in the round before, {done}"


def _near(right: int, own: int, every: Sequence[int], size: int) -> list[int]:
    """Returns the right one and some that are easily taken for it, in order."""
    likely = [right, own, right + 1, right - 1, own - 1, own + 1, *every]
    found = dict.fromkeys(one % size for one in likely)
    return sorted([one for one in found if one in every][:_MOST_ANSWERS])


def _whom(frames: Sequence[Frame], number: int) -> Question:
    frame, size = frames[number], len(frames[0].values)
    to = {one.sender: one.receiver for one in frame.messages}
    # Each third time a rank whose turn it is not, where there is one.
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
        "fold": f"{size} is no power of two, so the last ranks give their arrays away first",
        "unfold": "that one gave its array away in the first round, and is given the sum",
    }
    return f"Rank {rank} sends to rank {to}: {reasons[phase]}."


def _rests(frames: Sequence[Frame], number: int, rank: int) -> str:
    phase = frames[number].phase
    later = any(one.sender == rank for frame in frames[number:] for one in frame.messages
                if frame.phase == phase)  # fmt: skip
    if phase in ("fold", "unfold"):
        why = "only those without a partner take part in this round"
    elif phase == "double":
        why = "it has given its array away, and waits for the sum"
    elif later:
        why = "it waits for its turn: a rank handles one message at a time"
    elif phase == "reduce":
        why = "it has sent its sum up, and waits for the whole one" if rank else "it is the root"
    else:
        why = "no child of it still waits for the sum"
    return f"Rank {rank} sends to nobody: {why}."


def _value(frame: Frame, number: int, message: Message) -> Question:
    before, received, after = (
        shown(row[0]) for row in (message.before, message.received, message.after)
    )
    rank, sender, place = message.receiver, message.sender, message.start
    if message.adds:
        why = f"In {frame.phase} what comes is added: {before} + {received} = {after}."
    else:
        done = f"{before} becomes {after}"
        why = f"In {frame.phase} what comes is complete and takes the place: {done}."
    mistakes = {
        before: f"{before} is what rank {rank} holds already. {why}",
        received: f"{received} is what rank {sender} sends. {why}",
        _sum(message): f"Nothing is added any longer. {why}",
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


def _sum(message: Message) -> str:
    before, received = message.before[0], message.received[0]
    if isinstance(before, str) or isinstance(received, str):
        return shown(received)
    return shown(before + received)
