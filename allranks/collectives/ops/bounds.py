"""Whether the calls of mpi4py stay within their buffers.

MPI itself reads and writes behind the end of a buffer that is too short for its parts, and mixes up
values where a buffer to send and one to receive overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allranks.collectives.ops.buffers import (
    PER_RANK,
    has_count,
    is_in_place,
    is_plain,
    layout_of,
    nbytes_of_message,
    taken_apart,
)

_PARTS = {
    "Gatherv": (1,),
    "Scatterv": (0,),
    "Allgatherv": (1,),
    "Alltoallv": (0, 1),
    "Alltoallw": (0, 1),
    "Neighbor_allgatherv": (1,),
    "Neighbor_alltoallv": (0, 1),
    "Neighbor_alltoallw": (0, 1),
}
"""The arguments with a part for each rank, whose lengths and places the program gives."""
_WHOLE = {"Gather": 1, "Allgather": 1, "Scatter": 0}
"""The argument of which a rank's own part may be the other argument."""
_OF_ONE_LENGTH = ("Allreduce", "Reduce", "Scan", "Exscan")
_OF_TYPES = ("Alltoallw", "Neighbor_alltoallw")
"""Each part has its own type, and its displacement is in bytes."""
_COMPARE = ". Compare the counts and displacements with the length of the buffer"
APART = "buffers that do not overlap: found one to send and one to receive with common bytes"


class Parts(NamedTuple):
    """The parts of a buffer, in bytes: where each begins and its length; and the whole length."""

    begins: list[int]
    lengths: list[int]
    nbytes: int


def mistake(
    call: str,
    arguments: tuple[Any, ...],
    me: int,
    size: int,
    *,
    moves_all: bool = True,
    degrees: tuple[int, int] | None = None,
) -> str:
    """Returns why a collective would leave its buffers, as the end of a sentence with "needs"; an
    empty text if it does not. Only for a rank that uses both buffers. ``moves_all``: whether MPI
    moves all parts; those of a neighbour that is MPI.PROC_NULL may overlap others. ``degrees``: the
    numbers of neighbours to which this rank sends and from which it receives.
    """
    if call == "Barrier":
        return ""
    if call == "Bcast":
        return behind_end(arguments[0])
    hint = "" if call.startswith("Neighbor") else ", or MPI.IN_PLACE"
    parts = [1, 1]
    for place, buffer in enumerate(arguments[:2]):
        if type(buffer) is np.ndarray or not moves_all or place in _PARTS.get(call, ()):
            continue
        per_rank = place in PER_RANK.get(call, ())
        if call == "Reduce_scatter_block" and is_in_place(arguments[0]):
            per_rank = place == 1
        if per_rank and has_count(buffer):
            parts[place] = (degrees or (size, size))[place]
        if wrong := behind_end(buffer, parts[place]):
            return wrong
    if call not in _PARTS:
        if not overlap(arguments[0], arguments[1], parts) or _is_harmless(call, arguments, me):
            return ""
        return f"{APART}. Pass a copy, x.copy(){hint}"
    ranks = 0 if call.startswith("Neighbor") else size
    read = _parts_of_types if call in _OF_TYPES else _parts
    found = [read(arguments[place], ranks) for place in _PARTS[call]]
    received = found[-1]
    for one in filter(None, found):
        written = moves_all and one is received and call != "Scatterv"
        if wrong := _misplaced(one, written=written):
            return wrong + _COMPARE
    if received is None or is_in_place(arguments[0]) or not moves_all:
        return ""
    if ranks and call != "Scatterv":
        sent = found[0].lengths[me] if len(found) > 1 and found[0] else _nbytes(call, arguments)
        if sent is not None and sent != received.lengths[me]:
            return (
                f"the same length of a part at its sender and its receiver: rank {me} sends "
                f"{sent:,} bytes of its own, and has {received.lengths[me]:,} for them. Pass the "
                "counts of all ranks: [x, comm.allgather(count)]"
            )
    if _share_memory(*arguments[:2]) and _are_mixed(call, arguments, found, me if ranks else -1):
        return f"{APART}. Pass a copy, x.copy(){hint}"
    return ""


def behind_end(buffer: Any, parts: int = 1) -> str:
    """Returns why a message whose count the program gives leaves its buffer, as `mistake`. mpi4py
    does not compare the two. ``parts``: the number of equal parts with this count.
    """
    layout = layout_of(buffer) if has_count(buffer) else None
    if layout is None or not layout[2] or not parts:
        return ""
    data, start, count, kind = layout
    lower, length = kind.Get_true_extent()
    begin = start + lower
    end = begin + (count * parts - 1) * kind.extent + length
    before, nbytes = _memory(data)
    if -before <= begin and end <= nbytes:
        return ""
    return (
        f"a buffer for all of its elements: found one of {nbytes:,} bytes, and they begin at byte "
        f"{begin:,} and end at {end:,}{_COMPARE}"
    )


