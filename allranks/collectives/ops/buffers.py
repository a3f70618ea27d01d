"""What the buffers of mpi4py's collectives must have in common: their op, their type, their size.

MPI itself does not compare them. It gives a wrong result, or an error that names neither.
"""

from __future__ import annotations

import sys
from functools import cache
from operator import index
from typing import Any, TypedDict

import numpy as np
from mpi4py import MPI

REDUCING = ("Allreduce", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan")
#: Every rank sends as many bytes as the others.
_ALIKE = ("Bcast", "Allgather", "Alltoall")
IN_PLACE_ON_ALL = ("Allreduce", "Alltoall")
"""The send buffer is MPI.IN_PLACE on all ranks or on none."""
_WHOLE_OF_ROOT = {"Gather": 1, "Scatter": 0}
"""The argument that has a part for each rank, on the root; the other one is a part."""
PER_RANK = {
    **dict.fromkeys(("Gather", "Allgather", "Neighbor_allgather"), (1,)),
    **dict.fromkeys(("Scatter", "Reduce_scatter_block"), (0,)),
    **dict.fromkeys(("Alltoall", "Neighbor_alltoall"), (0, 1)),
}
"""The arguments with an equal part for each rank, of which the program may give the count."""
#: These move as many elements on every rank. In the others a rank without data may have an empty
#: buffer of any type.
_TYPED = (
    *("Bcast", "Gather", "Scatter", "Allgather", "Alltoall"),
    *("Neighbor_allgather", "Neighbor_alltoall"),
)
_VARYING = (
    *("Gatherv", "Scatterv", "Allgatherv", "Alltoallv"),
    *("Neighbor_allgatherv", "Neighbor_alltoallv"),
)
_SATURATES = "Open MPI" in MPI.Get_library_version()
_SHORT = ("i1", "i2", "u1", "u2")
_BASIC = {
    kind.char: f"{kind.kind}{kind.itemsize}"
    for kind in map(np.dtype, "hilqpHILQPefdgFDG")
    if kind.itemsize > 1
}
"""The basic types by numpy's characters. Others are compared as bytes, as is each of one byte."""
_PLAIN = frozenset("?bhilqpBHILQPfdgFDG")
"""The dtypes that mpi4py knows, by their characters."""
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
    in_place: bool
    order: str


def compared(call: str, arguments: tuple[Any, ...], root: bool, size: int) -> Compared:
    """Returns what must be the same on every rank; nothing for calls whose buffers may differ.
    ``root``: whether this rank reads or writes the buffer that only the root has. ``size``: the
    number of ranks. A ``dtype`` or an ``order`` with a + is a mistake of this rank: it would
    receive another type, or values in another order, than is sent.
    """
    if call == "Barrier":
        return {}
    found = _orders(call, arguments, root)
    if call in IN_PLACE_ON_ALL:  # MPI chooses its algorithm by this, and would move other data
        found["in_place"] = is_in_place(arguments[0])
    if call not in REDUCING:
        return found | _types(call, arguments, root) | _sizes(call, arguments, root, size)
    dtype, nbytes = _first(arguments)
    (op,) = (argument for argument in arguments[2:] if isinstance(argument, MPI.Op))
    return found | Compared(reduction=name_of_op(op), dtype=dtype, nbytes=nbytes)


def name_of_op(op: Any) -> str:
    """The name of an op, or of a function in its place."""
    if isinstance(op, MPI.Op):
        return _NAMES.get(op.handle, "a function")
    return getattr(op, "__name__", "a function")


def _types(call: str, arguments: tuple[Any, ...], root: bool) -> Compared:
    if call not in _TYPED and call not in _VARYING:
        return {}
    buffers = _used_here(call, arguments, root)
    kinds = list(filter(None, dict.fromkeys(map(_basic, buffers))))
    return {"dtype": "+".join(kinds) or "bytes"} if len(kinds) > 1 or call in _TYPED else {}


def _orders(call: str, arguments: tuple[Any, ...], root: bool) -> Compared:
    """Whether an array is in Fortran's order, as a transposed one: MPI moves memory as it lies."""
    if call not in _TYPED and call not in _VARYING and call not in REDUCING:
        return {}
    orders = set(map(_order, _used_here(call, arguments, root))) - {""}
    if "F" not in orders or (len(orders) == 1 and call in _VARYING):
        return {}
    whole = _WHOLE_OF_ROOT.get(call)
    if whole is not None and len(orders) == 1 and _order(arguments[1 - whole]) != "F":
        return {}  # the root alone has the whole: each part may be a column of its matrix
    return {"order": "+".join(sorted(orders))}


def _order(buffer: Any) -> str:
    """Returns "C" or "F" for an array that is in this order and not in the other one, too."""
    data = buffer
    if isinstance(buffer, list | tuple) and buffer:
        data, kind = buffer[0], buffer[-1]
        if isinstance(kind, MPI.Datatype) and not kind.is_predefined:
            return ""
    if not isinstance(data, np.ndarray) or data.ndim < 2:
        return ""
    flags = data.flags
    return "" if flags.c_contiguous == flags.f_contiguous else "C" if flags.c_contiguous else "F"


def is_in_fortrans_order(buffer: Any) -> bool:
    """Whether the values of a message have another order than its array shows."""
    return _order(buffer) == "F"


def is_masked(buffer: Any) -> bool:
    """Whether a mask hides values of a message, which MPI moves and adds up like all others."""
    data = buffer[0] if isinstance(buffer, list | tuple) and buffer else buffer
    return isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data)


