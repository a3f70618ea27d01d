"""Why a cell ended early on one rank. Both sides; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

WAITING = "Waiting for it:"
"""Heads the list of places at the end of the message of a rank that waited."""


@dataclass(frozen=True, slots=True)
class Report:
    """Why a cell ended early on one rank, as a person reads it."""

    rank: int
    host: str
    device: str
    etype: str
    message: str
    traceback: tuple[str, ...]
    line: int | None
    source_line: str
    waiting: bool
