"""A cause, as it is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A cause: what was found, with figures, and what to type or change next.

    ``kind`` is its name, ``ranks`` are those that it names, ``share`` is its part of the time.
    """

    kind: str
    share: float
    text: str
    next: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}. {self.next}"
