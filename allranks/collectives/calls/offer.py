"""What a member of a call lays out for the others besides the fingerprint."""

from __future__ import annotations

from typing import NamedTuple

Place = tuple[int, int, int]
"""Segments of the window, offset of the input, offset of the output; segment 0 is none."""
NOWHERE: Place = (0, 0, 0)


class Offer(NamedTuple):
    """How much a member brings and where it lies, as its transport says before all have come."""

    nbytes: int = 0
    place: Place = NOWHERE
    """Where its in- and output lie in its window."""
    copied: bool = False
    """Whether what it brings is copied, chunk by chunk, to where its output lies."""
    answered: int = 0
    """Of a rank that has joined: how many calls of the others it has taken part in since."""


NOTHING = Offer()
