"""What torch knows of its own collectives. It is never imported here: a cell has done that, or not.

Source: torch.distributed's flight recorder, which notes every collective of a group as it begins.
"""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any, NamedTuple

from allranks.collectives.start import for_torch
from allranks.engine.report import PACKAGE

FOLDER = "/torch/"
"""Part of the names of torch's files."""
_DISTRIBUTED = "/torch/distributed/"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MEETING = "_create_c10d_store"


class Recorded(NamedTuple):
    """What a rank has called in one group."""

    begun: int
    """The number of its last collective."""
    awaited: int
    """The number of the first that is not over; 0 where all are."""
    title: str
    """The name of that one, or of the last: ``all_reduce``."""


def c10d() -> Any:
    """torch's module of process groups, None where this process has not imported it."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def recorded() -> dict[str, Recorded]:
    """What this rank has called, by the names of the groups."""
    found: dict[str, Recorded] = {}
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(native, name, None)
        for entry in json.loads(dump(True, False)).get("entries", ()) if dump else ():
            if entry["time_created_ns"] < for_torch.met_at_ns():
                continue  # of a group that was there before, and had the same name
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            title = str(entry["profiling_name"]).rpartition(":")[2]
            before = found.get(group)
            if before is None or number <= before.begun:
                before = Recorded(0, 0, "")
            if before.awaited:
                found[group] = before._replace(begun=number)
            else:
                found[group] = Recorded(number, 0 if entry["retired"] else number, title)
    return found


def members(group: str) -> tuple[int, ...]:
    """The ranks of a group; nobody where this rank has no group of that name."""
    world = getattr(c10d(), "_world", None)
    for one, ranks in list(getattr(world, "pg_group_ranks", {}).items()):
        if getattr(one, "group_name", "") == group:
            return tuple(sorted(ranks))
    return ()


def groups_made() -> int:
    """How many groups this rank has made since its default group was made, that included."""
    return int(getattr(getattr(c10d(), "_world", None), "group_count", 0))


def frames_in_torch(frame: FrameType | None) -> list[FrameType]:
    """The frames of torch.distributed in the innermost call of the cell's, outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if _DISTRIBUTED in file:
            found.insert(0, frame)
        elif found and FOLDER not in file and not file.startswith(PACKAGE):
            break
        frame = frame.f_back
    return found


def is_meeting(frames: list[FrameType]) -> bool:
    """Whether these look for the store of the first rank, which may not be there."""
    return any(frame.f_code.co_name == _MEETING for frame in frames)


def called(frames: list[FrameType]) -> str:
    """The function of torch.distributed that the cell has called."""
    names = [frame.f_code.co_name for frame in frames]
    return next((name for name in names if name != "wrapper" and name[0] != "_"), names[0])


def peer_of(frames: list[FrameType]) -> int | None:
    """The rank that a ``send`` or ``recv`` among these names."""
    for frame in frames:
        if frame.f_code.co_name in ("send", "recv"):
            local = frame.f_locals
            named = local.get("src", local.get("dst"))
            return named if isinstance(named, int) else None
    return None
