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
        f"{_missing}. For Keras with another backend, type: import allranks.keras as hvd. "
        'To install TensorFlow: pip install "allranks[tensorflow]"'
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
from allranks.collectives.world.process_sets import (
    ids_and_ranks as _get_process_set_ids_and_ranks,  # noqa: F401
)
from allranks.horovod.common import (
    _cache,
    ccl_built,
    ddl_built,
    gloo_built,
    gpu_available,
    mpi_built,
    sycl_built,
)
from allranks.horovod.common import num_rank_is_power_2 as check_num_rank_power_of_2
from allranks.tensorflow import elastic
from allranks.tensorflow import graph_errors as _graph_errors
from allranks.tensorflow import patches as _patches
from allranks.tensorflow.basics import (
    BroadcastGlobalVariablesHook,
    _executing_eagerly,
    _make_subgraph,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    cuda_built,
    gloo_enabled,
    handle_average_backwards_compatibility,
    init,
    local_rank_op,
    local_size_op,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    refs_to_vars,
    rocm_built,
    shutdown,
    size_op,
    start_timeline,
    stop_timeline,
    vars_to_refs,
)
from allranks.tensorflow.compression import TensorCompression as Compression
from allranks.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
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
from allranks.tensorflow.optimizers import DistributedOptimizer, PartialDistributedOptimizer

# At import, so that a rank never calls a function before it is replaced.
_patches.install()
_graph_errors.install()
_graph_errors.skip_autograph()


def __getattr__(name: str) -> _Any:
    # Keras takes seconds to import, and scripts of TensorFlow 1 do not need it.
    if name == "SyncBatchNormalization":
        from allranks.tensorflow.keras.functions import SyncBatchNormalization

        return SyncBatchNormalization
    if name in ("_basics", "functions", "mpi_ops", "util"):
        # Horovod's submodules, and its object with the rank and size: all names are here.
        return _sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape",
    "DistributedOptimizer", "Max", "Min", "PartialDistributedGradientTape",
    "PartialDistributedOptimizer", "ProcessSet", "Product", "Sum", "SyncBatchNormalization",
    "_cache", "_executing_eagerly", "_make_subgraph", "add_process_set", "allgather",
    "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
    "broadcast_variables", "ccl_built", "check_num_rank_power_of_2", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
    "gpu_available", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "handle_average_backwards_compatibility", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "refs_to_vars", "remove_process_set", "rocm_built", "shutdown", "size",
    "size_op", "start_timeline", "stop_timeline", "sycl_built", "util", "vars_to_refs",
]  # fmt: skip
