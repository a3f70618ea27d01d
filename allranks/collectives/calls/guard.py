"""What a rank brings to a collective, and what is said when ranks bring different things."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from allranks.collectives.calls.callsite import Site
from allranks.records.ranks import label

_SHOWN = 4
# Made here, because a cell may replace what json holds. A root that is numpy's integer is the same
# as Python's.
_dumps = json.JSONEncoder(separators=(",", ":"), default=int).encode
_loads = json.JSONDecoder().decode


class Spec(NamedTuple):
    """The fingerprint of a call in the clear: what must be the same on every rank."""

    op: str
    reduction: str = ""
    dtype: str = ""
    shape: tuple[object, ...] = ()
    """One shape, or for a grouped call one a tensor; None where a dimension may differ."""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = ""
    elements: int = 0
    """How many in all, for ranks that have joined and bring zeros."""
    transport: str = ""
    device: str = ""

    @property
    def title(self) -> str:
        """The call as a reader knows it: allreduce(Sum)."""
        return f"{self.op}({self.reduction})" if self.reduction else self.op


JOIN = Spec("join")
"""What a rank brings that has run out of data."""
_WITH_JOINED = ("allreduce", "grouped_allreduce")


def goes_with_joined(spec: Spec) -> bool:
    """Whether a call can go on while some ranks bring zeros."""
    return (
        spec.op in _WITH_JOINED and spec.reduction in ("Sum", "Average") and "+" not in spec.dtype
    )


class Shapes(tuple[object, ...]):
    """What several arrays look like, in their order, as a key that is hashed once."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("known")
        if known is None:
            known = self.__dict__["known"] = super().__hash__()
        return known


