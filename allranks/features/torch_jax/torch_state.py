"""The records that torch keeps of its own collectives. Only cells import torch, never this module.

Source: torch.distributed's flight recorder, which records each collective of a group as it begins.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from allranks.collectives.start import under_mpi
from allranks.engine.exceptions import PACKAGE

_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


class Recorded(NamedTuple):
    """The calls of a rank in one group."""

    #: The number of its last collective.
    begun: int
    #: The number of the first that is not over; 0 if all are.
    awaited: int
    #: The name of that one, or of the last: ``all_reduce``.
    title: str


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


def _entries() -> Iterator[dict[str, Any]]:
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(native, name, None)
        found = pickle.loads(dump(True, False, False)) if dump else {}
        for entry in found.get("entries", ()):
            # Older entries are of an earlier group of the same name.
            if entry["time_created_ns"] >= under_mpi.torch_met_at_ns() and not entry["is_p2p"]:
                yield entry


def _title(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def members(group: str) -> tuple[int, ...]:
    world = getattr(c10d(), "_world", None)
    for one, ranks in list(getattr(world, "pg_group_ranks", {}).items()):
        if getattr(one, "group_name", "") == group:
            return tuple(sorted(ranks))
    return ()


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


def members_of_new(frames: list[FrameType]) -> tuple[int, ...] | None:
    # Of the group that is being made: empty for all ranks, None if none is being made.
    for frame in frames:
        if frame.f_code.co_name == "_new_process_group_helper":
            return tuple(frame.f_locals["global_ranks_in_group"])
    return None
