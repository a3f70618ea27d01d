"""What the buffers of mpi4py's collectives must have in common: their op, their type, their size.

MPI itself does not compare them. It gives a wrong result, or an error that names neither.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from mpi4py import MPI

_REDUCING = ("Allreduce", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan")
#: Every rank sends as many bytes as the others. In a Gather or Scatter the root's buffer is larger.
_ALIKE = ("Bcast", "Allgather", "Alltoall")
_NAMES = {
    getattr(MPI, name).handle: name
    for name in (
        *("SUM", "PROD", "MIN", "MAX", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"),
        *("MINLOC", "MAXLOC", "REPLACE", "NO_OP"),
    )
}


class Compared(TypedDict, total=False):
    """The fields of a `Spec` that a call's buffers determine."""

    reduction: str
    dtype: str
    nbytes: int


def compared(call: str, arguments: tuple[Any, ...]) -> Compared:
    """Returns what must be the same on every rank; nothing for calls whose buffers may differ."""
    reduces = call in _REDUCING
    if not reduces and call not in _ALIKE:
        return {}
    # mpi4py takes None for IN_PLACE.
    in_place = arguments[0] is None or arguments[0] is MPI.IN_PLACE
    try:
        dtype, nbytes = _message(arguments[1 if in_place else 0])
    except Exception:  # mpi4py refuses it, or it is none of the usual forms
        dtype, nbytes = "", 0
    if not reduces:
        return {"nbytes": nbytes}
    (op,) = (argument for argument in arguments[2:] if isinstance(argument, MPI.Op))
    name = _NAMES.get(op.handle, "a function")
    return {"reduction": name, "dtype": dtype, "nbytes": nbytes}


def nbytes_of_message(buffer: Any) -> int | None:
    """Returns the bytes of a message in mpi4py's usual forms; None if it is none of them, as a
    buffer of a derived type without a count.
    """
    try:
        kind = buffer[-1] if isinstance(buffer, list | tuple) else None
        if isinstance(kind, MPI.Datatype) and not kind.is_predefined and len(buffer) < 3:
            return None
        return _message(buffer)[1]
    except Exception:  # of any kind, from the attributes of any object
        return None


def _message(buffer: Any) -> tuple[str, int]:
    """Returns the type and the bytes of ``data``, ``[data, type]`` or ``[data, count, type]``."""
    data, *rest = buffer if isinstance(buffer, list | tuple) else (buffer,)
    kind = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    if isinstance(kind, str):
        kind = MPI.Datatype.fromcode(kind)
    count = rest[0] if rest else None
    if not isinstance(count, int | None):
        count = count[0]  # it has a displacement, too
    view = data if hasattr(data, "dtype") else np.asarray(memoryview(data))
    if kind is None:
        dtype = np.dtype(view.dtype)
        return dtype.str[1:], view.nbytes if count is None else count * dtype.itemsize
    if count is None:
        count = view.nbytes // kind.extent
    return kind.typestr, count * kind.size
