"""FAKE tensors of CUDA: every tensor counts as one on the fake GPU, and is in host memory.

What torch computes is computed at once; what allranks moves is queued on the fake's streams, and is
late, as all of its work. So where a GPU's stream would wait, the host has to: then programs of
torch run unchanged. With `torch_stream` nothing waits, and a test sees which stream waits for what.
Device threads of autograd, and torch's allocator, are not faked.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from cupy.cuda import _queue
from torch.multiprocessing.reductions import StorageWeakRef

from allranks.features.torch_jax import cuda

_in_host_memory: dict[int, StorageWeakRef] = {}
"""The storages of copies in host memory."""
current = [_queue.null]
"""torch's current stream."""


def _is_on_gpu(tensor):
    if tensor.layout != torch.strided:
        return True
    known = _in_host_memory.get(tensor.untyped_storage()._cdata)
    return known is None or known.expired()


def _finish(stream):
    with stream:
        _queue.finish()


def _copy(to, source):
    _queue.push(lambda: to.copy_(source) is None)


def _to_host(tensor):
    _finish(current[-1])
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    storage = found.untyped_storage()
    _in_host_memory[storage._cdata] = StorageWeakRef(storage)
    return found


def _from_host(tensor, source):
    _finish(current[-1])
    with torch.no_grad():
        tensor.copy_(source)


@contextmanager
def torch_stream(stream):
    """Within, it is torch's current stream, for which the host does not wait."""
    current.append(stream)
    try:
        yield
    finally:
        current.pop()


def install():
    """Every tensor of this process counts as one of CUDA from now on."""
    waits = cuda.let_torch_wait

    def let_torch_wait(call, device):
        waits(call, device)
        if current[-1] is _queue.null:
            _finish(_queue.null)

    cuda.is_on_gpu = _is_on_gpu
    cuda.number_of = lambda tensor: 0
    cuda.current_pointer = lambda number: current[-1].ptr
    cuda.copy, cuda.to_host, cuda.from_host = _copy, _to_host, _from_host
    cuda.end_of_copy = lambda tensor: SimpleNamespace(wait=lambda: None)
    cuda.future_devices = lambda outputs: []
    cuda.let_torch_wait = let_torch_wait
    # As in torch's builds for CUDA.
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 3)
