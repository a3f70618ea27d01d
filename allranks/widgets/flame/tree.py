"""The stacks of all ranks folded into one tree, and what differs between ranks in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from allranks.records.profile import Profile

#: A frame differs where the rank with most is so far above the one with least, as a share of all.
_DIFFERS = 0.1
#: So much time is a few looks, which chance alone may deal to one rank.
_DIFFERS_SECONDS = 0.05
_EXPLAINED = 0.7


@dataclass
class Node:
    """One frame, called from the one above it; ``seconds`` by rank count what it called too."""

    name: str
    seconds: dict[int, float] = field(default_factory=dict)
    children: dict[str, Node] = field(default_factory=dict)

    def add(self, rank: int, seconds: float) -> None:
        """Counts a rank's time."""
        self.seconds[rank] = self.seconds.get(rank, 0.0) + seconds

    @property
    def by_time(self) -> list[Node]:
        """What it called, the longest first."""
        return sorted(self.children.values(), key=lambda node: (-node.total, node.name))

    @property
    def total(self) -> float:
        """The seconds of all ranks."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Folded:
    """The time of several ranks, folded; ``root`` holds all of it."""

    ranks: tuple[int, ...]
    root: Node

    @property
    def seconds(self) -> float:
        """What a rank has been looked at for, as a mean."""
        return self.root.total / len(self.ranks)

    def mean(self, node: Node) -> float:
        """Returns a rank's seconds in a frame, as a mean over all ranks."""
        return node.total / len(self.ranks)

    def each(self, node: Node) -> dict[int, float]:
        """Returns the seconds of every rank in a frame."""
        return {rank: node.seconds.get(rank, 0.0) for rank in self.ranks}

    def spread(self, node: Node) -> float:
        """Returns how many seconds lie between the rank with most and the one with least."""
        every = self.each(node).values()
        return max(every) - min(every)

    def differs(self, node: Node) -> bool:
        """Whether ranks spend times in a frame that differ enough to be marked."""
        return self.spread(node) >= max(_DIFFERS * self.seconds, _DIFFERS_SECONDS)

    def differing(self) -> list[Node]:
        """Returns the frames in which a difference arises, the greatest first.

        A frame whose difference is that of one frame it called is left out for that one.
        """
        found = [
            node
            for node in _below(self.root)
            if self.differs(node)
            and not any(
                self.spread(child) >= _EXPLAINED * self.spread(node)
                for child in node.children.values()
            )
        ]
        return sorted(found, key=lambda node: -self.spread(node))


def fold(profiles: Sequence[Profile]) -> Folded:
    """Returns one tree of the stacks of several ranks."""
    root = Node("all")
    for profile in profiles:
        for stack, seconds in profile.stacks.items():
            _add(root, profile.rank, stack, seconds)
    return Folded(tuple(sorted({profile.rank for profile in profiles})), root)


def _add(root: Node, rank: int, stack: Sequence[str], seconds: float) -> None:
    node = root
    node.add(rank, seconds)
    for name in stack:
        node = node.children.setdefault(name, Node(name))
        node.add(rank, seconds)


def _below(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)
