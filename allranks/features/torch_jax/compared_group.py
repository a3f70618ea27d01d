"""torch's own process groups, of gloo or NCCL, whose members compare their calls. It imports torch.

torch makes such a group as always: only its class is another one, whose methods publish each call
before they call torch's. They are reached from Python, and from C++ (DDP's reducer, functional
collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from allranks.collectives import world as worlds
from allranks.collectives.calls.specs import Spec, describe_group, pack
from allranks.features.torch_jax import tensors
from allranks.features.torch_jax.call_log import CallLog, PostedCall, PostedTransfer, rank_calls
from allranks.features.torch_jax.works import FORGETS_HANDLES, kept

_NO_TIMEOUT = timedelta(0)
_Plain: Any = dist.ProcessGroup


class ComparedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch's own whose calls are compared."""

    log: CallLog | None = None
    """None for a group whose members share no memory: its calls are not compared."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._plain = _Plain(store, rank, size)
        """Makes the calls. Both have the same backends, for which C++ code asks this group too."""

    def _register_backend(self, *args: Any) -> None:
        super()._register_backend(*args)
        self._plain._register_backend(*args)

    def _set_default_backend(self, *args: Any) -> None:
        super()._set_default_backend(*args)
        self._plain._set_default_backend(*args)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._plain._set_group_name(name)

    def _set_group_desc(self, text: str) -> None:
        super()._set_group_desc(text)
        self._plain._set_group_desc(text)

    def get_group_store(self) -> Any:
        return self._plain.get_group_store()

    def split_group(self, *args: Any, **options: Any) -> Any:
        self._plain.bound_device_id = self.bound_device_id
        return self._plain.split_group(*args, **options)

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        if self.log is None:
            self._plain.monitored_barrier(*args, **options)
            return
        call = _begun(self.log, Spec("monitored_barrier"))
        wait_for(call, lambda: self._plain.monitored_barrier(*args, **options))


@contextmanager
def in_place_of_torchs() -> Iterator[None]:
    """Within, torch's Python code makes groups of this class, and treats them as its own."""
    c10d.ProcessGroup = ComparedGroup
    try:
        yield
    finally:
        c10d.ProcessGroup = _Plain


def as_torchs(group: Any) -> Any:
    """As `in_place_of_torchs`, for code that uses this group; None stands for the default one."""
    compared = isinstance(group or c10d._get_default_group(), ComparedGroup)
    return in_place_of_torchs() if compared else nullcontext()


class ComparedWork(dist.Work):  # type: ignore[misc]
    """The handle of an asynchronous call on tensors in host memory."""

    def __init__(self, call: PostedCall | PostedTransfer, work: Any) -> None:
        super().__init__()
        self._call, self._work = call, work

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return bool(wait_for(self._call, lambda: self._work.wait(timeout)))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        # A loop of polls waits as ``wait`` does, but the main thread never stands still.
        if not done:
            rank_calls.note_poll()
        return done

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        self.wait()
        return self._work.result()

    def get_future(self) -> Any:
        if tensors.ends_backward():
            self.wait()
        elif tensors.in_backward():
            # It runs at the end of the pass, before DDP's reducer waits for its futures in C++.
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        return self._work.get_future()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


def wait_for(call: PostedCall | PostedTransfer, wait: Callable[[], Any]) -> Any:
    """Waits in torch; raises the reason if the wait was ended, or if the calls differ."""
    before, rank_calls.awaited = rank_calls.awaited, call
    call.awaited, raised, result = True, None, None
    try:
        result = wait()
    except RuntimeError as error:
        raised = error
    finally:
        rank_calls.awaited, call.awaited = before, False
        world = worlds.current()
        if world.watch.call is call:
            with world.lock:
                world.watch.rest()
    # Before torch's own error, which a mismatch may have caused, and before a wrong result is used.
    rank_calls.check(call)
    if raised is not None:
        rank_calls.failed = call
        raise rank_calls.instead_of(raised)
    return result


def _begun(log: CallLog, spec: Spec) -> PostedCall:
    call = PostedCall(log, pack(spec))
    call.on_gpu = bool(spec.device)
    rank_calls.post(log, call)
    return call


def _compared(name: str, describe: Callable[..., Spec]) -> Any:
    """A method that publishes torch's call of this name."""

    def method(self: ComparedGroup, *args: Any, **options: Any) -> Any:
        plain, log = getattr(self._plain, name), self.log
        if log is None:
            return plain(*args, **options)
        # Before torch makes the call: a rank that waits in it can then read what this one does.
        call = _begun(log, describe(log.members.ranks, *args, **options))
        try:
            work = plain(*args, **options)
        except BaseException:
            log.refuse(call)
            raise
        if call.on_gpu or work is None:
            # The wait for a GPU's call ends at once; the rank waits later, in CUDA.
            rank_calls.keep(call, None)
            return work
        last = (*args, *options.values())[-1:]
        if not getattr(last[0] if last else None, "asyncOp", True):
            wait_for(call, work.wait)
            return work
        rank_calls.keep(call, work)
        return ComparedWork(call, work)

    return method


def _transfer(name: str, title: str) -> Any:
    def method(self: ComparedGroup, *args: Any, **options: Any) -> Any:
        work = getattr(self._plain, name)(*args, **options)
        log = self.log
        if log is None or work is None:
            return work
        tensor, ranks = _one(args[0]), log.members.ranks
        if tensor.device.type != "cpu":
            return work
        peers = tuple(rank for rank in ranks if rank != log.members.rank)
        if name != "recv_anysource":
            peers = (ranks[args[1]],)
        shape, dtype = tuple(tensor.shape), tensors.name_of(tensor)
        spec, nbytes = Spec(title, "", dtype, shape), tensor.numel() * tensor.element_size()
        return ComparedWork(PostedTransfer(log, spec, peers, nbytes), work)

    return method


