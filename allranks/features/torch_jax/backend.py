"""The backend ``allranks`` of torch.distributed, and how a rank's process groups become its groups.

It is torch's default for tensors in host memory, and is used in place of gloo, where
``get_backend()`` returns the name that was asked for. Groups with a GPU's backend are torch's own,
unless ranks share a GPU, or those of allranks shall take tensors of GPUs too (`takes_gpu`). This
module imports torch.

torch makes every group in `_new_process_group_helper`, which is wrapped here: torch calls a
backend only on the members of a group, and `new_group` is to be compared on all ranks.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from allranks.collectives import world as worlds
from allranks.collectives.calls.call import Members
from allranks.collectives.calls.specs import Spec
from allranks.collectives.host import memory
from allranks.collectives.ops.operations import recv, send
from allranks.collectives.world.world import Group, World, group_nbytes
from allranks.errors import CollectiveMismatch, UsageError
from allranks.features.torch_jax import calls, choice, stores
from allranks.features.torch_jax.call_log import CallLog
from allranks.features.torch_jax.choice import takes_gpu
from allranks.features.torch_jax.compared_group import ComparedGroup, in_place_of_torchs
from allranks.features.torch_jax.cuda_group import CudaGroup
from allranks.features.torch_jax.group_base import NO_LIMIT_SECONDS
from allranks.features.torch_jax.process_group import AllranksGroup
from allranks.records.deferred import deferred

NAME = "allranks"
_GLOO, _NCCL = "gloo", "nccl"
#: Groups of torch have numbers from here on: above process sets, below groups of communicators.
_FIRST = 1 << 19
#: Those of torch's own groups are far from all others.
_COMPARED = 1 << 40
_TAG = (1 << 14) - 2
_last = 0
"""The number of the last group that was made on this rank, counted from `_FIRST`."""
_prepared: dict[str, tuple[int, tuple[int, ...]]] = {}
"""Groups that exist, and that torch is about to make on this rank."""

Exchange = Callable[[Any], dict[int, Any]]
"""Returns the objects of all ranks that take part, by rank."""


def register() -> None:
    """Registers the backend with torch."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def make_group(
    make: Callable[..., Any], wanted: bool, group_size: int, group_rank: int,
    ranks: Sequence[int], backend: Any, store: Any, group_name: str, *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """Makes a group by ``make``, which is torch's `_new_process_group_helper`.

    ``wanted`` is whether groups of tensors in host memory shall be those of allranks.
    """
    register()
    size = c10d._get_default_group().size() if ranks else group_size
    if not ranks and _is_world(size):
        _note_gpus()
    # Not a name that only the members know, as with `use_local_synchronization`.
    by_all = bool(ranks) and str(group_name).isdigit() and _is_world(size)
    if by_all:
        group_name = _agreed_name(ranks)
    if not wanted or not _is_ours(backend, size):
        backend = _without_us(backend)
        if not ranks:
            stores.report_size(size)
        with in_place_of_torchs():
            made = make(group_size, group_rank, ranks, backend, store, group_name, *args, **options)
        if by_all or (not ranks and _is_world(size)):
            _confirm(made[0], "new_group" if ranks else "init_process_group")
        if _is_world(size):
            _compare(made[0], list(ranks), group_rank, str(group_name))
        return made
    if by_all:
        _prepare(list(ranks), group_name)
    made = make(group_size, group_rank, ranks, NAME, store, group_name, *args, **options)
    if isinstance(made[0], AllranksGroup):
        made[0].set_store(made[1])
        _rename(made[0], backend, made[1])
    return made


def _is_world(size: int) -> bool:
    return worlds.exists() and worlds.current().size == size


def _note_gpus() -> None:
    """Finds out whether ranks share a GPU. Collective over all ranks."""
    world = worlds.current()
    spec = Spec("init_process_group", shape=("gpus",))
    mine = world.hosts[world.rank], choice.own_gpu()
    choice.note_gpus(world.run(calls.gather_objects(world.groups[0], spec, mine)))


def _is_ours(backend: Any, size: int) -> bool:
    """Whether a group has only backends that allranks replaces, on all ranks of allranks."""
    if not _is_world(size):
        return False
    found = c10d.BackendConfig(c10d.Backend(str(backend))).get_device_backend_map()
    if takes_gpu():
        names = {NAME, _GLOO, *([_NCCL] if dist.is_nccl_available() else [])}
        ours = {device for device, name in found.items() if name in names}
        return bool(ours & {"cpu", "cuda"}) and ours == set(found)
    devices = {device for device, name in found.items() if name in (NAME, _GLOO)}
    others = {device: name for device, name in found.items() if device not in devices}
    if backend is None or str(backend) == c10d.Backend.UNDEFINED:
        # torch's defaults for devices that this rank does not have.
        others = {device: name for device, name in others.items() if _is_there(device)}
    return "cpu" in devices and not others


def _is_there(device: str) -> bool:
    module = getattr(torch, device, None)
    return bool(getattr(module, "is_available", lambda: False)())


