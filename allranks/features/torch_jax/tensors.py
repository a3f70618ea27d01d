"""torch's tensors as numpy's arrays of the same memory. This module imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from allranks.collectives.arrays import torch_memory
from allranks.collectives.arrays.reductions import Array, ReduceOp
from allranks.features.torch_jax import cuda
from allranks.features.torch_jax.choice import takes_gpu

_graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_RedOp = torch.distributed.ReduceOp.RedOpType
#: torch's reductions that allranks has.
OPS = {
    _RedOp.SUM: ReduceOp.Sum,
    _RedOp.AVG: ReduceOp.Average,
    _RedOp.PRODUCT: ReduceOp.Product,
    _RedOp.MIN: ReduceOp.Min,
    _RedOp.MAX: ReduceOp.Max,
}
_BITS: dict[Any, Callable[[Any, Any], Any]] = {
    _RedOp.BAND: torch.bitwise_and,
    _RedOp.BOR: torch.bitwise_or,
    _RedOp.BXOR: torch.bitwise_xor,
}
_SUMS: dict[Any, Callable[[Any, Any], Any]] = {
    _RedOp.SUM: torch.add,
    _RedOp.AVG: torch.add,
    _RedOp.PRODUCT: torch.mul,
    _RedOp.MIN: torch.minimum,
    _RedOp.MAX: torch.maximum,
}
try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _bfloat16 = None
_OF_NUMPY = {
    torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


def in_backward() -> bool:
    """Whether this thread is in a backward pass of autograd."""
    return bool(_graph_task_id() >= 0)


def ends_backward() -> bool:
    """Whether the backward pass of this thread runs its last callbacks: all gradients exist."""
    return in_backward() and _node() is None


def kind_of(op: Any) -> Any:
    """The kind of a reduction of torch: an object, or an enumeration's value."""
    return getattr(op, "op", op)


def name_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_device(tensor: Any) -> None:
    kind = tensor.device.type
    if kind != "cpu" and not (kind == "cuda" and takes_gpu()):
        # torch's own words.
        raise RuntimeError(
            f"No backend type associated with device type {kind}. allranks moves tensors in host "
            "memory. Type: %distributed start --torch allranks, to try its groups on GPUs, or "
            "%distributed start --torch gloo, for torch's own groups"
        )


def plain(tensor: Any, *, written: bool = False) -> Any:
    """The tensor itself, without gradient, if its memory can be used as it is; else a copy.

    ``written`` is whether the result is put back to the tensor.
    """
    check_device(tensor)
    if written:
        _check_overlap(tensor)
    found = tensor.detach()
    if found.is_conj() or found.is_neg():
        found = found.resolve_conj().resolve_neg()
    return found.contiguous()


def bytes_of(tensor: Any) -> Array:
    """The bytes of a plain tensor, in its memory: an array of numpy, or of cupy on a GPU."""
    if cuda.is_on_gpu(tensor):
        return cuda.array_of(torch_memory.as_bytes(tensor), np.dtype(np.uint8))
    return host_bytes(tensor)


def host_bytes(tensor: Any) -> Array:
    if tensor.dtype in _OF_NUMPY:
        return torch_memory.array_of(tensor).reshape(-1).view(np.uint8)
    return torch_memory.array_of(torch_memory.as_bytes(tensor))


def array_of(tensor: Any) -> Array | None:
    """A plain tensor as an array with numpy's arithmetic; None if numpy has no such dtype."""
    if cuda.is_on_gpu(tensor):
        return cuda.array_of(tensor, _numpy_dtype(tensor.dtype))
    if tensor.dtype in _OF_NUMPY:
        return torch_memory.array_of(tensor)
    if tensor.dtype == torch.bfloat16 and _bfloat16 is not None:
        halves: Array = torch_memory.array_of(tensor.view(torch.int16)).view(_bfloat16)
        return halves
    return None


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    found: np.dtype[Any] = np.dtype(_bfloat16 if name == "bfloat16" else name)
    return found


def has_arithmetic(dtype: Any) -> bool:
    """Whether `array_of` has an array for a dtype."""
    return dtype in _OF_NUMPY or (dtype == torch.bfloat16 and _bfloat16 is not None)


