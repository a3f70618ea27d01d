"""What is left out of every deck: what does not hold yet."""

from __future__ import annotations

KNOWN: dict[str, str] = {}
"""Names of statements, each with why."""
