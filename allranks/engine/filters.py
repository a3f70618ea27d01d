"""Warning filters: what the user asks for holds in cells, and not in what brings the ranks up.

With ``PYTHONWARNINGS=error`` a deprecation in a library would end every rank before its first cell.
"""

from __future__ import annotations

import warnings

_LIBRARIES = r"(ipykernel|ipyparallel|jupyter_client|tornado|traitlets|zmq)(\.|$)"
"""What goes on working beside the cells, in the same process."""

_EVERY = ("ignore", None, Warning, None, 0)


def set_aside() -> None:
    """Ignores every warning until :func:`restore`."""
    warnings.simplefilter("ignore")


def restore() -> None:
    """Filters as the user has asked for, but for the libraries that a rank works with."""
    warnings.filters.remove(_EVERY)  # type: ignore[attr-defined]
    # This also has Python look at the list anew.
    warnings.filterwarnings("ignore", module=_LIBRARIES)
