"""Gives torch's process groups to allranks: replaces three functions of torch once a cell has
imported it. The module of the backend, which imports torch, is imported when they are called.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import wraps
from types import ModuleType
from typing import Any

from allranks.collectives import world as worlds
from allranks.collectives.calls.guard import Spec
from allranks.features.torch_jax import calls

#: The environment variable that leaves torch its own groups: ``gloo``.
SETTING = "ALLRANKS_TORCH"


def is_wanted() -> bool:
    """Whether groups of tensors in host memory shall be made by allranks."""
    return os.environ.get(SETTING, "") != "gloo"


def _is_rank() -> bool:
    """Whether this process is a rank; a process that a rank has forked is none."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return worlds.exists() and getattr(c10d, "_allranks", 0) == os.getpid()


def install() -> None:
    """Wraps torch's functions in a program that is no rank of a notebook; imports torch."""
    wrap(importlib.import_module("torch.distributed.distributed_c10d"))


def wrap(c10d: ModuleType) -> None:
    """Wraps the functions of torch that meet, make groups and split them. Works once."""
    module: Any = c10d
    if hasattr(module, "_allranks"):
        return
    module._allranks = os.getpid()
    module._new_process_group_helper = _making(module._new_process_group_helper)
    module.rendezvous = _meeting(module.rendezvous)
    split = getattr(module, "split_group", None)
    if split is not None:
        module.split_group = _splitting(split)
        distributed: Any = sys.modules.get("torch.distributed")
        if hasattr(distributed, "split_group"):
            distributed.split_group = module.split_group


def _making(make: Any) -> Any:
    @wraps(make)
    def helper(*args: Any, **options: Any) -> Any:
        if not _is_rank():
            return make(*args, **options)
        from allranks.features.torch_jax import backend

        return backend.make_group(make, is_wanted(), *args, **options)

    return helper


def _meeting(rendezvous: Any) -> Any:
    @wraps(rendezvous)
    def meet(url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        # torch waits for its store for half an hour, where no interrupt reaches it. Once all ranks
        # have come, this wait is certain to end.
        if _is_rank() and str(url).startswith("env:"):
            world = worlds.current()
            size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0"))
            if size == world.size:
                world.run(calls.make(world.groups[0], Spec("init_process_group"), 0))
        return rendezvous(url, rank, world_size, **options)

    return meet


def _splitting(split: Any) -> Any:
    @wraps(split)
    def split_group(*args: Any, **options: Any) -> Any:
        if not _is_rank() or not is_wanted():
            return split(*args, **options)
        from allranks.features.torch_jax import backend

        return backend.split_group(split, *args, **options)

    return split_group
