"""What is known not to hold yet, in one place: these statements are left out of every deck."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "an_interrupt_of_finalizers": "a finalizer drops it, again and again; a second press ends it",
}
"""Names of statements, each with what happens today."""