def _without_us(backend: Any) -> Any:
    """The backend with gloo in our place, for groups that cannot be ours."""
    text = str(backend)
    if text == NAME:
        return c10d.Backend(_GLOO)
    if text == c10d.Backend.UNDEFINED:
        found = c10d.Backend.default_device_backend_map
        pairs = [f"{device}:{_GLOO if name == NAME else name}" for device, name in found.items()
                 if device == "cpu" or _is_there(device)]  # fmt: skip
        return c10d.Backend(",".join(pairs) if len(pairs) > 1 else _GLOO)
    return backend


def _rename(pg: AllranksGroup, backend: Any, store: Any) -> None:
    """Makes ``get_backend()`` return the name that the user asked for."""
    state = c10d._world
    if backend is not None and str(backend) != c10d.Backend.UNDEFINED:
        pg.call_itself(str(backend))
        # The default of torch's NCCL, which is below that of other backends, is no limit here.
        if _NCCL in str(backend) and pg.options._timeout == c10d.default_pg_nccl_timeout:
            pg.set_timeout(timedelta(seconds=NO_LIMIT_SECONDS))
    state.pg_map[pg] = (backend, store)
    state.pg_backend_config[pg] = str(c10d.BackendConfig(c10d.Backend(str(backend))))


def _create(options: Any, backend_options: Any) -> AllranksGroup:
    """Makes a group on a member. The default group has no list of ranks."""
    name, ranks = str(options.group_id), list(options.global_ranks_in_group)
    world = worlds.current()
    if not ranks:
        number, members = _default_group(world, options.group_rank, name)
    elif name in _prepared:
        number, members = _prepared.pop(name)
    else:
        # `use_local_synchronization`: only the members are here.
        members = _default_ranks(ranks)
        number = _open(world, members, _among(members))
    kind = CudaGroup if takes_gpu() else AllranksGroup
    return kind(world, number, members, name, options.timeout, options.store)


def _default_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks of torch as ranks of allranks."""
    default = c10d._get_default_group()
    known: Sequence[int] = range(worlds.current().size)
    if isinstance(default, AllranksGroup):
        known = default.ranks
    elif isinstance(default, ComparedGroup) and default.log is not None:
        known = default.log.members.ranks
    return tuple(known[rank] for rank in ranks)


def _compare(pg: Any, ranks: list[int], place: int, name: str) -> None:
    """Has the members of a group of torch's own compare their calls from now on."""
    world, title = worlds.current(), "new_group" if ranks else "init_process_group"
    exchange = _within(world.groups[0], title)
    if ranks:
        members = _default_ranks(ranks)
        exchange = exchange if name.isdigit() else _among(members)
    else:
        places = exchange(place)  # torch's numbers of the ranks may be others than ours
        members = tuple(sorted(places, key=places.__getitem__))
    here = _here(world, members)
    shared = _shared(world, members, here, CallLog.nbytes(len(here)), exchange)
    if isinstance(pg, ComparedGroup) and shared is not None:
        number = _COMPARED + zlib.crc32(f"{name} {members}".encode())
        pg.log = CallLog(Members(number, members, world.rank), here, shared)


def _default_group(world: World, rank: int, name: str) -> tuple[int, tuple[int, ...]]:
    """The group of all ranks; torch's numbers of the ranks may be others than ours."""
    spec = Spec("init_process_group", shape=("group",))
    places = world.run(calls.gather_objects(world.groups[0], spec, rank))
    if sorted(places) != list(range(world.size)):
        raise UsageError(
            f"init_process_group needs another rank= on each of the {world.size} ranks: found "
            f"{places}. Leave rank= and world_size= out."
        )
    members = tuple(places.index(place) for place in range(world.size))
    if members == tuple(range(world.size)):
        return 0, members
    return _open(world, members, _within(world.groups[0], "init_process_group")), members


def _agreed_name(ranks: Sequence[int]) -> str:
    """The name of a group that all ranks are about to make.

    torch has taken it from a counter on each rank, and a rank that has failed to make a group may
    have counted one more or one less. Besides, torch's own wait for the ranks takes no interrupt.
    """
    world, count = worlds.current(), c10d._world.group_count
    call = calls.new_group(world.groups[0], count, tuple(ranks), _default_ranks(ranks))
    c10d._world.group_count = count = world.run(call)
    return str(count - 1)


def _confirm(pg: Any, title: str) -> None:
    """Waits until all ranks have made a group. If one has failed, none has a default group."""
    world = worlds.current()
    try:
        world.run(calls.make(world.groups[0], Spec(title, shape=("made",)), 0))
    except BaseException:
        if not c10d.is_initialized():
            c10d._update_default_pg(pg)
            c10d.destroy_process_group()
        raise


def _prepare(ranks: list[int], name: str) -> None:
    """Opens a group of allranks for one that all ranks are about to make."""
    default = c10d._get_default_group()
    if not isinstance(default, AllranksGroup):
        return
    world, members = worlds.current(), _default_ranks(ranks)
    world.divided = True
    number = _open(world, members, _within(default.core(), "new_group"))
    if world.rank in members:
        _prepared[name] = number, members