def combined(op: Any, like: Any) -> Callable[[list[Array]], Array]:
    """A function that reduces the bytes of all members by torch's arithmetic."""
    kind = kind_of(op)
    function = _BITS.get(kind) or _SUMS.get(kind)
    if function is None:
        raise ValueError(f"Cannot use {kind} with allranks. Use SUM, and multiply before.")
    half = like.dtype in (torch.bfloat16, torch.float16)

    def combine(parts: list[Array]) -> Array:
        size = parts[0].size // like.element_size()
        tensors = [from_bytes(part, like.dtype, (size,)) for part in parts]
        total = tensors[0].float() if half else tensors[0].clone()
        for tensor in tensors[1:]:
            total = function(total, tensor)
        if kind == _RedOp.AVG:
            total = total / len(parts)
        return host_bytes(total.to(like.dtype))

    # Before the ranks agree: torch may not have this reduction for the dtype.
    one = host_bytes(torch.ones(1).to(like.dtype))
    try:
        combine([one, one])
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise type(error)(f"Cannot use {kind.name} with {like.dtype}: {error}") from error
    return combine


def from_bytes(data: Array, dtype: Any, shape: Sequence[int]) -> Any:
    if not data.size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(tuple(shape))


def _check_overlap(tensor: Any) -> None:
    # Before the ranks agree: torch refuses to write to such a tensor, and the call could not end.
    if tensor.layout != torch.strided:
        return
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RuntimeError(
            "a result needs a tensor with memory for each element: found an expanded one, of "
            f"shape {tuple(tensor.shape)}. Pass x.clone()."
        )


def scratch(tensor: Any) -> Any:
    """A plain tensor for a result: the tensor itself, or memory that is copied to it later."""
    check_device(tensor)
    _check_overlap(tensor)
    found = tensor.detach()
    if found.is_contiguous() and not found.is_conj() and not found.is_neg():
        return found
    return torch.empty_like(found, memory_format=torch.contiguous_format)


def put_back(tensor: Any, found: Any) -> None:
    if found.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        if cuda.is_on_gpu(tensor):
            cuda.copy(tensor.detach(), found)
        else:
            tensor.detach().copy_(found)


def put_all_back(given: Sequence[Any], found: Sequence[Any]) -> None:
    for tensor, result in zip(given, found, strict=False):
        put_back(tensor, result)


def check_size(title: str, tensor: Any, like: Any) -> None:
    if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
        raise ValueError(
            f"{title} needs tensors of one size and dtype: found {tuple(tensor.shape)} of "
            f"{tensor.dtype} and {tuple(like.shape)} of {like.dtype}."
        )


def check_alike(title: str, tensor: Any, like: Any) -> None:
    check_size(title, tensor, like)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{title} needs inputs and outputs of one shape: found {tuple(tensor.shape)} and "
            f"{tuple(like.shape)}. Pass tensors made by torch.empty_like(x) as outputs."
        )


def check_outputs(title: str, outputs: Sequence[Any], like: Any) -> None:
    """Raises for outputs that are not like the input, and for those that share memory."""
    for output in outputs:
        check_alike(title, output, like)
    if like.numel() and _overlap(outputs):
        raise ValueError(
            f"{title} needs memory of its own for each output: found outputs that overlap, as in "
            "[x] * n, where a later one would overwrite the others. Pass "
            "[torch.empty_like(x) for _ in range(n)]."
        )


def _overlap(outputs: Sequence[Any]) -> bool:
    if len({output.data_ptr() for output in outputs}) < len(outputs):
        return True
    # Others may lie between each other, as columns do.
    whole = [output for output in outputs if output.is_contiguous()]
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in whole)
    return any(end > begin for (_, end), (begin, _) in pairwise(spans))


def check_dtypes(title: str, *given: Any) -> None:
    found = {name_of(tensor) for tensor in given}
    if len(found) > 1:
        raise RuntimeError(
            f"{title} needs the output tensor to have the same type as the input tensor: found "
            f"{', '.join(sorted(found))}."
        )


def split(tensor: Any, splits: Sequence[int], size: int) -> Sequence[Any]:
    found: Sequence[Any] = tensor.split(list(splits) if splits else tensor.shape[0] // size or 1)
    # A tensor without rows has one empty piece for each member.
    return found if len(found) == size else [tensor] * size


def sparse_part(data: Array, indices: Any, values: Any) -> tuple[Any, Any]:
    count = int(data[:8].view(np.int64)[0])
    middle = 8 + count * indices.shape[0] * 8
    return (
        from_bytes(data[8:middle].copy(), indices.dtype, (indices.shape[0], count)),
        from_bytes(data[middle:].copy(), values.dtype, (count, *values.shape[1:])),
    )
