"""Patterns of communication: which messages a ring, a tree, a line or a collective consists of.

Their names are in small letters, as users read them as words: ``expect(ring(rounds=size - 1))``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from allranks.grading.traffic import RECEIVE, SEND, Traffic
from allranks.records.config import size_text
from allranks.records.ranks import label


class Pattern:
    """What a function is expected to send and call."""

    def expected(self, size: int, each: float | None) -> str:
        """Returns the expectation as text; ``each`` is the size of one message, if it is known."""
        raise NotImplementedError

    def problems(self, traffic: Traffic) -> Iterator[str]:
        """Yields for each difference what was found instead."""
        raise NotImplementedError

    def advice(self) -> str:
        """Returns what to do."""
        raise NotImplementedError


class ring(Pattern):
    """Each rank sends to one neighbour and receives from the other, round by round.

    A rank may send its next message only after it has received one: it passes on what comes.

    Args:
        rounds: the messages that each rank sends; any number if it is None. An allgather has
            ``size - 1``, an allreduce in pieces ``2 * (size - 1)``.
    """

    def __init__(self, rounds: int | None = None) -> None:
        self.rounds = rounds

    def expected(self, size: int, each: float | None) -> str:
        if self.rounds is None:
            return "a ring: each rank sends to one neighbour and receives from the other"
        many = counted(self.rounds, each)
        return (
            f"a ring: each rank sends {many} to one neighbour and receives as many from the other"
        )

    def problems(self, traffic: Traffic) -> Iterator[str]:
        yield from no_collectives(traffic)
        size, steps = traffic.size, {(m.dest - m.source) % traffic.size for m in traffic.messages}
        if not traffic.messages and size > 1 and self.rounds != 0:
            if not any(traffic.collectives):
                yield "no rank sent a message"
            return
        if steps and steps != {1} and steps != {size - 1}:
            wrong = [
                rank
                for rank in range(size)
                if len({m.dest for m in traffic.sent(rank)}) > 1
                or any((m.dest - rank) % size not in (1, size - 1) for m in traffic.sent(rank))
            ]
            yield from described(traffic, wrong or range(size))
            root = bottleneck(traffic)
            if root is not None:
                yield f"all messages begin or end at rank {root}, which all other ranks wait for"
            return
        counts = {
            rank: (len(traffic.sent(rank)), len(traffic.received(rank))) for rank in range(size)
        }
        rounds = counts[0][0] if self.rounds is None else self.rounds
        yield from described(traffic, [r for r, both in counts.items() if both != (rounds, rounds)])
        early = [rank for rank, order in enumerate(traffic.orders) if sends_ahead(order, 1)]
        if early:
            yield f"{label(early)} sent a message before the one to pass on had been received"

    def advice(self) -> str:
        return (
            "In each round send to rank (rank + 1) % size, and receive from rank (rank - 1) % size."
        )


class line(Pattern):
    """Messages go from rank 0 to the last rank; each rank passes on what it has received.

    Args:
        messages: how many go along the line.
    """

    def __init__(self, messages: int = 1) -> None:
        self.messages = messages

    def expected(self, size: int, each: float | None) -> str:
        many = counted(self.messages, each)
        return (
            f"a line: each rank but the last sends {many} to the next one, after it has received it"
        )

    def problems(self, traffic: Traffic) -> Iterator[str]:
        yield from no_collectives(traffic)
        last, wrong = traffic.size - 1, []
        for rank in range(traffic.size):
            sent, received = traffic.sent(rank), traffic.received(rank)
            there = self.messages if rank < last else 0
            came = self.messages if rank else 0
            if len(sent) != there or len(received) != came or any(m.dest != rank + 1 for m in sent):
                wrong.append(rank)
        yield from described(traffic, wrong)
        ahead = [sends_ahead(order, 0) for order in traffic.orders]
        if early := [rank for rank in range(1, traffic.size) if ahead[rank]]:
            yield f"{label(early)} sent before receiving"

    def advice(self) -> str:
        return "Receive from rank - 1 first, except on rank 0; then send to rank + 1."


class tree(Pattern):
    """Messages along the edges of a tree, at most one in each direction.

    No rank exchanges messages with more than ⌈log2(size)⌉ others, so that none is a bottleneck.

    Args:
        rounds: the most messages that may wait for each other. ``2 * ⌈log2(size)⌉`` if it is None:
            up the tree, and down again.
    """

    def __init__(self, rounds: int | None = None) -> None:
        self.rounds = rounds

    def expected(self, size: int, each: float | None) -> str:
        others = "1 other" if depth(size) == 1 else f"{depth(size)} others"
        return (
            f"a tree: each rank exchanges messages with at most {others}, and at most "
            f"{counted(self._most(size), each)} wait for each other"
        )

    def problems(self, traffic: Traffic) -> Iterator[str]:
        yield from no_collectives(traffic)
        size = traffic.size
        edges = {frozenset((m.source, m.dest)) for m in traffic.messages}
        ranks = range(size)
        yield from described(
            traffic, [rank for rank in ranks if sum(rank in edge for edge in edges) > depth(size)]
        )
        reached = {0}
        for _ in ranks:
            reached |= {rank for edge in edges if edge & reached for rank in edge}
        if left := set(ranks) - reached:
            yield f"no messages connect {label(left)} with rank 0"
        elif len(edges) > size - 1:
            yield f"{len(edges)} pairs of ranks exchanged messages; a tree has {size - 1}"
        pairs = Counter((m.source, m.dest) for m in traffic.messages)
        for (source, dest), count in pairs.most_common(1):
            if count > 1:
                yield f"rank {source} sent {count} messages to rank {dest}"
        if traffic.longest_chain > self._most(size):
            yield f"{traffic.longest_chain} messages wait for each other"

    def advice(self) -> str:
        return (
            "Let rank r receive from ranks 2 r + 1 and 2 r + 2, if they exist, and send to rank "
            "(r - 1) // 2; the result goes back on the same edges."
        )

    def _most(self, size: int) -> int:
        return 2 * depth(size) if self.rounds is None else self.rounds


class collective(Pattern):
    """Every rank calls one collective, and nothing else.

    Args:
        name: as ``"allreduce"``; `comm.Allreduce`, `comm.allreduce` and `allreduce` are the same.
        calls: how often.
    """

    def __init__(self, name: str, calls: int = 1) -> None:
        self.name, self.calls = base_name(name), calls

    def expected(self, size: int, each: float | None) -> str:
        return f"{times(self.calls)} of {self.name} on every rank, and no other communication"

    def problems(self, traffic: Traffic) -> Iterator[str]:
        wrong = [
            rank
            for rank, calls in enumerate(traffic.collectives)
            if dict(calls) != {self.name: self.calls} or traffic.sent(rank)
        ]
        silent = [rank for rank in wrong if not traffic.records[rank].events]
        if silent:
            yield f"{label(silent)} called no collective"
        yield from described(traffic, [rank for rank in wrong if rank not in silent])

    def advice(self) -> str:
        return f"Call {self.name} on every rank, with that rank's own value."


def no_collectives(traffic: Traffic) -> Iterator[str]:
    callers = [rank for rank, calls in enumerate(traffic.collectives) if calls]
    if callers:
        names = sorted({name for calls in traffic.collectives for name in calls})
        yield f"{label(callers)} called {', '.join(names)}; only send and receive are allowed here"


def described(traffic: Traffic, ranks: Iterable[int]) -> Iterator[str]:
    """Yields what the two busiest of these ranks sent and received."""
    wrong = sorted(
        ranks,
        key=lambda rank: -sum(m.nbytes for m in traffic.received(rank) + traffic.sent(rank)),
    )
    for rank in wrong[:2]:
        yield traffic.describe(rank)


def bottleneck(traffic: Traffic) -> int | None:
    """Returns the rank at which all messages begin or end; None if there is none."""
    if traffic.size < 3:
        return None
    for rank in range(traffic.size):
        if traffic.messages and all(rank in (m.source, m.dest) for m in traffic.messages):
            return rank
    return None


def sends_ahead(order: list[str], allowance: int) -> bool:
    """Returns whether a rank has at any time sent more than it had received, plus an allowance."""
    ahead = 0
    for kind in order:
        ahead += {SEND: 1, RECEIVE: -1}[kind]
        if ahead > allowance:
            return True
    return False


def depth(size: int) -> int:
    """Returns ⌈log2(size)⌉."""
    return (size - 1).bit_length()


def times(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def counted(count: int, each: float | None) -> str:
    many = "1 message" if count == 1 else f"{count} messages"
    return many if each is None else f"{many} of {size_text(each)}"


_OTHER_NAMES = {"bcast": "broadcast", "reducescatterblock": "reducescatter"}


def base_name(op: str) -> str:
    """Returns ``allgather`` for ``comm.Allgatherv``, and for ``grouped_allgather``."""
    name = op.removeprefix("comm.").removeprefix("grouped_").lower().removesuffix("_object")
    name = name.removesuffix("_async").replace("_", "")
    if name.endswith(("gatherv", "scatterv", "alltoallv", "alltoallw")):
        name = name[:-1]
    return _OTHER_NAMES.get(name, name)