def _one(given: Any) -> Any:
    return given[0] if isinstance(given, Sequence) else given


def _spec(
    title: str, tensor: Any, op: str = "", root: int = -1, shape: tuple[Any, ...] | None = None
) -> Spec:
    dtype = tensors.name_of(tensor)
    shape = tuple(tensor.shape) if shape is None else shape
    if tensor.layout != torch.strided:
        dtype, shape = f"sparse {dtype}", (*shape, tensor.sparse_dim())
    device = "" if tensor.device.type == "cpu" else tensor.device.type
    return Spec(title, op, dtype, shape, root, device=device)


def _op(options: Any) -> str:
    if options is None:
        return "SUM"
    return str(tensors.kind_of(getattr(options, "reduceOp", options)).name)


def _root(ranks: tuple[int, ...], options: Any) -> int:
    root: int = getattr(options, "rootRank", options)
    return ranks[root]


def _several(title: str, given: Sequence[Any], op: str = "") -> Spec:
    names = [tensors.name_of(tensor) for tensor in given]
    dtype, shapes = describe_group(names, [tuple(tensor.shape) for tensor in given])
    device = "" if given[0].device.type == "cpu" else given[0].device.type
    return Spec(title, op, dtype, shapes, device=device)


def _allreduce(_: Any, given: Any, options: Any = None) -> Spec:
    if isinstance(given, Sequence) and len(given) > 1:
        return _several("all_reduce_coalesced", given, _op(options))
    return _spec("all_reduce", _one(given), _op(options))


def _of_pieces(title: str, pieces: Sequence[Any], op: str = "") -> Spec:
    """Pieces for each rank: all ranks have the same list, in which shapes may differ."""
    shapes = [tuple(piece.shape) for piece in pieces]
    alike = len(set(shapes)) == 1
    return _spec(title, pieces[0], op, shape=(len(shapes), *shapes[0]) if alike else tuple(shapes))


def _allgather(_: Any, outputs: Any, given: Any, *__: Any) -> Spec:
    pieces = _one(outputs) if isinstance(_one(outputs), Sequence) else outputs
    if isinstance(pieces, Sequence) and len({tuple(piece.shape) for piece in pieces}) > 1:
        return _of_pieces("all_gather", pieces)  # NCCL gathers tensors of different sizes
    return _spec("all_gather", _one(given))


def _reduce_scatter(_: Any, outputs: Any, given: Any, options: Any = None) -> Spec:
    pieces = given[0] if isinstance(_one(given), Sequence) else given
    return _of_pieces("reduce_scatter", pieces, _op(options))


def _all_to_all_single(
    _: Any, output: Any, given: Any, output_split_sizes: Any = (), input_split_sizes: Any = (),
    *__: Any, **___: Any,
) -> Spec:  # fmt: skip
    uneven = bool(output_split_sizes) or bool(input_split_sizes)
    shape = (None, *given.shape[1:]) if uneven else None
    return _spec("all_to_all_single", given, shape=shape)


def _gathered_base(_: Any, output: Any, given: Any, *__: Any, **___: Any) -> Spec:
    return _spec("all_gather_into_tensor", given)


def _scattered_base(_: Any, output: Any, given: Any, options: Any = None) -> Spec:
    return _spec("reduce_scatter_tensor", given, _op(options))


_CALLS: dict[str, Callable[..., Spec]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": lambda _, given, options=None: _several(
        "all_reduce_coalesced", given, _op(options)
    ),
    "broadcast": lambda ranks, given, options: _spec(
        "broadcast", _one(given), root=_root(ranks, options)
    ),
    "reduce": lambda ranks, given, options, *_: _spec(
        "reduce", _one(given), _op(_[0] if _ else options), _root(ranks, options)
    ),
    "allgather": _allgather,
    "allgather_coalesced": lambda _, outputs, given, *__: _several("all_gather_coalesced", given),
    "_allgather_base": _gathered_base,
    "all_gather_single": _gathered_base,
    "allgather_into_tensor_coalesced": lambda _, outputs, given, *__: _several(
        "all_gather_into_tensor_coalesced", given
    ),
    "gather": lambda ranks, outputs, given, options: _spec(
        "gather", _one(given), root=_root(ranks, options)
    ),
    "scatter": lambda ranks, outputs, given, options: _spec(
        "scatter", _one(outputs), root=_root(ranks, options)
    ),
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _scattered_base,
    "reduce_scatter_single": _scattered_base,
    "reduce_scatter_tensor_coalesced": lambda _, outputs, given, options=None: _several(
        "reduce_scatter_tensor_coalesced", given, _op(options)
    ),
    # What a rank sends to another one may have any shape.
    "alltoall": lambda _, outputs, given, *__: _spec("all_to_all", given[0], shape=()),
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda _, *__, **___: Spec("barrier"),
}
_CALLS["all_gather_single_coalesced"] = _CALLS["allgather_into_tensor_coalesced"]
_CALLS["reduce_scatter_single_coalesced"] = _CALLS["reduce_scatter_tensor_coalesced"]
_methods = {name: _compared(name, describe) for name, describe in _CALLS.items()}
for _name, _title in (("send", "send"), ("recv", "recv"), ("recv_anysource", "recv")):
    _methods[_name] = _transfer(_name, _title)
for _name, _method in _methods.items():
    if hasattr(_Plain, _name):  # some are of newer versions
        setattr(ComparedGroup, _name, kept(_method) if FORGETS_HANDLES else _method)
