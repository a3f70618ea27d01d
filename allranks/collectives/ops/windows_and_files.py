"""Windows and files: MPI has no non-blocking form of most of their calls, so all agree before.

Once every rank has come to the same call, it is certain to end. What one rank does by itself, as
`Win.Lock`, is MPI's own call, which no interrupt reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mpi4py import MPI

from allranks.collectives.ops.mpi_collectives import Collectives
from allranks.collectives.ops.stand_ins import StandIn
from allranks.records.deferred import deferred


class Win(MPI.Win, metaclass=StandIn):
    """MPI.Win with the same methods, of which those that all ranks call are agreed on first."""

    plain = MPI.Win
    comm: MPI.Comm | None = None
    """Of whose ranks it is a window."""


class File(MPI.File, metaclass=StandIn):
    """MPI.File with the same methods, of which those that all ranks call are agreed on first."""

    plain = MPI.File
    comm: MPI.Comm | None = None
    """Whose ranks have opened it."""


def _agree(comm: object, title: str) -> None:
    # One of an epoch that is over can agree on nothing: then it is MPI's own call again.
    if isinstance(comm, Collectives) and comm != MPI.COMM_NULL and not comm.stale:
        comm.agree(title)


def _making(kind: type[Any], name: str, place: int) -> Any:
    """A class method that makes a window or a file of the ranks of ``comm``."""

    @wraps(getattr(kind.plain, name))
    def make(cls: type[Any], *arguments: Any, **options: Any) -> Any:
        comm = options.get("comm", arguments[place] if len(arguments) > place else None)
        _agree(comm, f"{kind.__name__}.{name}")
        with deferred():
            made = getattr(super(kind, cls), name)(*arguments, **options)
        made.comm = comm
        return made

    return classmethod(make)


def _together(kind: type[Any], name: str) -> Callable[..., Any]:
    """A method that all ranks of a window or a file call."""
    plain = getattr(kind.plain, name)

    @wraps(plain)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        _agree(self.comm, f"{kind.__name__}.{name}")
        with deferred():
            return plain(self, *arguments, **options)

    return call


_MAKING = {
    Win: {"Create": 3, "Allocate": 3, "Allocate_shared": 3, "Create_dynamic": 1},
    File: {"Open": 0},
}
"""And the place of the communicator among the arguments."""
_TOGETHER: dict[type[Any], tuple[str, ...]] = {
    Win: ("Fence", "Free"),
    File: (
        *("Close", "Set_size", "Preallocate", "Set_info", "Set_view", "Set_atomicity", "Sync"),
        *("Read_all", "Write_all", "Read_at_all", "Write_at_all", "Read_ordered", "Write_ordered"),
        *("Seek_shared", "Read_all_begin", "Read_all_end", "Write_all_begin", "Write_all_end"),
        *("Read_at_all_begin", "Read_at_all_end", "Write_at_all_begin", "Write_at_all_end"),
        *("Read_ordered_begin", "Read_ordered_end", "Write_ordered_begin", "Write_ordered_end"),
    ),
}

for _kind, _makers in _MAKING.items():
    for _name, _place in _makers.items():
        setattr(_kind, _name, _making(_kind, _name, _place))
    for _name in _TOGETHER[_kind]:
        setattr(_kind, _name, _together(_kind, _name))
