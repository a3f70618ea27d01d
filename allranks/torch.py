"""Continues a training of PyTorch after a rank has died: ``from allranks.torch import recover``.

Runs in every rank. It uses the collectives of allranks, so it needs no process group of torch.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle

from allranks import collectives
from allranks.collectives import global_process_set
from allranks.collectives import world as worlds
from allranks.errors import MissingDependency, UsageError
from allranks.keras.variables import check_alike
from allranks.records.ranks import label

try:
    import torch

    from allranks.collectives.arrays import torch_memory
except ImportError as missing:
    raise MissingDependency(
        f"allranks.torch needs PyTorch, and it cannot be imported on this rank: {missing}. "
        "To install it: pip install torch"
    ) from None

__all__ = ["Recovery", "recover"]

_DDP = torch.nn.parallel.DistributedDataParallel

_recovered_epoch = math.inf
"""The epoch in which this process first got the state of a training from `recover`."""


@dataclass(frozen=True)
class Recovery:
    """The result of `recover`.

    Attributes:
        source: the rank whose state all ranks have.
        replaced: the ranks that had no state, because they were replaced.
    """

    source: int
    replaced: tuple[int, ...]


def recover(model: Any, *others: Any, source: int | None = None) -> Recovery:
    """Gives all ranks the state of a rank that has survived, after another one was replaced.

    Parameters and buffers are copied, and the state of optimizers, also to those that have none
    yet. Gradients are dropped: they are of the step that the death has ended. All ranks receive
    everything before one of them changes. A line beside the output names the source and the new
    ranks.

    Args:
        model: a module with the same parameters on every rank. Wrap it in
            `DistributedDataParallel` afterwards: that copies the parameters of the first rank,
            which may be the new one.
        *others: optimizers, schedulers and other objects with ``state_dict`` and
            ``load_state_dict``; the same on every rank.
        source: the rank whose state is copied, the same on every rank; by default the lowest that
            has survived.

    Raises:
        UsageError: a parameter is sharded, so that no rank has all of it; or no rank has survived.
        CollectiveMismatch: the parameters differ between ranks; the message names them.

    Collective over all ranks.
    """
    global _recovered_epoch
    this = worlds.current()
    model = model.module if isinstance(model, _DDP) else model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"recover needs a module first: found {type(model).__name__}. "
            "Type: recover(model, optimizer)"
        )
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    problem = _problem(model, tensors, others)
    # All ranks learn of a problem of one, so that all raise the same error and none waits.
    told = collectives.allgather_object((problem, this.joined_epoch, _recovered_epoch))
    for rank, (missing, _, _) in enumerate(told):
        if missing:
            needed, found, advice = missing
            raise UsageError(f"recover needs {needed}: found {found} on rank {rank}. {advice}")
    check_alike(_described(tensors, others), global_process_set, "recover")
    replaced = _replaced([joined for _, joined, _ in told], [epoch for *_, epoch in told])
    root = _lowest_survivor(this.size, replaced) if source is None else source
    mine = (tensors, [other.state_dict() for other in others]) if this.rank == root else None
    values, states = _broadcast(mine, root)
    # From here on all ranks have everything.
    collectives.barrier()
    if this.rank != root:
        # Copied, not replaced: optimizers and the user's code hold these tensors.
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    _retire_wrappers(model)
    _recovered_epoch = min(_recovered_epoch, this.epoch)
    if this.rank == root:
        what = ", ".join(type(each).__name__ for each in (model, *others))
        new = f"new: {label(replaced)}" if replaced else "no rank is new"
        this.notice(f"recover: all ranks have the state of rank {root} ({what}); {new}")
    return Recovery(root, replaced)


def _problem(model: Any, tensors: dict[str, Any], others: tuple[Any, ...]) -> tuple[str, ...]:
    # What is needed, what was found, what to type; empty if this rank can take part.
    sharded = [name for name, tensor in tensors.items() if _is_a(tensor, "DTensor")]
    sharded += [name or "a model" for name, part in model.named_modules() if _is_a(part, _FSDP)]
    sharded += [type(other).__name__ for other in others if _is_a(other, _ZERO)]
    if sharded:
        advice = (
            "A dead rank's shards are lost: keep() the full state while you train, build the model "
            "again and load it, as the lines under 'A sharded model' in docs/torch_jax.md do."
        )
        return "the whole state on every rank", f"{sharded[0]}, which is sharded,", advice
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
            advice = "Initialize the model on every rank first."
            return "dense parameters with values", f"{name}, which is none,", advice
    for other in others:
        if not hasattr(other, "load_state_dict"):
            advice = "For other values type: broadcast_object(value, source)"
            found = type(other).__name__
            return "a module, and then objects with load_state_dict", found, advice
    return ()


_FSDP, _ZERO = "FullyShardedDataParallel", "ZeroRedundancyOptimizer"


def _is_a(value: object, name: str) -> bool:
    # By the name, because these classes are in modules that a cell need not have imported.
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _described(tensors: dict[str, Any], others: tuple[Any, ...]) -> list[Any]:
    found = [
        (name, tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in tensors.items()
    ]
    for other in others:
        groups = getattr(other, "param_groups", ())
        numbers = tuple(len(group["params"]) for group in groups)
        found.append(("state", numbers, type(other).__name__))
    return found


def _replaced(joined: list[int], recovered: list[float]) -> tuple[int, ...]:
    """The ranks without a state: they were replaced, and had not recovered before the last death.

    Several models may be recovered one after the other after a death, with the same result.
    """
    return tuple(
        rank for rank, epoch in enumerate(joined) if epoch and recovered[rank] >= max(joined)
    )


def _lowest_survivor(size: int, replaced: tuple[int, ...]) -> int:
    if len(replaced) == size:
        raise UsageError(
            "recover needs a rank that has survived: all ranks were replaced, one after the other. "
            "If a rank has the state, for instance from keep(), type for rank 0: "
            "recover(model, optimizer, source=0)"
        )
    return next(rank for rank in range(size) if rank not in replaced)


def _retire_wrappers(model: Any) -> None:
    """Ends each `DistributedDataParallel` of the model whose process group is closed.

    A backward pass that the death has ended in the middle would continue in that of a new wrapper.
    """
    groups = torch.distributed.distributed_c10d._world.pg_map
    for found in gc.get_objects():
        # By its type, because `isinstance` asks proxies for their class.
        if not issubclass(type(found), _DDP) or not hasattr(found, "reducer"):
            continue  # without a reducer, a failure has ended its construction
        if found.module is model and found.process_group not in groups:
            found._remove_autograd_hooks()
            found.register_forward_pre_hook(_refuse)


def _refuse(wrapper: Any, args: Any) -> None:
    raise UsageError(
        "a DistributedDataParallel needs an open process group: this one's was closed, and "
        "its model was recovered. Wrap the model again: DistributedDataParallel(model)"
    )


class _WithoutTensors(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a value without the elements of its tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        # On the host, because the new rank may have another GPU, or none.
        self.tensors.append(value.detach().cpu().contiguous())
        return value.dtype, tuple(value.shape)


class _WithEmptyTensors(pickle.Unpickler):
    """Reads such a value; the elements of the tensors are written later."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []

    def persistent_load(self, found: Any) -> Any:
        dtype, shape = found
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def _broadcast(value: Any, root: int) -> Any:
    """The root's value on all ranks; its tensors are sent one by one, and not pickled."""
    own = worlds.current().rank == root
    file = io.BytesIO()
    pickler = _WithoutTensors(file)
    if own:
        pickler.dump(value)
    reader = _WithEmptyTensors(io.BytesIO(collectives.broadcast_object(file.getvalue(), root)))
    copied = value if own else reader.load()
    for tensor in pickler.tensors if own else reader.tensors:
        # As bytes, because numpy has no bfloat16.
        data = torch_memory.array_of(torch_memory.as_bytes(tensor))
        found = collectives.broadcast(data, root, name="recover")
        if not own:
            data[...] = found
    return copied
