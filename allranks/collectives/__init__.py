"""MPI's and Horovod's operations on every rank of a notebook or of mpiexec. Runs in every rank.

Importing this imports numpy and nothing heavier; MPI starts with `init`.
"""

from allranks.collectives.cells import scope
from allranks.collectives.compression import Compression
from allranks.collectives.handles import Handle, poll, synchronize
from allranks.collectives.operations import (
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
    scatter,
    scatter_async,
)
from allranks.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from allranks.collectives.reducing import (
    allreduce,
    allreduce_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reduce,
    reduce_async,
    reducescatter,
    reducescatter_async,
)
from allranks.collectives.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from allranks.collectives.runtime import (
    activity,
    comm,
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

__all__ = [name for name in dir() if not name.startswith("_")]
