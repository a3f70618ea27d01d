"""torch's process group on the collectives of allranks. This module imports torch.

Each call of torch is one call of allranks, under torch's name: its arguments are compared before
data moves, its time is in the panel, and an interrupt ends its wait. The methods have the names by
which torch's Python and C++ code calls them; some are aliases for older versions of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.collectives.arrays import torch_memory
from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.sites import find
from allranks.collectives.calls.specs import Spec
from allranks.collectives.world.world import World
from allranks.features.torch_jax import backward, buckets, calls, cuda, tensors
from allranks.features.torch_jax.group_base import NO_LIMIT_SECONDS, BaseGroup
from allranks.features.torch_jax.messages import Mailbox
from allranks.features.torch_jax.works import (
    FORGETS_HANDLES,
    FinishedWork,
    SeveralWorks,
    TransferWork,
    kept,
    recorded,
)

_mailboxes: dict[int, Mailbox] = {}


def _mailbox(world: World) -> Mailbox:
    found = _mailboxes.get(id(world))
    if found is None or found.world is not world:
        found = _mailboxes[id(world)] = Mailbox(world)
    return found


class AllranksGroup(BaseGroup):
    """A process group whose calls are calls of a group of allranks."""

    def allreduce(self, given: Sequence[Any], options: Any = None) -> Any:
        if len(given) != 1:
            return self.allreduce_coalesced(given, options)
        (tensor,) = given
        on_gpu = cuda.is_on_gpu(tensor)
        if not on_gpu:
            buckets.share(self, tensor)
            if self._reduced_at_once(tensor, options):
                return _DONE
        if tensor.layout != torch.strided:
            return self._sparse_allreduce(tensor, options)
        reduce_op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        op = tensors.OPS.get(tensors.kind_of(reduce_op))
        found = tensors.plain(tensor, written=True)
        array = tensors.array_of(found) if op is not None else None
        group = self.core()
        if op is None or array is None:
            return self._gathered_reduction("all_reduce", reduce_op, tensor, found, options)
        name = tensors.name_of(tensor)
        if on_gpu:
            call = calls.all_reduce_on_gpu(group, "all_reduce", op, array, name)
        else:
            plan = calls.reduction(group, "all_reduce", op, array, name)
            call = calls.all_reduce(group, plan, array)
        call.steps = _then(call.steps, lambda: tensors.put_back(tensor, found))
        return self._finish(call, options, given)

    def _reduced_at_once(self, tensor: Any, options: Any) -> bool:
        """The shortest path of a synchronous allreduce, which has been made before. It is reduced
        in place, and needs no steps if no rank is late.
        """
        if getattr(options, "asyncOp", True) or self._coalescing is not None:
            return False
        try:
            array = torch_memory.array_of(tensor)
        except (BufferError, RuntimeError, TypeError):  # on a GPU, sparse, bfloat16 …
            return False
        op, group = tensors.OPS.get(options.reduceOp.op), self.core()
        plan = group.plans.get(("all_reduce", op, array.dtype, array.shape))
        if plan is None or not array.flags.c_contiguous or self._seconds < NO_LIMIT_SECONDS:
            return False
        self._world.run(plan.call(group), plan.move, array, plan.arithmetic)
        return True

    def _gathered_reduction(
        self, title: str, op: Any, tensor: Any, found: Any, options: Any, root: int = -1
    ) -> Any:
        group = self.core()
        whom = group.ranks[root] if root >= 0 else -1
        name = tensors.kind_of(op).name
        spec = Spec(title, name, tensors.name_of(tensor), tuple(tensor.shape), whom)
        data, out = tensors.bytes_of(found), None
        if root in (-1, group.me):
            out = data
        call = calls.reduce_by_gathering(group, spec, data, tensors.combined(op, found), out)
        call.steps = _then(call.steps, lambda: tensors.put_back(tensor, found))
        return self._finish(call, options, [tensor])

    def allreduce_coalesced(self, given: Sequence[Any], options: Any = None) -> Any:
        reduce_op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        op = tensors.OPS.get(tensors.kind_of(reduce_op))
        found = [tensors.plain(tensor, written=True) for tensor in given]
        arrays = [tensors.array_of(tensor) for tensor in found]
        alike = len({tensor.dtype for tensor in given}) == 1
        if op is None or not alike or any(array is None for array in arrays):
            works = [self.allreduce([tensor], options) for tensor in given]
            return SeveralWorks(works, given)
        whole: list[Array] = [array for array in arrays if array is not None]
        names = [tensors.name_of(tensor) for tensor in given]
        call = calls.all_reduce_many(self.core(), op, whole, names)
        call.steps = _then(call.steps, lambda: tensors.put_all_back(given, found))
        return self._finish(call, options, given)

    def _sparse_allreduce(self, tensor: Any, options: Any) -> Any:
        """The sum of sparse tensors in coordinate format: all elements are gathered."""
        reduce_op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        if (
            tensors.kind_of(reduce_op) != tensors.kind_of(dist.ReduceOp.SUM)
            or tensor.layout != torch.sparse_coo
        ):
            raise RuntimeError("unsupported reduction operation: a sparse allreduce needs SUM")
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        data = np.concatenate(
            [
                np.array([values.shape[0]], np.int64).view(np.uint8),
                tensors.host_bytes(indices),
                tensors.host_bytes(values),
            ]
        )
        spec = Spec(
            "all_reduce", "SUM", f"sparse {tensors.name_of(tensor)}",
            (*tensor.shape, mine.sparse_dim()),
        )  # fmt: skip

        def take(parts: list[Array]) -> None:
            found = [tensors.sparse_part(part, indices, values) for part in parts]
            both = [
                torch.cat(each, axis)
                for each, axis in zip(zip(*found, strict=True), (1, 0), strict=True)
            ]
            total = torch.sparse_coo_tensor(*both, tensor.shape, check_invariants=False)
            with torch.no_grad():  # a detached sparse tensor would keep its elements
                tensor.copy_(total.coalesce())

        return self._finish(calls.gather_uneven(self.core(), spec, data, take), options, [tensor])

    def broadcast(self, given: Sequence[Any], options: Any) -> Any:
        tensor = given[options.rootTensor] if len(given) > 1 else given[0]
        if tensor.layout != torch.strided:
            raise RuntimeError("broadcast needs a dense tensor. Pass x.to_dense().")
        group = self.core()
        receives = group.me != options.rootRank
        found = tensors.plain(tensor, written=receives)
        call = calls.broadcast(
            group, tensors.bytes_of(found), tensors.name_of(tensor), tuple(tensor.shape),
            options.rootRank,
        )  # fmt: skip
        if receives:
            call.steps = _then(call.steps, lambda: tensors.put_back(tensor, found))
        return self._finish(call, options, given)

    def reduce(self, given: Sequence[Any], options: Any) -> Any:
        (tensor,) = given
        group, root = self.core(), options.rootRank
        op = tensors.OPS.get(tensors.kind_of(options.reduceOp))
        found = tensors.plain(tensor, written=group.me == root)
        array = tensors.array_of(found) if op is not None else None
        if op is None or array is None:
            return self._gathered_reduction(
                "reduce", options.reduceOp, tensor, found, options, root
            )
        call = calls.reduce(group, op, array, tensors.name_of(tensor), root)
        if group.me == root:
            call.steps = _then(call.steps, lambda: tensors.put_back(tensor, found))
        return self._finish(call, options, given)

    def _gather(
        self, title: str, outputs: Sequence[Any], tensor: Any, options: Any, root: int = -1
    ) -> Any:
        group = self.core()
        found = tensors.plain(tensor)
        reads = root in (-1, group.me)
        if reads and len(outputs) != group.size:
            raise ValueError(
                f"{title} needs an output for each of the {group.size} members of the group: "
                f"found {len(outputs)}."
            )
        if reads:
            tensors.check_outputs(title, outputs, found)
        outs = [tensors.scratch(output) for output in outputs] if reads else []
        whom = group.ranks[root] if root >= 0 else -1
        spec = Spec(title, "", tensors.name_of(tensor), tuple(tensor.shape), whom)
        call = calls.all_gather(
            group, spec, tensors.bytes_of(found), [tensors.bytes_of(out) for out in outs], root
        )
        call.steps = _then(call.steps, lambda: tensors.put_all_back(outputs, outs))
        return self._finish(call, options, outputs)

    def allgather(
        self, outputs: Sequence[Sequence[Any]], given: Sequence[Any], options: Any = None
    ) -> Any:
        return self._gather("all_gather", outputs[0], given[0], options)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], given: Sequence[Any], options: Any = None
    ) -> Any:
        # One list of outputs for each member.
        pairs = zip(zip(*outputs, strict=True), given, strict=True)
        works = [self._gather("all_gather", outs, tensor, options) for outs, tensor in pairs]
        return SeveralWorks(works, [tensor for outs in outputs for tensor in outs])

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        size = len(self.ranks)
        if output.numel() != tensor.numel() * size:
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size: found "
                f"{output.numel()} and {size} times {tensor.numel()} elements."
            )
        tensors.check_dtypes("all_gather_into_tensor", tensor, output)
        whole = tensors.scratch(output)
        parts = whole.reshape(-1).chunk(size) if tensor.numel() else [whole] * size
        found, group = tensors.plain(tensor), self.core()
        spec = Spec("all_gather_into_tensor", "", tensors.name_of(tensor), tuple(tensor.shape))
        call = calls.all_gather(
            group, spec, tensors.bytes_of(found), [tensors.bytes_of(part) for part in parts]
        )
        call.steps = _then(call.steps, lambda: tensors.put_back(output, whole))
        return self._finish(call, options, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], given: Sequence[Any], options: Any = None
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        works = [self.all_gather_single(output, tensor, options) for output, tensor in pairs]
        return SeveralWorks(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Any]], given: Sequence[Any], options: Any) -> Any:
        outs = outputs[0] if outputs else []
        return self._gather("gather", outs, given[0], options, options.rootRank)

    def scatter(self, outputs: Sequence[Any], given: Sequence[Sequence[Any]], options: Any) -> Any:
        group, root = self.core(), options.rootRank
        (output,) = outputs
        whole = tensors.scratch(output)
        data = tensors.bytes_of(whole)[:0]
        if group.me == root:
            pieces = [tensors.plain(piece) for piece in given[0]]
            if len(pieces) != group.size:
                raise ValueError(
                    f"scatter needs a tensor for each of the {group.size} members of the group: "
                    f"found {len(pieces)}."
                )
            for piece in pieces:
                tensors.check_alike("scatter", piece, whole)
            data = np.concatenate([tensors.bytes_of(piece) for piece in pieces])
        spec = Spec("scatter", "", tensors.name_of(output), tuple(output.shape), group.ranks[root])
        call = calls.scatter(group, spec, data, tensors.bytes_of(whole), root)
        call.steps = _then(call.steps, lambda: tensors.put_back(output, whole))
        return self._finish(call, options, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Any], given: Sequence[Sequence[Any]], options: Any
    ) -> Any:
        for piece in given[0]:
            tensors.check_size("reduce_scatter", piece, outputs[0])
        whole = torch.stack([tensors.plain(piece) for piece in given[0]])
        return self._reduce_scatter("reduce_scatter", outputs[0], whole, options)

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any) -> Any:
        return self._reduce_scatter("reduce_scatter_tensor", output, tensor, options)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, title: str, output: Any, tensor: Any, options: Any) -> Any:
        size, group = len(self.ranks), self.core()
        tensors.check_dtypes(title, tensor, output)
        if tensor.numel() != output.numel() * size:
            raise ValueError(
                "input tensor must be the same size as output size times world size: found "
                f"{tensor.numel()} and {size} times {output.numel()} elements."
            )
        source, whole = tensors.plain(tensor), tensors.scratch(output)
        op = tensors.OPS.get(tensors.kind_of(options.reduceOp))
        arrays = [tensors.array_of(each.reshape(-1)) for each in (source, whole)]
        if op is None or arrays[0] is None or arrays[1] is None:
            total = source.clone()
            work = self._gathered_reduction(title, options.reduceOp, total, total, None)
            work.wait()
            output.detach().copy_(total.reshape(size, *output.shape)[group.me])
            return FinishedWork([output])
        call = calls.reduce_scatter(
            group, title, op, arrays[0], arrays[1], tensors.name_of(tensor), tuple(tensor.shape)
        )
        call.steps = _then(call.steps, lambda: tensors.put_back(output, whole))
        return self._finish(call, options, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], given: Sequence[Any], options: Any
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        works = [self.reduce_scatter_single(output, tensor, options) for output, tensor in pairs]
        return SeveralWorks(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[Any], given: Sequence[Any], options: Any = None) -> Any:
        return self._all_to_all("all_to_all", outputs, given, options, ())

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int],
        options: Any = None,
    ) -> Any:  # fmt: skip
        size = len(self.ranks)
        even = not (output_splits or input_splits)
        if even and output.numel() != tensor.numel():
            raise ValueError(
                "all_to_all_single needs an output of the input's size: found "
                f"{output.numel()} and {tensor.numel()} elements."
            )
        for whole, splits in ((tensor, input_splits), (output, output_splits)):
            if not splits and whole.shape[0] % size:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            if splits and (len(splits) != size or sum(splits) != whole.shape[0]):
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
        found = tensors.scratch(output)
        outputs = tensors.split(found, output_splits, size)
        work = self._all_to_all(
            "all_to_all_single", outputs, tensors.split(tensor, input_splits, size), options,
            tuple(tensor.shape) if even else (None, *tensor.shape[1:]),
            lambda: tensors.put_back(output, found),
        )  # fmt: skip
        return work

    alltoall_base = all_to_all_single

    def _all_to_all(
        self, title: str, outputs: Sequence[Any], given: Sequence[Any], options: Any,
        shape: tuple[Any, ...], then: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        group = self.core()
        if not len(outputs) == len(given) == group.size:
            raise ValueError(
                f"{title} needs an input and an output for each of the {group.size} members: found "
                f"{len(given)} and {len(outputs)}."
            )
        tensors.check_dtypes(title, *given, *outputs)
        sources = [tensors.plain(each) for each in given]
        outs = [tensors.scratch(each) for each in outputs]
        pieces = [tensors.bytes_of(source) for source in sources]
        spec = Spec(title, "", tensors.name_of(given[0]), shape)
        call = calls.all_to_all(
            group, spec, np.concatenate(pieces), [piece.nbytes for piece in pieces],
            [tensors.bytes_of(out) for out in outs],
            even=bool(shape) and shape[0] is not None,
        )  # fmt: skip

        def finish() -> None:
            tensors.put_all_back(outputs, outs)
            if then is not None:
                then()

        call.steps = _then(call.steps, finish)
        return self._finish(call, options, outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._finish(calls.barrier(self.core()), opts, ())

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier with a time limit, whose first member names the ranks that did not arrive."""
        group = self.core()
        call = calls.barrier(group)
        seconds = self._seconds if timeout is None else timeout.total_seconds()

        def expire() -> RuntimeError:
            late = [self.ranks.index(rank) for rank in call.missing()]
            if not seconds:
                return RuntimeError(f"Rank {group.me} timed out in monitoredBarrier after 0 ms.")
            if group.me != 0 and 0 not in late:
                return RuntimeError(
                    f"Rank {group.me} successfully reached monitoredBarrier, but received errors "
                    "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
                    "rank."
                )
            if group.me != 0:
                return RuntimeError(
                    f"Rank {group.me} timed out in monitoredBarrier after {seconds * 1000:.0f} ms: "
                    "rank 0 did not arrive."
                )
            several = wait_all_ranks and len(late) > 1
            whom = ", ".join(map(str, late if wait_all_ranks else late[:1]))
            return RuntimeError(
                f"[Rank 0]: Rank{'s' * several} {whom} failed to pass monitoredBarrier in "
                f"{seconds * 1000:.0f} ms"
            )

        call.steps = calls.limited(call.steps, seconds, expire)
        self._world.run(call)

    def send(self, given: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = given
        found = tensors.plain(tensor)
        transfer = _mailbox(self._world).send(
            self._channel(), self.ranks[peer], tag, tensors.bytes_of(found),
            tensors.name_of(tensor), tuple(tensor.shape), find(_caller()),
        )  # fmt: skip
        return TransferWork(transfer, self, given)

    def recv(self, given: Sequence[Any], peer: int, tag: int) -> Any:
        return self._receive(given, (self.ranks[peer],), tag)

    def recv_anysource(self, given: Sequence[Any], tag: int) -> Any:
        others = tuple(rank for rank in self.ranks if rank != self._world.rank)
        return self._receive(given, others, tag)

    def _receive(self, given: Sequence[Any], peers: tuple[int, ...], tag: int) -> Any:
        (tensor,) = given
        whole = tensors.scratch(tensor)
        out = tensors.bytes_of(whole)

        def take(data: Array) -> None:
            out[...] = data
            tensors.put_back(tensor, whole)

        transfer = _mailbox(self._world).receive(
            self._channel(), peers, tag, take, out.nbytes, tensors.name_of(tensor),
            tuple(tensor.shape), find(_caller()),
        )  # fmt: skip
        return TransferWork(transfer, self, given)

    def _channel(self) -> str:
        # Both sides have the same ranks and name.
        self.core()
        return f"{self._name} {self.ranks}"

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return SeveralWorks(works)


#: Calls that torch's profiler shows: torch's name of each, and the argument with its inputs.
_RECORDED = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
}
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
"""Of these, the calls that replace the values of a tensor that may come from a computation."""
for _method, (_title, _place) in _RECORDED.items():
    _function = getattr(AllranksGroup, _method)
    if _method in _IN_PLACE:
        _function = backward.warning(_function, _title)
    _function = recorded(_function, _title, _place)
    setattr(AllranksGroup, _method, kept(_function) if FORGETS_HANDLES else _function)
METHODS = tuple(_RECORDED)
"""The calls that have tensors."""
_DONE = FinishedWork()


def _caller() -> FrameType:
    return sys._getframe(2)


def _then(steps: Any, action: Callable[[], None]) -> Any:
    result = yield from steps
    action()
    return result
