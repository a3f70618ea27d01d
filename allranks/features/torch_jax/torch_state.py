"""torch's own groups, and the frames of torch. Only cells import torch, never this module."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from allranks.collectives import world
from allranks.engine.exceptions import PACKAGE
from allranks.features.torch_jax import other_ranks


def c10d() -> Any:
    # None where this process has not imported it.
    return sys.modules.get("torch.distributed.distributed_c10d")


def folder() -> str:
    # The beginning of the names of all files of torch.
    file: str = c10d().__file__
    return os.path.dirname(os.path.dirname(file)) + os.sep


def own_groups() -> list[Any]:
    """The groups of torch's own backends."""
    every = list(getattr(getattr(c10d(), "_world", None), "pg_map", ()))
    return [group for group in every if not hasattr(group, "core")]


def end_waits_in_cpp() -> None:
    """Ends the waits of C++ for calls of allranks' groups."""
    works: Any = sys.modules.get("allranks.features.torch_jax.works")
    if works is not None:
        works.end_waits_in_cpp()


def close(cell: int) -> None:
    """Ends this rank's connections to the other ranks, and aborts its groups, unless the cell of
    this number has ended.
    """
    if world.current().scope.number != cell:
        return
    if world.current().board is not None:
        other_ranks.close(cell)
    for group in own_groups():
        # Does nothing for gloo; for NCCL it may take long.
        threading.Thread(target=abort, args=(group,), daemon=True).start()


def abort(group: Any) -> None:
    with suppress(Exception):
        group.abort()


def is_of_torch(frame: FrameType | None) -> bool:
    """Whether it is a frame of `torch.distributed`."""
    own = f"{folder()}distributed{os.sep}"
    return frame is not None and frame.f_code.co_filename.startswith(own)


def frames_in_torch(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    own = folder()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_torch(frame):
            found.insert(0, frame)
        elif found and not file.startswith(own) and not file.startswith(PACKAGE):
            break
        frame = frame.f_back
    return found


def called(frames: list[FrameType]) -> str:
    names = [frame.f_code.co_name for frame in frames]
    public = [name for name in names if name != "wrapper" and name[0] != "_"]
    return (public or names or ["wait"])[0]


def members_of_new(frames: list[FrameType]) -> tuple[int, ...] | None:
    # Of the group that is being made: empty for all ranks, None if none is being made.
    for frame in frames:
        if frame.f_code.co_name == "_new_process_group_helper":
            return tuple(frame.f_locals["global_ranks_in_group"])
    return None
