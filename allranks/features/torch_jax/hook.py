"""Gives torch's process groups to allranks: replaces functions of torch once a cell has imported
it. The module of the backend, which imports torch, is imported when they are called.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import wraps
from inspect import isfunction
from types import ModuleType
from typing import Any

from allranks.collectives import world as worlds
from allranks.collectives.calls.specs import Spec
from allranks.errors import UsageError
from allranks.features.torch_jax import calls, stores
from allranks.features.torch_jax.choice import is_wanted
from allranks.rendezvous import torch_group_keys

#: The module of ``torch.compile`` that lists what is not traced.
COMPILER = "torch._dynamo.trace_rules"


def _is_rank() -> bool:
    """Whether this process is a rank; a process that a rank has forked is none."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return worlds.exists() and getattr(c10d, "_allranks", 0) == os.getpid()


def install() -> None:
    """Wraps torch's functions in a program that is no rank of a notebook; imports torch."""
    wrap(importlib.import_module("torch.distributed.distributed_c10d"))


def exclude_from_compiler(rules: ModuleType) -> None:
    """Leaves the calls of allranks out of what ``torch.compile`` traces: a graph ends before each.

    Args:
        rules: `torch._dynamo.trace_rules`, which is imported by the first use of the compiler.
    """
    add: Any = getattr(rules, "add", None)
    if add is not None:
        for name in ("allranks", "cupy"):  # whose calls of numpy would be traced as torch's
            add(name)


def wrap(c10d: ModuleType) -> None:
    """Wraps torch's functions that meet, and that name, make and split groups. Works once."""
    module: Any = c10d
    if hasattr(module, "_allranks"):
        return
    module._allranks = os.getpid()
    module._process_group_name = _naming(module, module._process_group_name)
    module._new_process_group_helper = _making(module._new_process_group_helper)
    rendezvous = _meeting(module.rendezvous)
    # Kept for `init_process_group` only: `init_rpc` uses its store in threads, and a wait of C++ in
    # one thread holds the connection against all others.
    module.rendezvous = _meeting(module.rendezvous, stores.KeptStore())
    stores.wrap(_is_rank)
    # torch exports it once this module has been executed.
    module.batch_isend_irecv = _batching(module.batch_isend_irecv)
    split = getattr(module, "split_group", None)
    if split is not None:
        module.split_group = _splitting(split)
    # `torch.distributed` has taken these already, or takes them from these modules later.
    meeting: Any = sys.modules["torch.distributed.rendezvous"]
    meeting.rendezvous = rendezvous
    distributed: Any = sys.modules.get("torch.distributed")
    taken = {"rendezvous": rendezvous, "split_group": getattr(module, "split_group", None)}
    for name, function in taken.items():
        if isfunction(getattr(distributed, name, None)):
            setattr(distributed, name, function)


def _naming(c10d: Any, name_of: Any) -> Any:
    @wraps(name_of)
    def name(ranks: Any, use_hashed_name: bool) -> Any:
        # torch names groups by a counter. A rank that has failed to make its first group has
        # counted that alone, and would then wait for keys of another name than the other ranks.
        if _is_rank() and c10d.GroupMember.WORLD is None:
            c10d._world.group_count = 0
        return name_of(ranks, use_hashed_name)

    return name


def _making(make: Any) -> Any:
    @wraps(make)
    def helper(*args: Any, **options: Any) -> Any:
        if not _is_rank():
            return make(*args, **options)
        from allranks.features.torch_jax import backend

        return backend.make_group(make, is_wanted(), *args, **options)

    return helper


def _meeting(rendezvous: Any, kept: stores.KeptStore | None = None) -> Any:
    @wraps(rendezvous)
    def meet(url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        # torch waits for its store for half an hour, where no interrupt reaches it. Once all ranks
        # have come, this wait is certain to end.
        if not _is_rank():
            return rendezvous(url, rank, world_size, **options)
        world, by_environment = worlds.current(), str(url).startswith("env:")
        size, place = world_size, rank
        if by_environment and size <= 0:
            size = int(os.environ.get("WORLD_SIZE", "0"))
        if by_environment and place < 0:
            place = int(os.environ.get("RANK", "-1"))
        if by_environment and size > world.size:
            raise UsageError(
                f"torch needs world_size={world.size}, the number of ranks: found {size}. "
                f"Leave world_size= out, or type: %distributed start -n {size}"
            )
        if size != world.size:
            return rendezvous(url, rank, world_size, **options)
        is_kept = kept is not None and by_environment and kept.is_for(place)
        mine = torch_group_keys.made_in_cell(), is_kept
        spec = Spec("init_process_group")
        found = world.run(calls.gather_objects(world.groups[0], spec, mine))
        # A rank that has failed, or has made a group of some ranks, has counted it alone.
        torch_group_keys.made = max(made for made, _ in found)
        if kept is not None and all(there for _, there in found):
            # Only now: C++ asks the process that has the store, and hears no interrupt meanwhile.
            is_open = kept.is_open()
            if all(world.run(calls.gather_objects(world.groups[0], spec, is_open))):
                return iter([(kept.with_prefix(torch_group_keys.next()), place, size)])
        met = rendezvous(url, rank, world_size, **options)
        return kept.keeping(met) if kept is not None and by_environment else met

    return meet


def _splitting(split: Any) -> Any:
    @wraps(split)
    def split_group(*args: Any, **options: Any) -> Any:
        if not _is_rank() or not is_wanted():
            return split(*args, **options)
        from allranks.features.torch_jax import backend

        return backend.split_group(split, *args, **options)

    return split_group


def _batching(batch: Any) -> Any:
    @wraps(batch)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        if not _is_rank():
            return batch(p2p_op_list)
        from allranks.features.torch_jax import compared_group

        # NCCL needs messages in both directions in one batch, for which torch looks at the class.
        group = p2p_op_list[0].group if p2p_op_list else None
        with compared_group.as_torchs(group):
            return batch(p2p_op_list)

    return batch_isend_irecv
