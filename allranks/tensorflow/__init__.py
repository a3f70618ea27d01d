"""Horovod's API on TensorFlow 2 and Keras 3. Runs in every rank.

``import allranks.tensorflow as hvd`` in a cell of a notebook, or in a script under ``mpiexec``.
"""

import sys as _sys
from typing import Any as _Any

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _missing:
    from allranks.errors import MissingDependency

    raise MissingDependency(
        "allranks.tensorflow needs TensorFlow, and it cannot be imported on this rank: "
        f'{_missing}. Install it: pip install "allranks[tensorflow]"'
    ) from None

from allranks.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
)
from allranks.tensorflow import downloads as _downloads
from allranks.tensorflow import elastic
from allranks.tensorflow import failures as _failures
from allranks.tensorflow import internals as util
from allranks.tensorflow import pinning as _pinning
from allranks.tensorflow.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    local_rank_op,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    rocm_built,
    shutdown,
    size_op,
    start_timeline,
    stop_timeline,
)
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.internals import (
    _cache,
    _executing_eagerly,
    _make_subgraph,
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
    refs_to_vars,
    vars_to_refs,
)
from allranks.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
from allranks.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from allranks.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from allranks.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from allranks.tensorflow.v1 import BroadcastGlobalVariablesHook
from allranks.tensorflow.variables import (
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
)

_downloads.install()
_failures.install()
_failures.leave_to_python()
_pinning.install()


def __getattr__(name: str) -> _Any:
    """Imports what needs Keras when it is first used: scripts of TensorFlow 1 do without."""
    if name == "SyncBatchNormalization":
        from allranks.tensorflow.sync_batch_normalization import SyncBatchNormalization

        return SyncBatchNormalization
    if name in ("_basics", "functions", "mpi_ops"):
        # Horovod's object that knows rank and size, and its modules: this one has what they have.
        return _sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "_cache",
    "_executing_eagerly",
    "_make_subgraph",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "util",
    "vars_to_refs",
]