def describe_group(
    dtypes: Sequence[str], shapes: Sequence[tuple[object, ...]], labels: Sequence[str] = ()
) -> tuple[str, Shapes]:
    """The dtype and the shape of a `Spec` of several arrays.

    Each shape begins with what tells the array from another one of its shape: its dtype where
    they are mixed, and its label where the caller has given one.
    """
    kinds = dict.fromkeys(dtypes)
    if len(kinds) > 1:
        shapes = [(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    if labels:
        shapes = [(label, *shape) for label, shape in zip(labels, shapes, strict=True)]
    return "+".join(kinds), Shapes(shapes)


class Packed:
    """A spec as it is laid out: a 64-bit fingerprint, the same in every process, and its text."""

    __slots__ = ("fingerprint", "spec", "text")

    def __init__(self, spec: Spec, fingerprint: int, text: bytes) -> None:
        self.spec, self.fingerprint, self.text = spec, fingerprint, text


_packed: dict[Spec, Packed] = {}


def pack(spec: Spec) -> Packed:
    """A spec as it is laid out."""
    known = _packed.get(spec)
    if known is None:
        whole = _dumps(spec).encode()
        number = int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little")
        if len(spec.shape) > 2 * _SHOWN and isinstance(spec.shape[0], tuple):
            # Two lists that begin alike differ in their checksums, so that the text tells of it.
            checksum = hashlib.blake2b(repr(spec.shape).encode(), digest_size=4).hexdigest()
            more = f"and {len(spec.shape) - _SHOWN} more, checksum {checksum}"
            whole = _dumps(spec._replace(shape=(*spec.shape[:_SHOWN], more))).encode()
        if len(_packed) > 4096:
            _packed.clear()
        known = _packed[spec] = Packed(spec, number, whole)
    return known


def _tuples(value: Any) -> Any:
    """What JSON has made a list of was a tuple."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def unpack(text: bytes) -> Spec:
    """The spec that a rank laid out."""
    try:
        return Spec(*map(_tuples, _loads(text.decode())))
    except (ValueError, TypeError):
        return Spec(text.decode("utf-8", "replace"))


_texts: dict[tuple[bytes, Site], bytes] = {}
_SPEC_BYTES = 700


def pack_text(text: bytes, site: Site) -> bytes:
    """A spec's text together with a line of source, to be laid out for the other ranks."""
    known = _texts.get((text, site))
    if known is None:
        where = f"{site.lineno}\0{site.filename}".encode("utf-8", "surrogateescape")
        if len(_texts) > 4096:
            _texts.clear()
        known = text[:_SPEC_BYTES] + b"\1" + where + b"\1"
        _texts[(text, site)] = known
    return known


def unpack_text(data: bytes) -> tuple[Spec, Site]:
    """The spec and the line that a rank laid out."""
    text, _, rest = data.partition(b"\1")
    lineno, _, filename = (
        rest.partition(b"\1")[0].decode("utf-8", "surrogateescape").partition("\0")
    )
    return unpack(text), Site(filename, int(lineno) if lineno.isdigit() else 0)


_FACTORS = ("prescale", "postscale", "compression")
_WORDS = {
    "op": "operation",
    "reduction": "reduction",
    "dtype": "dtype",
    "shape": "shape",
    "root": "root",
    **dict.fromkeys(_FACTORS, "factors and options"),
    "elements": "number of elements",
    "transport": "transport",
    "device": "kind of memory",
}
_ADVICE = {
    "op": "Make the same calls in the same order on every rank; look for an `if` on the rank",
    "reduction": "Pass the same op= on every rank",
    "dtype": "Convert with astype() before the call",
    "shape": "Check the last batch, or drop the remainder",
    "root": "Pass the same root on every rank; it is a rank of the world, in a process set too",
    **dict.fromkeys(_FACTORS, "Pass the same factors and options on every rank"),
    "elements": "Pass the same number of tensors on every rank",
    "transport": "Pass the same transport= on every rank, and set ALLRANKS_ALLREDUCE to the same "
    "value",
    "device": "Move the array first (cupy.asarray(x), x.get()), or pass device='/cpu:0'",
}


def mismatch_text(brought: dict[int, tuple[Spec, Site]]) -> str:
    """What `CollectiveMismatch` says: the first thing that differs, who brought it, from where."""
    specs = [spec for spec, _ in brought.values()]
    field = next((f for f in Spec._fields if len({getattr(s, f) for s in specs}) > 1), "op")
    title = specs[0].title if field != "op" else "a collective"
    if field == "reduction":
        title = specs[0].op
    found = _group({r: _value(s, field) for r, (s, _) in brought.items()})
    said = ", ".join(
        f"{label(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in found
    )
    word, advice = _WORDS[field], _ADVICE[field]
    if field == "shape" and specs[0].op.startswith("grouped_"):
        advice = "Pass the same arrays in the same order on every rank: those of the same model"
    if field == "shape" and title == "add_process_set":
        word, advice = "ranks", "Pass the same list on every rank, also on those that are not in it"
    lines = [f"{title} needs the same {word} on every rank: {said}. {advice}."]
    lines += list_sites({rank: site for rank, (_, site) in brought.items()})
    return "\n".join(lines)


def list_sites(sites: dict[int, Site]) -> list[str]:
    """One line of text for each line of source, with the ranks that are there."""
    return [
        f"  {label(ranks)} at {site}"
        for site, ranks in _group({rank: str(site) for rank, site in sites.items()})
    ]


def _value(spec: Spec, field: str) -> str:
    value = getattr(spec, field)
    if field in _FACTORS:
        if spec.prescale == spec.postscale == 1.0 and not spec.compression:
            return "none"
        return (
            f"prescale={spec.prescale}, postscale={spec.postscale}, "
            f"compression={spec.compression or None}"
        )
    if field == "op":
        return str(value)
    if field == "device":
        return "an array on a GPU" if value else "one in host memory"
    if value in ("", -1, ()):
        return "()" if field == "shape" else "none"
    return str(value).replace("None", "any")


def _group(values: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks with the same value together; the fewest ranks first, as they are the odd ones."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return sorted(found.items(), key=lambda item: (len(item[1]), item[1][0]))