def _used_here(call: str, arguments: tuple[Any, ...], root: bool) -> tuple[Any, ...]:
    """The buffers of a call that this rank reads or writes."""
    buffers = arguments[:1] if call == "Bcast" else arguments[:2]
    if not root:
        buffers = buffers[1:] if call.startswith("Scatter") else buffers[:1]
    return buffers


def _sizes(call: str, arguments: tuple[Any, ...], root: bool, size: int) -> Compared:
    whole = _WHOLE_OF_ROOT.get(call)
    if whole is not None:
        found = nbytes_of_message(arguments[whole]) if root else None
        if found is not None:
            return {"nbytes": found if has_count(arguments[whole]) else found // size}
        return {"nbytes": nbytes_of_message(arguments[1 - whole]) or 0}
    if call not in _ALIKE:
        return {}
    parts = size if call == "Alltoall" and has_count(_brought(arguments)) else 1
    return {"nbytes": _first(arguments)[1] * parts}


def has_count(buffer: Any) -> bool:
    """Whether the program gives the count of a message, in one of mpi4py's forms."""
    found = buffer[1] if isinstance(buffer, list | tuple) and len(buffer) > 1 else None
    if isinstance(found, list | tuple):  # with a displacement
        found = found[0] if found else None
    return found is not None and not isinstance(found, MPI.Datatype | str)


def _brought(arguments: tuple[Any, ...]) -> Any:
    """The buffer that this rank brings."""
    return arguments[1 if is_in_place(arguments[0]) else 0]


def _first(arguments: tuple[Any, ...]) -> tuple[str, int]:
    """Returns the type and the bytes of the buffer that this rank brings."""
    try:
        return _message(_brought(arguments))
    except Exception:  # mpi4py refuses it, or it is none of the usual forms
        return "", 0


def is_in_place(sendbuf: Any) -> bool:
    """Whether a rank sends what its receive buffer has."""
    return sendbuf is None or sendbuf is MPI.IN_PLACE  # which mpi4py takes alike


def _are_equal(sendbuf: Any, recvbuf: Any) -> bool:
    """Whether two buffers have the same memory, type and length."""
    if sendbuf is recvbuf:
        return True
    first, second = layout_of(sendbuf), layout_of(recvbuf)
    if first is None or second is None:
        return False
    try:
        begins = {MPI.Get_address(data) + start for data, start, _, _ in (first, second)}
        return len(begins) == 1 and _message(sendbuf) == _message(recvbuf)
    except Exception:  # as above
        return False


def with_in_place(call: str, arguments: tuple[Any, ...], root: bool) -> tuple[Any, ...]:
    """Returns the arguments of a call with IN_PLACE for a send buffer that equals the receive
    buffer, which MPI does not allow. From 4.2 on, mpi4py does so itself in reductions.
    """
    if root and (call in REDUCING or call == "Alltoall") and _are_equal(*arguments[:2]):
        return (MPI.IN_PLACE, *arguments[1:])
    return arguments


def with_wrapping_sum(call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a reduction with a sum that wraps, as numpy's, for integers of 8 and
    16 bits: on processors with AVX that of Open MPI saturates, from some lengths on.
    """
    if call not in REDUCING or not _SATURATES or _first(arguments)[0] not in _SHORT:
        return arguments
    return tuple(
        _wrapping_sum() if isinstance(one, MPI.Op) and one == MPI.SUM else one for one in arguments
    )


@cache
def _wrapping_sum() -> MPI.Op:
    def add(first: Any, second: Any, datatype: MPI.Datatype) -> None:
        # The bits of a sum that wraps are those of one without a sign.
        kind = f"u{datatype.Get_size()}"
        into = np.frombuffer(second, kind)
        np.add(into, np.frombuffer(first, kind), out=into)

    return MPI.Op.Create(add, commute=True)


def with_copy(call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a call that does not wait, with a copy to send for IN_PLACE where
    libraries receive over what they have not sent yet: Open MPI 5.0 in Ialltoallv and Ialltoallw,
    MPICH 4.0 in Ialltoallw.
    """
    if call not in ("Alltoallv", "Alltoallw") or not is_in_place(arguments[0]):
        return arguments
    buffer = arguments[1]
    data, *rest = buffer if isinstance(buffer, list | tuple) else (buffer,)
    if isinstance(data, np.ndarray):
        copy = _with_its_rest(data) if _has_derived_type(rest) else data.copy("K")
    elif hasattr(data, "dtype"):  # of a GPU
        copy = data.copy() if hasattr(data, "copy") else data.clone()
        _end_of_copy(copy)
    else:
        try:
            copy = np.array(memoryview(data))
        except TypeError:  # MPI.BOTTOM, or what mpi4py refuses
            return arguments
    return ([copy, *rest] if rest else copy, *arguments[1:])


def _has_derived_type(form: list[Any]) -> bool:
    kinds = form[-1] if form else None
    return any(
        isinstance(kind, MPI.Datatype) and not kind.is_predefined
        for kind in (kinds if isinstance(kinds, list | tuple) else [kinds])
    )


def _with_its_rest(data: np.ndarray[Any, Any]) -> Any:
    """A copy of an array as it lies in memory, up to the end of the one of which it is a part: a
    column may begin in a row.
    """
    whole = data
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    begin, first = MPI.Get_address(data), whole.__array_interface__["data"][0]
    end = max(begin + data.nbytes, first + whole.nbytes)
    return np.frombuffer(MPI.memory.fromaddress(begin, end - begin).tobytes(), np.uint8)


def _end_of_copy(copy: Any) -> None:
    """Waits until a GPU has copied: MPI does not wait for streams."""
    device: Any = getattr(copy, "device", None)
    if hasattr(device, "synchronize"):  # of cupy
        device.synchronize()
    elif getattr(copy, "is_cuda", False):
        sys.modules["torch"].cuda.synchronize(device)


def _basic(buffer: Any) -> str:
    """Returns the basic type of a buffer in any form; an empty string for bytes, for several types,
    and where there is no data.
    """
    if type(buffer) is np.ndarray:
        return _BASIC.get(buffer.dtype.char, "") if buffer.size else ""
    try:
        data, _, kind = taken_apart(buffer)
        if kind is not None:
            return _of_datatype(kind)
        if type(data) is np.ndarray:
            return _basic(data)
        return _BASIC.get(dtype_of(data).char, "")
    except Exception:  # as above
        return ""


def dtype_of(data: Any) -> np.dtype[Any]:
    """Returns numpy's dtype of the numbers in an array, a tensor or other memory."""
    if hasattr(data, "dtype"):
        found = data.dtype
        if not isinstance(found, np.dtype):
            found = np.dtype(str(found).rpartition(".")[2])  # torch.float32
        return found
    dlpack = hasattr(data, "__dlpack__")
    return (np.from_dlpack(data) if dlpack else np.asarray(memoryview(data))).dtype


def _of_datatype(kind: MPI.Datatype) -> str:
    if kind.is_predefined:
        return _BASIC.get(np.dtype(kind.typestr).char, "") if kind.size > 1 else ""
    inner, _, _ = kind.decode()
    parts = inner if isinstance(inner, list | tuple) else (inner,)
    found = {_of_datatype(part) for part in parts}
    for part in parts:
        if not part.is_predefined:
            part.Free()
    return found.pop() if len(found) == 1 else ""


def is_plain(buffer: Any) -> bool:
    """Whether it is a numpy array that mpi4py takes, as most are."""
    return type(buffer) is np.ndarray and buffer.flags.carray and buffer.dtype.char in _PLAIN


Layout = tuple[Any, int, int, MPI.Datatype]
"""Where a message is: the data, the byte at which it begins, a count, and the type."""


def taken_apart(buffer: Any) -> tuple[Any, list[Any], MPI.Datatype | None]:
    """Returns the data of a buffer in any of mpi4py's forms, what follows, and its type, if any."""
    data, *rest = buffer if isinstance(buffer, list | tuple) else (buffer,)
    kind = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    return data, rest, MPI.Datatype.fromcode(kind) if isinstance(kind, str) else kind


def layout_of(buffer: Any) -> Layout | None:
    """Returns where a message in any of mpi4py's forms is; None if it is none of them."""
    if is_plain(buffer):
        return buffer, 0, buffer.nbytes, MPI.BYTE
    try:
        data, rest, kind = taken_apart(buffer)
        if len(rest) == 1 and isinstance(rest[0], list | tuple):
            rest = list(rest[0])
        count, place = (None if one is None else index(one) for one in (*rest, None, None)[:2])
        view = data if hasattr(data, "dtype") else np.asarray(memoryview(data))
        if kind is None and count is None and place is None:
            return data, 0, view.nbytes, MPI.BYTE
        unit = view.dtype.itemsize if kind is None else kind.extent
        start = (place or 0) * unit
        if count is None:
            count = (view.nbytes - start) // unit
        return (data, start, count * unit, MPI.BYTE) if kind is None else (data, start, count, kind)
    except Exception:  # of any kind, from the attributes of any object
        return None


def nbytes_of_message(buffer: Any) -> int | None:
    """Returns the bytes of a message in any of mpi4py's forms; None if it is none of them."""
    layout = layout_of(buffer)
    return None if layout is None else layout[2] * layout[3].size


def _message(buffer: Any) -> tuple[str, int]:
    """Returns the type and the bytes of ``data``, ``[data, type]`` or ``[data, count, type]``."""
    if type(buffer) is np.ndarray:
        return buffer.dtype.str[1:], buffer.nbytes
    data, rest, kind = taken_apart(buffer)
    count = rest[0] if rest else None
    if not isinstance(count, int | None):
        count = count[0]  # it has a displacement, too
    view = data if hasattr(data, "dtype") else np.asarray(memoryview(data))
    if kind is None:
        dtype = dtype_of(view)
        return dtype.str[1:], view.nbytes if count is None else count * dtype.itemsize
    if count is None:
        count = view.nbytes // kind.extent
    return kind.typestr, count * kind.size
