"""MPI.Op whose function may raise: mpi4py would end the process, and MPI all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Self

from mpi4py import MPI

from allranks.collectives.ops.stand_ins import StandIn

_Plain = MPI.Op
_raised: list[BaseException] = []


class Op(_Plain, metaclass=StandIn):
    """MPI.Op with the same methods."""

    plain = _Plain

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Self:
        """MPI_Op_create. The call that reduces raises what ``function`` raises."""

        @wraps(function)
        def kept(first: Any, second: Any, datatype: Any = None) -> Any:
            if datatype is None:  # of two objects, and not called by MPI
                return function(first, second, datatype)
            try:
                return function(first, second, datatype)
            except BaseException as error:
                _raised.append(error)

        return super().Create(kept, commute)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """MPI_Reduce_local. Raises what the function raises."""
        super().Reduce_local(inbuf, inoutbuf)
        raise_kept()


def raised() -> BaseException | None:
    """Returns, once, what the function of an `Op` has raised since the last time."""
    found = _raised[0] if _raised else None
    _raised.clear()
    return found


def raise_kept() -> None:
    """Raises, once, what the function of an `Op` has raised since the last time."""
    if (error := raised()) is not None:
        raise error
