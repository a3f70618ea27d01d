"""The recorded messages and collectives of all ranks, as one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.records.config import size_text
from allranks.records.ranks import label

ANY = -1
"""A receive from any rank, or with any tag."""
SEND, RECEIVE, COLLECTIVE = "send", "receive", "collective"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One message that this rank sent or received, or one collective that it called.

    ``peer`` is a rank of the world. Messages match if communicator and tag are the same.
    """

    kind: str
    op: str
    nbytes: int = 0
    peer: int = ANY
    communicator: int = 0
    tag: int = 0


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The recorded part of one rank.

    ``error`` is the program's own exception, ``stuck`` the line of a wait that could never end, and
    ``unfinished`` the lines of receives that were posted and not waited for.
    """

    events: tuple[RecordedCall, ...] = ()
    error: str = ""
    stuck: str = ""
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message between two ranks.

    ``chain`` is the length of the longest chain of messages that ends with it: each was sent after
    its sender had received the one before.
    """

    source: int
    dest: int
    nbytes: int
    chain: int


class Traffic:
    """The messages and collectives of all ranks.

    Attributes:
        messages: those between different ranks, each once.
        lost: those that were sent and not received.
        orders: for each rank its messages in the order of its program, as ``"send"`` or
            ``"receive"``.
        collectives: for each rank the number of calls of each collective.
    """

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self.size = len(records)
        self.records = tuple(records)
        self.messages: list[SentMessage] = []
        self.lost: list[SentMessage] = []
        self.collectives = [
            Counter(event.op for event in record.events if event.kind == COLLECTIVE)
            for record in records
        ]
        self.orders = [
            [e.kind for e in record.events if e.kind != COLLECTIVE and e.peer != rank]
            for rank, record in enumerate(records)
        ]
        self._replay()

    @property
    def longest_chain(self) -> int:
        return max((message.chain for message in self.messages), default=0)

    def sent(self, rank: int) -> list[SentMessage]:
        """Returns the messages that a rank sent to other ranks."""
        return [message for message in self.messages if message.source == rank]

    def received(self, rank: int) -> list[SentMessage]:
        """Returns the messages for a rank from other ranks."""
        return [message for message in self.messages if message.dest == rank]

    def collective_nbytes(self, rank: int) -> int:
        """Returns the bytes of a rank's collectives, each the larger of input and output."""
        return sum(e.nbytes for e in self.records[rank].events if e.kind == COLLECTIVE)

    def describe(self, rank: int) -> str:
        """Returns for example ``rank 0 sent 3 messages of 8 MB to rank 1, received none``."""
        sent, received = self.sent(rank), self.received(rank)
        parts = [
            f"received {_described(received)}{_of('from', (m.source for m in received))}",
            f"sent {_described(sent)}{_of('to', (m.dest for m in sent))}",
        ]
        calls = [
            f"{op} ({count} times)" if count > 1 else op
            for op, count in sorted(self.collectives[rank].items())
        ]
        if calls:
            parts.append(f"called {', '.join(calls)}")
        return f"rank {rank} {', '.join(parts[:-1])} and {parts[-1]}"

    def __str__(self) -> str:
        return "\n".join(map(self.describe, range(self.size)))

    def _replay(self) -> None:
        """Matches sends and receives, and finds the chains."""
        steps = [list(record.events) for record in self.records]
        at, clocks = [0] * self.size, [0] * self.size
        arriving: list[list[tuple[RecordedCall, SentMessage]]] = [[] for _ in range(self.size)]
        moved = True
        while moved:
            moved = False
            for rank, events in enumerate(steps):
                while at[rank] < len(events):
                    event = events[at[rank]]
                    if event.kind == SEND:
                        sent = SentMessage(rank, event.peer, event.nbytes, clocks[rank] + 1)
                        arriving[event.peer].append((event, sent))
                        if event.peer != rank:
                            self.messages.append(sent)
                    elif event.kind == RECEIVE:
                        found = next(
                            (pair for pair in arriving[rank] if _matches(event, *pair)), None
                        )
                        if found is None:
                            break
                        arriving[rank].remove(found)
                        clocks[rank] = max(clocks[rank], found[1].chain)
                    at[rank] += 1
                    moved = True
        self.lost = [message for pairs in arriving for _, message in pairs]


def _matches(receive: RecordedCall, send: RecordedCall, message: SentMessage) -> bool:
    return (
        receive.communicator == send.communicator
        and receive.peer in (ANY, message.source)
        and receive.tag in (ANY, send.tag)
    )


def _described(messages: Sequence[SentMessage]) -> str:
    if not messages:
        return "no message"
    sizes = sorted(message.nbytes for message in messages)
    count = "1 message" if len(messages) == 1 else f"{len(messages)} messages"
    low, high = size_text(sizes[0]), size_text(sizes[-1])
    return f"{count} of {low}" if low == high else f"{count} of {low} to {high}"


def _of(word: str, ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    return f" {word} {label(found)}" if found else ""
