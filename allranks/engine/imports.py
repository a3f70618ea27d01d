"""Which module a cell is importing, seen from another thread: nothing is put in its way."""

from __future__ import annotations

from types import FrameType

from allranks.collectives.calls import frames

_DEEPEST = 400


def importing() -> str:
    """Returns the package that the main thread's outermost import is of, or ""."""
    return _outermost(frames.of_main_thread())


def _outermost(frame: FrameType | None) -> str:
    found = module = ""
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "<module>":
            module = str(frame.f_globals.get("__name__", ""))
        elif code.co_filename.startswith("<frozen importlib") and module:
            # Frames go outwards: what this import runs was seen just before.
            found = module
        frame = frame.f_back
    return found.partition(".")[0]
