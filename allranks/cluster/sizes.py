"""How many ranks this machine is asked to start, and how many it may be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index

from allranks.errors import UsageError


def chosen(n: int | None, gpus: Sequence[object]) -> int:
    """Returns how many ranks to start.

    Args:
        n: what is asked for; None for one a GPU, or 2 to 4 by the cores of a machine without.
        gpus: the GPUs that ranks are pinned to.

    Raises:
        UsageError: there cannot be so many.
    """
    cores = os.cpu_count() or 1
    size = (len(gpus) or max(2, min(4, cores))) if n is None else n
    most = max(128, 16 * cores)
    try:
        fits = 1 <= index(size) <= most
    except TypeError:
        fits = False
    if not fits:
        raise UsageError(
            f"expected between 1 and {most} ranks on this machine, found {size!r}. "
            f"Type for example: %%distributed -n {min(4, most)}"
        )
    return index(size)