def _memory(data: Any) -> tuple[int, int]:
    """Returns the bytes before and from the beginning of a buffer on. A column may begin in a row
    that is a part of its array.
    """
    if not isinstance(data, np.ndarray):
        return 0, data.nbytes if hasattr(data, "dtype") else memoryview(data).nbytes
    whole = data
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    before = data.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return before, whole.nbytes - before


def _misplaced(parts: Parts, *, written: bool) -> str:
    """Returns why parts leave their buffer, or are ``written`` over each other, as `mistake`."""
    behind, in_order = 0, True
    for at, (begin, length) in enumerate(zip(parts.begins, parts.lengths, strict=True)):
        if length:
            if begin < behind:
                in_order = False
            behind = begin + length
            if begin < 0 or behind > parts.nbytes:
                return (
                    f"a buffer for all of its parts: found one of {parts.nbytes:,} bytes, and "
                    f"part {at} begins at byte {begin:,} and ends at {behind:,}"
                )
    if in_order or not written:
        return ""
    spans = sorted(
        (begin, begin + length, at)
        for at, (begin, length) in enumerate(zip(parts.begins, parts.lengths, strict=True))
        if length
    )
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            first, second = sorted((first, second))
            return (
                f"received parts that do not overlap: found parts {first} and {second} with "
                f"common bytes, from byte {begin:,} of the buffer on"
            )
    return ""


def _share_memory(sendbuf: Any, recvbuf: Any) -> bool:
    """Whether two buffers may have common bytes; quickly answered for arrays of numpy."""
    one, other = _data(sendbuf), _data(recvbuf)
    if type(one) is np.ndarray and type(other) is np.ndarray:
        return np.may_share_memory(one, other)
    return not (is_in_place(one) or is_in_place(other))


def _data(buffer: Any) -> Any:
    return buffer[0] if type(buffer) is list or type(buffer) is tuple else buffer


def _are_mixed(
    call: str, arguments: tuple[Any, ...], parts: Sequence[Parts | None], me: int
) -> bool:
    """Whether a part that is sent and one that is received have common bytes. The part of rank
    ``me`` may be the same one in both, as MPI need not move it; -1 if no part is its own.
    """
    both: list[list[tuple[int, int]]] = []
    for place, whole in enumerate(arguments[:2]):
        at = _PARTS[call].index(place) if place in _PARTS[call] else None
        spans = [_span(whole)] if at is None else _spans(whole, parts[at])
        known = [span for span in spans if span is not None]
        if len(known) < len(spans) or not known:
            return False
        both.append(known)
    sent, received = both
    if me >= 0 and sent[me % len(sent)] == received[me % len(received)]:
        del sent[me % len(sent)]
    ends = [0, 0]
    for begin, end, side in sorted(
        (begin, end, side) for side, spans in enumerate((sent, received)) for begin, end in spans
    ):
        if begin < end:
            if begin < ends[1 - side]:
                return True
            ends[side] = max(ends[side], end)
    return False


def _spans(buffer: Any, parts: Parts | None) -> list[tuple[int, int] | None]:
    """Returns the addresses of each part's first byte and of the one behind its last."""
    if parts is None:
        return [None]
    try:
        start = MPI.Get_address(_data(buffer))
    except Exception:  # as in `_parts`, for an array with gaps
        return [None]
    return [
        (start + begin, start + begin + length)
        for begin, length in zip(parts.begins, parts.lengths, strict=True)
    ]


def overlap(sendbuf: Any, recvbuf: Any, parts: Sequence[int] = (1, 1)) -> bool:
    """Whether two buffers have common bytes. Types with gaps are not looked at. ``parts``: the
    number of equal parts of each.
    """
    if is_in_place(sendbuf) or is_in_place(recvbuf):
        return False
    if is_plain(sendbuf) and is_plain(recvbuf):
        return np.may_share_memory(sendbuf, recvbuf)  # exact: both have no gaps
    first, second = _span(sendbuf, parts[0]), _span(recvbuf, parts[1])
    if first is None or second is None:
        return False
    return first[0] < second[1] and second[0] < first[1]