def _within(parent: Group, title: str, first: Spec | None = None) -> Exchange:
    """An exchange of objects between all members of a group; the first call has this spec."""
    specs: Iterator[Spec] = iter([first] if first is not None else [])

    def exchange(value: Any) -> dict[int, Any]:
        call = calls.gather_objects(parent, next(specs, Spec(title)), value)
        found = worlds.current().run(call)
        return dict(zip(parent.ranks, found, strict=True))

    return exchange


def _among(members: tuple[int, ...]) -> Exchange:
    """An exchange of objects between some ranks only, through the first of them."""
    import numpy as np

    from allranks.collectives.ops.operations import dumps, loads

    first, *others = members
    world = worlds.current()

    def exchange(value: Any) -> dict[int, Any]:
        if world.rank != first:
            send(dumps((members, value)), first, _TAG, name="new_group")
            found = loads(np.asarray(recv(first, _TAG, name="new_group")))
        else:
            brought = {first: (members, value)}
            for rank in others:
                brought[rank] = loads(np.asarray(recv(rank, _TAG, name="new_group")))
            found = brought
            for rank in others:
                send(dumps(brought), rank, _TAG, name="new_group")
        different = {rank: ranks for rank, (ranks, _) in found.items() if ranks != members}
        if different:
            rank, ranks = min(different.items())
            raise CollectiveMismatch(
                f"new_group needs the same ranks on all of its members: rank {rank} has "
                f"{list(ranks)}, rank {world.rank} has {list(members)}. Pass the same list."
            )
        return {rank: value for rank, (_, value) in found.items()}

    return exchange


def _open(world: World, members: tuple[int, ...], exchange: Exchange) -> int:
    """Opens a group of allranks for these ranks; returns its number.

    ``exchange`` returns the objects of all ranks that take part, by rank. They are at least the
    members. Groups last over epochs: they are opened by all members or by none.
    """
    global _last
    here = _here(world, members)
    nbytes = group_nbytes(len(world.sharing(members)), len(here), len(members))
    with deferred():
        # A number that no rank has used before.
        counts = exchange(_last)
        number: int = _FIRST + max(counts.values()) + 1
        shared = _shared(world, members, here, nbytes, exchange)
        _last = number - _FIRST
        if world.rank in members:
            world.open(number, members, shared)
    return number


def _here(world: World, members: tuple[int, ...]) -> tuple[int, ...]:
    """The members on this rank's host."""
    hosts = world.sharing(members)
    return next((own for own in hosts if world.rank in own), (world.rank,))


def _shared(
    world: World, members: tuple[int, ...], here: tuple[int, ...], nbytes: int, exchange: Exchange
) -> mmap.mmap | None:
    """Memory of the members on each host; None if one of them cannot map it."""
    member, made = world.rank in members, None
    with deferred():
        if member and world.rank == here[0]:
            made = memory.segment(nbytes) or memory.segment(nbytes, named=True)
        addresses = exchange(made.address if made is not None else "")
        mapped = memory.attempt(addresses[here[0]], nbytes) if member else None
        whole = all(exchange(mapped is not None or not member).values())
        if made is not None:
            made.close()
    return mapped if whole else None


def split_group(
    plain: Callable[..., Any], parent_pg: Any = None, split_ranks: Any = None,
    timeout: timedelta | None = None, pg_options: Any = None, group_desc: str | None = None,
    *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """`split_group`, which torch has for NCCL only. Collective over the parent group."""
    parent = parent_pg or c10d._get_default_group()
    if not isinstance(parent, AllranksGroup):
        return plain(parent_pg, split_ranks, timeout, pg_options, group_desc, *args, **options)
    if not split_ranks or not all(split_ranks):
        raise ValueError("split_ranks cannot be None or empty")
    every = [rank for part in split_ranks for rank in part]
    if len(every) != len(set(every)) or not set(every) <= set(range(parent.size())):
        raise ValueError(
            f"split_ranks needs lists without common ranks, from 0 to {parent.size() - 1}: "
            f"found {split_ranks}"
        )
    return _split(parent, [sorted(part) for part in split_ranks], timeout, group_desc)


def _split(parent: AllranksGroup, parts: list[list[int]], timeout: Any, text: Any) -> Any:
    world, core = worlds.current(), parent.core()
    mine = next((part for part in parts if parent.rank() in part), [parent.rank()])
    members = tuple(parent.ranks[place] for place in mine)
    spec = Spec("split_group", shape=tuple(map(tuple, parts)))
    number = _open(world, members, _within(core, "split_group", spec))
    if len(parent.ranks) == world.size:
        world.divided = True
    backend, store = c10d._world.pg_map[parent]
    name = c10d._process_group_name(list(members), use_hashed_name=True)
    if not any(parent.rank() in part for part in parts):
        world.close(number)
        return None
    _prepared[str(name)] = number, members
    default = c10d._get_default_group()
    ranks = [default.ranks.index(rank) for rank in members]
    pg, _ = c10d._new_process_group_helper(
        len(members), mine.index(parent.rank()), ranks, backend, store, name,
        timeout=timeout or c10d._get_default_timeout(backend), group_desc=text,
    )  # fmt: skip
    c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(ranks)}
    return pg
