"""The records that torch keeps of its own collectives. Only cells import torch, never this module.

Source: torch.distributed's flight recorder, which records each collective of a group as it begins.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

from allranks.collectives.calls.guard import USER, Site, kind_of
from allranks.collectives.start import under_mpi
from allranks.engine.exceptions import PACKAGE

_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
#: The collectives to which every rank of a group brings the same number of elements.
_EQUAL = ("all_gather", "all_reduce", "broadcast", "gather", "reduce")
#: This number of last calls is compared between ranks.
_COMPARED = 200
_MEETING = "_create_c10d_store"


class Recorded(NamedTuple):
    """The calls of a rank in one group."""

    #: The number of its last collective.
    begun: int
    #: The number of the first that is not over; 0 if all are.
    awaited: int
    #: The name of that one, or of the last: ``all_reduce``.
    title: str


class TorchCall(NamedTuple):
    """One collective of torch: the part that is compared between ranks, and its line."""

    title: str
    shapes: list[list[int]]
    dtypes: list[str]
    line: str

    def matches(self, other: TorchCall) -> bool:
        """Whether both can be parts of one collective."""
        if self.title != other.title or self.title not in _EQUAL:
            return self.title == other.title
        return (self._size, self.dtypes) == (other._size, other.dtypes)

    @property
    def _size(self) -> int:
        return sum(map(math.prod, self.shapes))

    def __str__(self) -> str:
        # As ``all_reduce of shape (3,), Float, at In[4]:3: …``.
        shapes = "".join(f" of shape {tuple(shape)}," for shape in self.shapes[:1])
        dtypes = "".join(f" {dtype}," for dtype in self.dtypes[:1])
        return f"{self.title}{shapes}{dtypes} at {self.line}".replace(", at", " at")


def c10d() -> Any:
    # None where this process has not imported it.
    return sys.modules.get("torch.distributed.distributed_c10d")


def folder() -> str:
    # The beginning of the names of all files of torch.
    file: str = c10d().__file__
    return os.path.dirname(os.path.dirname(file)) + os.sep


def recorded() -> dict[str, Recorded]:
    found: dict[str, Recorded] = {}
    for entry in _entries():
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        before = found.get(group)
        if before is None or number <= before.begun:
            before = Recorded(0, 0, "")
        if before.awaited:
            found[group] = before._replace(begun=number)
        else:
            found[group] = Recorded(number, 0 if entry["retired"] else number, _title(entry))
    return found


def calls() -> dict[str, dict[int, TorchCall]]:
    """Returns this rank's last calls, by the names of the groups and their numbers there."""
    found: dict[str, dict[int, TorchCall]] = {}
    for entry in list(_entries(frames=True))[-_COMPARED:]:
        numbered = found.setdefault(entry["process_group"][0], {})
        if entry["collective_seq_id"] <= max(numbered, default=0):
            numbered.clear()  # of an earlier group of the same name
        numbered[entry["collective_seq_id"]] = TorchCall(
            _title(entry),
            entry["input_sizes"],
            entry["input_dtypes"],
            _line(entry.get("frames", ())),
        )
    return found


def _entries(*, frames: bool = False) -> Iterator[dict[str, Any]]:
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(native, name, None)
        with _without_inductor() if frames else nullcontext():
            found = pickle.loads(dump(True, frames, False)) if dump else {}
        for entry in found.get("entries", ()):
            # Older entries are of an earlier group of the same name.
            if entry["time_created_ns"] >= under_mpi.torch_met_at_ns() and not entry["is_p2p"]:
                yield entry


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Keeps torch from the import of its compiler, which takes seconds, for the lines of frames."""
    names, none = vars(sys.modules["torch"]), object()
    if names.setdefault("_inductor", none) is not none:
        yield
        return
    try:
        yield
    finally:
        if names["_inductor"] is none:
            del names["_inductor"]


def _title(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _line(frames: list[dict[str, Any]]) -> str:
    # The innermost line of the user; the frames begin with the innermost.
    for frame in frames:
        if frame["filename"] and kind_of(frame["filename"]) == USER:
            return str(Site(frame["filename"], frame["line"]))
    return "an unknown line"


def members(group: str) -> tuple[int, ...]:
    world = getattr(c10d(), "_world", None)
    for one, ranks in list(getattr(world, "pg_group_ranks", {}).items()):
        if getattr(one, "group_name", "") == group:
            return tuple(sorted(ranks))
    return ()


def groups_made() -> int:
    # Since the default group was made, which counts too.
    return int(getattr(getattr(c10d(), "_world", None), "group_count", 0))


def frames_in_torch(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    own = folder()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{own}distributed{os.sep}"):
            found.insert(0, frame)
        elif found and not file.startswith(own) and not file.startswith(PACKAGE):
            break
        frame = frame.f_back
    return found


def is_meeting(frames: list[FrameType]) -> bool:
    return any(frame.f_code.co_name == _MEETING for frame in frames)


def called(frames: list[FrameType]) -> str:
    names = [frame.f_code.co_name for frame in frames]
    public = [name for name in names if name != "wrapper" and name[0] != "_"]
    return (public or names or ["wait"])[0]


def peer_of(frames: list[FrameType]) -> int | None:
    # Of a ``send`` or ``recv``.
    for frame in frames:
        if frame.f_code.co_name in ("send", "recv"):
            local = frame.f_locals
            named = local.get("src", local.get("dst"))
            return named if isinstance(named, int) else None
    return None
