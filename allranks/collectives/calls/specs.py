"""A call's arguments as the ranks compare them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from allranks.collectives.calls.sites import _REMEMBERED, Site

_SHOWN = 4
# Made here, because a cell may replace the functions of json. A root may be numpy's integer.
_dumps = json.JSONEncoder(separators=(",", ":"), default=int).encode
_loads = json.JSONDecoder().decode


class Spec(NamedTuple):
    """The arguments of a call that must be the same on every rank."""

    op: str
    reduction: str = ""
    dtype: str = ""
    shape: tuple[object, ...] = ()
    """One shape, or for a grouped call one for each array; None for a dimension that may differ."""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = ""
    elements: int = 0
    """The number of all elements, for ranks that have joined and contribute zeros."""
    transport: str = ""
    device: str = ""
    nbytes: int = 0
    """The bytes that each rank brings, where they are no arrays with a shape."""
    refused: int = 0
    """How many earlier calls of its communicator the rank has refused for their arguments."""
    in_place: bool = False
    order: str = ""
    """"F" if a buffer of mpi4py is in Fortran's order, "C+F" if only one of two is."""
    client: int = 0
    """`RankState.client`, if it is made in a request of a client. 0 in a cell."""
    mistake: str = ""
    """What the call of mpi4py needs of this rank's buffers, and they have not."""

    @property
    def title(self) -> str:
        return f"{self.op}({self.reduction})" if self.reduction else self.op


JOIN = Spec("join")
"""The call of a rank that has joined."""
_WITH_JOINED = ("allreduce", "grouped_allreduce")


def goes_with_joined(spec: Spec) -> bool:
    """Whether zeros of ranks that have joined can complete a call."""
    return (
        spec.op in _WITH_JOINED and spec.reduction in ("Sum", "Average") and "+" not in spec.dtype
    )


class Shapes(tuple[object, ...]):
    """The shapes of several arrays, in their order; the hash is computed once."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("known")
        if known is None:
            known = self.__dict__["known"] = super().__hash__()
        return known


def describe_group(
    dtypes: Sequence[str], shapes: Sequence[tuple[object, ...]], labels: Sequence[str] = ()
) -> tuple[str, Shapes]:
    """The dtype and the shapes in a `Spec` of several arrays."""
    kinds = dict.fromkeys(dtypes)
    if len(kinds) > 1:
        shapes = [(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    if labels:
        shapes = [(label, *shape) for label, shape in zip(labels, shapes, strict=True)]
    return "+".join(kinds), Shapes(shapes)


@dataclass(slots=True, eq=False)
class Packed:
    """A spec as published: a 64-bit fingerprint, the same in every process, and its text."""

    spec: Spec
    fingerprint: int
    text: bytes


# A program that changes its shapes all the time must not fill the memory.
@lru_cache(_REMEMBERED)
def pack(spec: Spec) -> Packed:
    text = _dumps(spec).encode()
    # Not by hash(), which differs between processes.
    fingerprint = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    if len(spec.shape) > 2 * _SHOWN and isinstance(spec.shape[0], tuple):
        # A checksum shows in the text that two long lists differ.
        checksum = hashlib.blake2b(repr(spec.shape).encode(), digest_size=4).hexdigest()
        more = f"and {len(spec.shape) - _SHOWN} more, checksum {checksum}"
        text = _dumps(spec._replace(shape=(*spec.shape[:_SHOWN], more))).encode()
    return Packed(spec, fingerprint, text)


@lru_cache(_REMEMBERED)
def of_request(packed: Packed, client: int) -> Packed:
    """Returns a call's arguments for the same call in a request of this client."""
    return pack(packed.spec._replace(client=client))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def unpack(text: bytes) -> Spec:
    try:
        return Spec(*map(_tuples, _loads(text.decode())))
    except (ValueError, TypeError):
        return Spec(text.decode("utf-8", "replace"))


_SPEC_BYTES = 700


@lru_cache(_REMEMBERED)
def pack_text(text: bytes, site: Site) -> bytes:
    # It ends with \1, because the rest of an older text may follow where it is written.
    where = f"{site.lineno}\0{site.filename}".encode("utf-8", "surrogateescape")
    return text[:_SPEC_BYTES] + b"\1" + where + b"\1"


def unpack_text(data: bytes) -> tuple[Spec, Site]:
    text, _, rest = data.partition(b"\1")
    lineno, _, filename = (
        rest.partition(b"\1")[0].decode("utf-8", "surrogateescape").partition("\0")
    )
    return unpack(text), Site(filename, int(lineno) if lineno.isdigit() else 0)
