"""The names of the variables by which a launcher numbers its processes."""

from __future__ import annotations

from typing import NamedTuple


class Variables(NamedTuple):
    """What one launcher sets in each of its processes."""

    ranks: tuple[str, ...]
    """The rank of the process; the first that is set counts."""
    size: str
    """How many processes there are."""
    local_rank: str
    """The number of the process among those of its host."""
    local_size: str
    """How many these are."""
