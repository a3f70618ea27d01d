"""The layout of a pickled value with large arrays in one block of bytes, in memory or a file.

Eight-byte words: how many parts there are, then the length of each. The first part is the pickle
(protocol 5), the others are its out-of-band buffers; each begins at a multiple of 64.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_ALIGNED = 64


def lay_out(parts: Sequence[memoryview | bytes]) -> tuple[bytes, list[int], int]:
    """Returns the head, where each part begins, and how many bytes there are in all."""
    lengths = [len(part) for part in parts]
    head = struct.pack(f"<{len(parts) + 1}Q", len(parts), *lengths)
    starts, at = [], len(head)
    for length in lengths:
        at = -(-at // _ALIGNED) * _ALIGNED
        starts.append(at)
        at += length
    return head, starts, at


def fill(target: bytearray | memoryview, parts: Sequence[memoryview | bytes]) -> None:
    """Writes the parts into a target, whose size :func:`lay_out` returns."""
    head, starts, _ = lay_out(parts)
    target[: len(head)] = head
    for start, part in zip(starts, parts, strict=True):
        target[start : start + len(part)] = part


def unpack(packed: bytearray) -> Any:
    """Returns the value; its arrays lie in ``packed`` and can be written to.

    Raises:
        Exception: unpickling it fails, for example because a package of the ranks is missing here.
    """
    first, *others = _parts(memoryview(packed))
    return pickle.loads(first, buffers=others)


def _parts(packed: memoryview) -> Iterator[memoryview]:
    (count,) = struct.unpack_from("<Q", packed)
    lengths = struct.unpack_from(f"<{count}Q", packed, 8)
    at = 8 * (count + 1)
    for length in lengths:
        at = -(-at // _ALIGNED) * _ALIGNED
        yield packed[at : at + length]
        at += length
