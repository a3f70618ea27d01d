"""The version of allranks that runs here. Both sides."""

from __future__ import annotations

import sys


def version() -> str:
    """Returns it, as ``0.1.0``."""
    # The package itself imports what asks for this: it is loaded by now.
    return str(sys.modules["allranks"].__version__)
