"""The process group of `process_group` for tensors on GPUs too. This module imports torch.

Calls on tensors of a GPU are calls of the same groups, and move by their transports of GPUs. What
those do not have goes through host memory: messages, reductions of bits, sparse tensors, and dtypes
without arithmetic in cupy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from allranks.collectives.calls.call import Call
from allranks.features.torch_jax import cuda, tensors
from allranks.features.torch_jax.process_group import METHODS, AllranksGroup
from allranks.features.torch_jax.works import CopiedWork, CudaWork

_MESSAGES = ("send", "recv", "recv_anysource")


class CudaGroup(AllranksGroup):
    """A process group for tensors in host memory and on this rank's GPU."""

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _finish(self, call: Call, options: Any, outputs: Sequence[Any]) -> Any:
        if not call.spec.device:
            return super()._finish(call, options, outputs)
        device = self._world.gpu
        assert device is not None
        cuda.begin(call, device, outputs)
        self._limit(call, options)
        work = CudaWork(call, outputs, device)
        if self._coalescing is not None:
            self._coalescing.append(work)
        elif not getattr(options, "asyncOp", True):
            work.wait()
        return work

    def barrier(self, opts: Any = None) -> Any:
        # As torch's NCCL: what the ranks have given to their GPUs is done, too.
        if self._world.gpu is not None:
            self._world.settle()
            cuda.settle(self._world.gpu)
        return super().barrier(opts)


def _on_gpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose tensors may be on a GPU."""

    @wraps(function)
    def method(group: CudaGroup, *args: Any, **options: Any) -> Any:
        given = list(_tensors([*args, *options.values()]))
        on_gpu = [tensor for tensor in given if cuda.is_on_gpu(tensor)]
        if not on_gpu:
            return function(group, *args, **options)
        if len(on_gpu) < len(given):
            raise ValueError(
                f"{name} needs all tensors on the GPU, or none: found "
                f"{', '.join(sorted({tensor.device.type for tensor in given}))}. Move them to one."
            )
        if name in _MESSAGES or not all(map(_moves, given)) or not _reduces(args, given[0]):
            return _through_host(name, function, group, args, options)
        with cuda.behind_torch(cuda.number_of(given[0])):
            return function(group, *args, **options)

    return method


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _moves(tensor: Any) -> bool:
    return bool(tensor.layout == torch.strided)


def _reduces(args: Sequence[Any], like: Any) -> bool:
    """Whether cupy has a call's reduction, if it has one, for this dtype."""
    ops = [op for each in args if (op := getattr(each, "reduceOp", None)) is not None]
    known = all(tensors.kind_of(op) in tensors.OPS for op in ops)
    return not ops or (known and tensors.has_arithmetic(like.dtype))


def _through_host(
    name: str, function: Callable[..., Any], group: CudaGroup, args: Sequence[Any],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Makes a call on copies in host memory; the results are copied back when it is waited for."""
    copies: list[tuple[Any, Any]] = []

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copies.append((value, cuda.to_host(value)))
            return copies[-1][1]
        return [copied(each) for each in value] if isinstance(value, list | tuple) else value

    # The first argument has the outputs. Splits are lists of numbers, and are copied as such.
    first = copied(args[0])
    outputs = [] if name == "send" else list(copies)
    work = function(group, first, *map(copied, args[1:]), **options)
    work = CopiedWork(work, outputs)
    last = (*args, *options.values())[-1:]
    if not getattr(last[0] if last else None, "asyncOp", True):
        work.wait()
    return work


for _name in METHODS:
    setattr(CudaGroup, _name, _on_gpu(_name, getattr(AllranksGroup, _name)))
