"""An interrupt that ends a magic is shown without our frames, and says whether there are ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from allranks.magics.session import Session


@contextmanager
def told_shortly(session: Session, said: str) -> Iterator[None]:
    """Within, an interrupt is shown in a line, with ``said`` and whether there are ranks."""
    try:
        yield
    except KeyboardInterrupt as pressed:
        kept = "The ranks keep running." if session.running is not None else _NONE
        text = f"KeyboardInterrupt: {said}. {kept}"
        # IPython shows these lines in place of a traceback.
        setattr(pressed, "_render_traceback_", lambda: [text])  # noqa: B010  unknown to mypy
        raise


BEFORE_THE_CELL = "the cell was interrupted before the ranks began it"
_NONE = "No ranks are running; the next cell starts them."
