"""A schedule as a list of choices, and as a short text that a notebook keeps."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from zlib import crc32

from allranks.errors import UsageError

EAGER, RENDEZVOUS = "e", "r"
MOST_SCHEDULES = 2000
MOST_SECONDS = 30.0
_TOKEN = re.compile(r"([er])(\d+)-([\d.]*)-([0-9a-f]{8})")

Action = tuple[int, Hashable]
"""The rank that a choice concerns, and what is chosen."""


@dataclass(frozen=True)
class Start:
    """How a schedule begins: the mode of its sends, and its first choices.

    ``asleep`` are matches that another schedule makes at this place: this one need not make them
    before something else has happened on their rank.
    """

    mode: str
    seed: int = 0
    choices: tuple[int, ...] = ()
    asleep: frozenset[Action] = frozenset()

    def token(self, source: str) -> str:
        """A short text of it; `start_of` reads it."""
        numbers = ".".join(str(one) if one else "" for one in self.choices).rstrip(".")
        return f"{self.mode}{self.seed}-{numbers}-{_checksum(source)}"


def start_of(token: str, source: str) -> tuple[Start, bool]:
    """Returns the schedule of a token, and whether it belongs to this cell's source."""
    check_token(token)
    mode, seed, numbers, checksum = _TOKEN.fullmatch(token).groups()  # type: ignore[union-attr]
    choices = tuple(int(one or 0) for one in numbers.split(".")) if numbers else ()
    return Start(mode, int(seed), choices), checksum == _checksum(source)


def check_token(token: str) -> None:
    if not _TOKEN.fullmatch(token):
        raise UsageError(
            f"expected a schedule that --explore has shown, found --replay {token:.40}. "
            "Type for example: %%distributed -n 3 --explore"
        )


def _checksum(source: str) -> str:
    # Not the magic line: its options differ when the cell is replayed.
    first, _, rest = source.partition("\n")
    return f"{crc32((rest if first.startswith('#') else source).strip().encode()):08x}"
