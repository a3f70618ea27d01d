"""A call's arguments as the ranks compare them, its line in the user's source, the frames of this
process's threads, and the text of a mismatch.
"""

from __future__ import annotations

import gc
import hashlib
import json
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from allranks.records.ranks import label

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
#: How Cython names the files of mpi4py.
MPI4PY = "src/mpi4py/"
_LIBRARIES = (
    MPI4PY,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
OURS, LIBRARY, USER = range(3)
_WIDTH = 100
_REMEMBERED = 4096
SITES: dict[int, tuple[Site, CodeType]] = {}
"""The user's lines by the address of their instruction. The code object is kept, so that the
address is not used again."""
CELLS: dict[str, str] = {}
"""The names of cells that people see, as ``In[3]``, by the file names of their code. Their sources
are in `linecache` under both."""
_COLLECTS_IN_ALLOCATIONS = sys.version_info < (3, 12)
_collection_lock = threading.RLock()


def shown_name(file: str) -> str:
    return CELLS.get(file, file)


def source_line(name: str, number: int) -> str:
    try:
        return linecache.getline(name, number).strip()
    except Exception:  # a cell has replaced functions of linecache
        return ""


class Site(NamedTuple):
    """One line of source."""

    filename: str
    lineno: int

    @classmethod
    def of(cls, place: str) -> Site | None:
        filename, _, lineno = place.rpartition(":")
        return cls(filename, int(lineno)) if lineno.isdigit() else None

    @property
    def place(self) -> str:
        """The line without its source, from which `with_source` finds it."""
        return f"{self.filename}:{self.lineno}"

    @property
    def source(self) -> str:
        return source_line(self.filename, self.lineno)

    @property
    def in_cell(self) -> str:
        return f"line {self.lineno}: {self.source}" if self.source else str(self)

    def __str__(self) -> str:
        source = self.source
        if len(source) > _WIDTH:
            source = source[: _WIDTH - 1] + "…"
        # A name short enough to be read in a message: relative to the working directory.
        name = self.filename
        with suppress(OSError):  # a cell may have removed that directory
            name = name.removeprefix(os.getcwd() + os.sep)
        where = f"{name}:{self.lineno}"
        return f"{where}: {source}" if source else where


_PLACE = re.compile(r"(?m)^((?:.* (?:at|in) )?)([^\n]+?:\d+)( \(\w+\))?$")
"""A `Site.place` in a text, and perhaps the kind of an exception after it."""


def with_source(text: str) -> str:
    """The text with the source of its lines, as this rank has it."""
    return _PLACE.sub(lambda found: f"{found[1]}{Site.of(found[2])}{found[3] or ''}", text)


@cache
def kind_of(name: str) -> int:
    """Whether a file of this name is `OURS`, of a `LIBRARY`, or the `USER`'s."""
    if name.startswith((_PACKAGE, "<frozen")):
        return OURS
    if name.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in name:
        return LIBRARY
    return USER


def of_frame(frame: FrameType | None) -> Site:
    """The innermost line of the user at or above ``frame``, or else that of a library."""
    user, library = _found(frame)
    return user or library or Site("<unknown>", 0)


def _found(frame: FrameType | None) -> tuple[Site | None, Site | None]:
    """The innermost line of the user, and the innermost line of a library below it."""
    library: Site | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        kind = kind_of(name)
        if kind == USER:
            return Site(shown_name(name), frame.f_lineno), library
        if kind == LIBRARY and library is None:
            library = Site(name, frame.f_lineno)
        frame = frame.f_back
    return None, library


def of_traceback(traceback: TracebackType | None) -> Site:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return of_frame(traceback.tb_frame if traceback is not None else None)


def find(frame: FrameType | None) -> Site:
    """The user's line at or above ``frame``; it is cached."""
    above = frame
    while above is not None:
        code = above.f_code
        at = id(code) + above.f_lasti
        if (known := SITES.get(at)) is not None:
            return known[0]
        kind = kind_of(code.co_filename)
        if kind == USER:
            if len(SITES) >= _REMEMBERED:
                SITES.clear()
            site = Site(shown_name(code.co_filename), above.f_lineno)
            SITES[at] = site, code
            return site
        if kind == LIBRARY:
            break  # not cached: the library's line may be reached from many lines of the user
        above = above.f_back
    user, library = _found(frame)
    if user is None and threading.current_thread() is not threading.main_thread():
        # TensorFlow calls from its own threads, above which the user has no line: the line at
        # which the main thread waits is the next best.
        with no_collection():
            user, _ = _found(frame_of_main_thread())
    return user or library or Site("<unknown>", 0)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection begins within, so that frames of other threads can be walked.

    Before 3.12 CPython collects while it makes a frame object. The collection may let the other
    thread run, so that what ``f_back`` returns is no frame any more. Before 3.11.9 it may also wait
    for a lock that `sys._current_frames` holds, and with it the whole process
    (https://github.com/python/cpython/issues/106883).
    """
    if not _COLLECTS_IN_ALLOCATIONS:
        yield
        return
    with _collection_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def frames_of_threads() -> dict[int, FrameType]:
    with no_collection():
        return sys._current_frames()


def frame_of_main_thread() -> FrameType | None:
    return frames_of_threads().get(threading.main_thread().ident or 0)


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


_FACTORS = ("prescale", "postscale", "compression")
_WORDS = {
    "op": "operation",
    **dict.fromkeys(_FACTORS, "factors and options"),
    "elements": "number of elements",
    "device": "kind of memory",
    "nbytes": "number of bytes",
    "refused": "earlier calls",
    "in_place": "kind of send buffer",
}
"""The names of a spec's fields in a message, where the field's own does not say it."""
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
    "nbytes": "Pass buffers of the same type and length on every rank",
    "refused": "Data of the call that a rank refused may still be on its way. Let its error end "
    "the cell; in a script call allranks.collectives.renew() on every rank",
    "in_place": "Pass MPI.IN_PLACE, or the receive buffer as send buffer, on every rank or on none",
    "device": "Move the array first (cupy.asarray(x), x.get()), or pass device='/cpu:0'",
}


_OF_RANKS = ("add_process_set", "new_group", "split_group")
"""Calls whose shape is a list of ranks."""


def mismatch_text(brought: dict[int, tuple[Spec, Site]]) -> str:
    """The first difference between the calls, its ranks and their lines."""
    specs = [spec for spec, _ in brought.values()]
    field = next((f for f in Spec._fields if len({getattr(s, f) for s in specs}) > 1), "op")
    title = specs[0].title if field != "op" else "a collective"
    if field == "reduction":
        title = specs[0].op
    found = _group({r: _value(s, field) for r, (s, _) in brought.items()})
    said = ", ".join(
        f"{label(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in found
    )
    word, advice = _WORDS.get(field, field), _ADVICE[field]
    if field == "shape" and specs[0].op.startswith("grouped_"):
        advice = "Pass the same arrays in the same order on every rank: those of the same model"
    if field == "shape" and title in _OF_RANKS:
        word, advice = "ranks", "Pass the same list on every rank, also on those that are not in it"
    lines = [f"{title} needs the same {word} on every rank: {said}. {advice}."]
    lines += list_sites({rank: site for rank, (_, site) in brought.items()})
    return "\n".join(lines)


def list_sites(sites: dict[int, Site]) -> list[str]:
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
    if field == "refused":
        return f"refused {value}"
    if field == "in_place":
        return "the receive buffer" if value else "another buffer"
    if field == "device":
        return "an array on a GPU" if value else "one in host memory"
    if value in ("", -1, ()):
        return "()" if field == "shape" else "none"
    return str(value).replace("None", "any")


def _group(values: dict[int, str]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    # The fewest ranks first: they are the likely cause.
    return sorted(found.items(), key=lambda item: (len(item[1]), item[1][0]))