def _span(buffer: Any, parts: int = 1) -> tuple[int, int] | None:
    """Returns the addresses of the first byte of a message and of the one behind its last.
    ``parts``: the number of equal parts with its count.
    """
    layout = None if is_in_place(buffer) else layout_of(buffer)
    if layout is None or not layout[2] or not layout[3].is_predefined:
        return None
    data, start, count, kind = layout
    try:
        begin = MPI.Get_address(data) + start
    except Exception:  # as in `layout_of`
        return None
    return begin, begin + count * parts * kind.extent


def _is_harmless(call: str, arguments: tuple[Any, ...], me: int) -> bool:
    """Whether one of two overlapping buffers is this rank's part of the other, which MPI need not
    move; or mpi4py refuses them, because their lengths differ.
    """
    place = _WHOLE.get(call, 0)
    whole, part = _span(arguments[place]), _span(arguments[1 - place])
    if whole is None or part is None:
        return False
    length = part[1] - part[0]
    if call in _WHOLE:
        return part[0] == whole[0] + me * length
    return call in _OF_ONE_LENGTH and whole[1] - whole[0] != length


def _nbytes(call: str, arguments: tuple[Any, ...]) -> int | None:
    return nbytes_of_message(arguments[0]) if call in ("Gatherv", "Allgatherv") else None


def _parts(buffer: Any, ranks: int) -> Parts | None:
    """Returns the parts of a buffer in mpi4py's forms; None if it is none of them, has a type with
    gaps, or if MPI computes them for a number of ranks that is not known (0).
    """
    try:
        data, counts, places, kind = read_parts(buffer)
        if data is MPI.BOTTOM:  # the displacements are relative to address 0
            return None
        view = data if hasattr(data, "dtype") else np.asarray(memoryview(data))
        if kind is not None and not (kind.is_predefined and kind.size == kind.extent):
            return None
        unit = view.dtype.itemsize if kind is None else kind.extent
        if counts is None and places is not None:
            return None
        if not ranks and not hasattr(counts, "__len__"):
            return None
        counts, places = of_each_part(counts, places, view.nbytes // unit, ranks)
        lengths = [count * unit for count in counts]
        begins = [place * unit for place in places]
        complete = len(begins) == len(lengths) == (ranks or len(lengths))
        return Parts(begins, lengths, view.nbytes) if complete else None
    except Exception:  # mpi4py refuses it, or it is none of the usual forms
        return None


def of_each_part(counts: Any, places: Any, room: int, ranks: int) -> tuple[list[int], list[int]]:
    """Returns the count and the displacement of each part, in elements, as mpi4py computes those
    that are left out, or are one number. ``room``: the elements of the buffer.
    """
    if not hasattr(counts, "__len__"):
        each, more = divmod(room, ranks) if counts is None else (index(counts), 0)
        counts = [each + (part < more) for part in range(ranks)]
    counts = [*map(index, counts)]
    if places is None:
        places = [0, *accumulate(counts)][: len(counts)]
    elif not hasattr(places, "__len__"):
        places = [index(places) * part for part in range(len(counts))]
    return counts, [*map(index, places)]


def _parts_of_types(buffer: Any, ranks: int) -> Parts | None:
    """As `_parts`, for a buffer with a type for each part."""
    try:
        data, *rest, kinds = buffer
        if data is MPI.BOTTOM:  # the displacements are addresses
            return None
        counts, places = rest if len(rest) == 2 else rest[0] if rest else ([1], [0])
        count = ranks or len(kinds)
        if not rest:
            counts, places = counts * count, places * count
        extents = {
            key: kind.extent
            for key, kind in {id(kind): kind for kind in kinds}.items()
            if kind.is_predefined and kind.size == kind.extent
        }
        view = data if hasattr(data, "dtype") else np.asarray(memoryview(data))
        # A KeyError for a type with gaps.
        lengths = [index(n) * extents[id(kind)] for n, kind in zip(counts, kinds, strict=True)]
        begins = [index(place) for place in places]
        complete = len(begins) == len(lengths) == count
        return Parts(begins, lengths, view.nbytes) if complete else None
    except Exception:  # as above
        return None


def read_parts(buffer: Any) -> tuple[Any, Any, Any, MPI.Datatype | None]:
    """Returns the data, the counts, the displacements and the type of a buffer with parts."""
    data, rest, kind = taken_apart(buffer)
    # A tuple is a pair of counts and displacements, a list has counts.
    if len(rest) == 1 and isinstance(rest[0], tuple):
        rest = [*rest[0]]
    counts, places = (*rest, None, None)[:2]
    return data, counts, places, kind
