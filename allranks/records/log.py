"""Reading the end of a rank's log: by the notebook, or by a rank of the host that has it."""

from __future__ import annotations

import os


def end_of(path: str, nbytes: int, start: int = 0) -> str:
    """Returns the last bytes of a log as text, of what comes from ``start`` on.

    Raises:
        OSError: it cannot be read; it may be on another host.
    """
    with open(path, "rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - nbytes))
        return log.read().decode("utf-8", "replace")
