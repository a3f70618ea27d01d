"""torch's own groups, and the frames of torch. Only cells import torch, never this module."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.call import Pause
from allranks.engine.exceptions import PACKAGE
from allranks.features.torch_jax import other_ranks

#: How long the aborts of all groups may take before the rank goes on.
_ABORT_SECONDS = 5.0


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
        threading.Thread(target=_abort_once_unused, args=(group,), daemon=True).start()


def _abort_once_unused(group: Any) -> None:
    pause = Pause()
    while not is_unused(group):
        pause()
    abort(group)


def is_unused(group: Any) -> bool:
    """Whether no other member can take a result from this rank's last call in a group: it has not
    begun that call, or has left it. An abort of NCCL ends the others' kernels with garbage.
    """
    this, log = world.current(), getattr(group, "log", None)
    begun = () if log is None else log.begun()
    return all(other_ranks.has_closed(r) or this.departure(r) is not None for r in begun)


def abort(group: Any) -> None:
    with suppress(Exception):
        group.abort()


def is_of_torch(frame: FrameType | None) -> bool:
    """Whether it is a frame of `torch.distributed`."""
    own = f"{folder()}distributed{os.sep}"
    return frame is not None and frame.f_code.co_filename.startswith(own)


def end_groups() -> None:
    """Removes all of torch's groups, whose calls no rank is in any more."""
    every = own_groups()
    if not any(map(_is_on_gpu, every)):
        with suppress(Exception):
            c10d().destroy_process_group()
        return
    # ``destroy_process_group`` would wait for the other ranks, which may have aborted NCCL's
    # communicators. Together, because one abort may wait for another.
    aborts = [threading.Thread(target=abort, args=(group,), daemon=True) for group in every]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join(_ABORT_SECONDS / len(aborts))
    with suppress(Exception):
        c10d()._abort_process_group()


def _is_on_gpu(group: Any) -> bool:
    try:
        return group._get_backend(sys.modules["torch"].device("cuda")) is not None
    except RuntimeError:  # it has no backend for CUDA
        return False


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
