"""Buckets of `DistributedDataParallel` in memory that the ranks share. This module imports torch.

torch's reducer allocates its buckets once, and has them reduced at each step. Here their storages
are moved to shared memory, where all ranks read and write them in place: so they are not copied.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from allranks.collectives import world as worlds
from allranks.collectives.host.memory import Borrowed
from allranks.features.torch_jax.tensors import in_backward

_SMALLEST_BYTES = 1 << 20
"""Smaller buckets pass through memory that stays in the caches."""
_ROOM = 2
"""The free part of /dev/shm must have this many times the bytes of a bucket."""
_FOLDER = "/dev/shm"
_seen: dict[int, StorageWeakRef] = {}
"""The storages of buckets that have been reduced, shared or not, by their address."""
_with_views: WeakSet[Any] = WeakSet()
"""The models whose gradients are views of buckets."""


def share(process_group: Any, tensor: Any) -> None:
    """Moves a tensor to shared memory if it is a new bucket of torch's reducer.

    The memory that it had is freed, so no array of numpy may refer to it. Only the reducer uses
    it, unless gradients are views of buckets.
    """
    if not in_backward() or tensor.layout != torch.strided or tensor.nbytes < _SMALLEST_BYTES:
        return
    if not _is_called_by_autograd():
        return
    # By its storage, because the reducer makes a new tensor for each call.
    storage = tensor.untyped_storage()
    key = storage._cdata
    known = _seen.get(key)
    if known is not None and not known.expired():
        return
    for old in [old for old, seen in _seen.items() if seen.expired()]:
        del _seen[old]
    seen = _seen[key] = StorageWeakRef(storage)
    world = worlds.current()
    if (
        storage.nbytes() != tensor.nbytes
        or storage.is_shared()
        or _is_seen_by_user(key)
        or process_group.core().channel is None
        or world.window is None
    ):
        return
    world.drop_ended_memory()
    # A full /dev/shm ends a process with SIGBUS at its first write, so there must be room to spare.
    try:
        found = os.statvfs(_FOLDER)
        if found.f_bavail * found.f_frsize < _ROOM * tensor.nbytes:
            return
        fd, nbytes = storage._share_fd_cpu_()
    except (OSError, RuntimeError):
        return
    world.window.borrow(Borrowed(storage.data_ptr(), nbytes, fd, lambda: not seen.expired()))


def _is_called_by_autograd() -> bool:
    """Whether C++ has called the process group, from torch's engine."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith("allranks.") and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("torch.autograd.")


def _is_seen_by_user(bucket: int) -> bool:
    """Whether gradients are views of a bucket, as torch's reducer makes them before it reduces."""
    gradients = [each.grad for model in _with_views for each in model.parameters()]
    return any(
        gradient.untyped_storage()._cdata == bucket
        for gradient in gradients
        if gradient is not None and gradient.layout == torch.strided
    )


def _noting_views(init: Any) -> Any:
    @wraps(init)
    def noting(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.gradient_as_bucket_view:
            _with_views.add(self)

    return noting


DistributedDataParallel.__init__ = _noting_views(DistributedDataParallel.__init__)
