"""Operations of all ranks on arrays and objects, in a notebook or under mpiexec.

Runs in every rank. The import loads numpy and nothing heavier; `init` starts MPI.
"""

from typing import TYPE_CHECKING, Any

from allranks.collectives.arrays.reductions import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from allranks.collectives.ops.inputs import Handle, poll, synchronize
from allranks.collectives.ops.keeping import keep
from allranks.collectives.ops.operations import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    gather,
    gather_async,
    grouped_allgather,
    grouped_allgather_async,
    recv,
    scatter,
    scatter_async,
    send,
)
from allranks.collectives.ops.reducing import (
    allreduce,
    allreduce_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reduce,
    reduce_async,
    reducescatter,
    reducescatter_async,
)
from allranks.collectives.ops.sameness import same_on_all_ranks
from allranks.collectives.start import runtime
from allranks.collectives.start.runtime import (
    activity,
    cross_rank,
    cross_size,
    dirty,
    empty,
    epoch,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    on_notice,
    on_record,
    rank,
    records,
    renew,
    shutdown,
    size,
)
from allranks.collectives.timings import timeline
from allranks.collectives.world.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from allranks.collectives.world.world import scope

if TYPE_CHECKING:
    from allranks.collectives.ops.communicator import Comm

    comm: Comm


def __getattr__(name: str) -> Any:
    """``comm`` is a communicator, as it is in a cell: there is one from `init` on."""
    if name == "comm":
        return runtime.communicator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum", "Average", "Compression", "Handle", "Max", "Min", "ProcessSet", "Product",
    "ReduceOp", "Sum", "activity", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_async", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_async", "broadcast_object", "cross_rank", "cross_size", "dirty",
    "empty", "epoch", "gather", "gather_async", "global_process_set", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "keep", "local_rank", "local_size", "on_notice", "on_record",
    "poll", "rank", "records", "recv", "reduce", "reduce_async", "reducescatter",
    "reducescatter_async", "remove_process_set", "renew", "same_on_all_ranks", "scatter",
    "scatter_async", "scope", "send", "shutdown", "size", "synchronize", "timeline",
]  # fmt: skip
