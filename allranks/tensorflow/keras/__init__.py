"""Horovod's API for Keras: ``import allranks.tensorflow.keras as hvd``. Runs in every rank."""

from allranks.keras import versions as _versions
from allranks.tensorflow import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    PartialDistributedOptimizer,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    sycl_built,
)

if not _versions.LEGACY and _versions.keras.backend.backend() != "tensorflow":
    from allranks.errors import UsageError

    raise UsageError(
        "Horovod's API for Keras needs the backend tensorflow, found "
        f"{_versions.keras.backend.backend()}. allranks.keras works with every backend; type: "
        "import allranks.keras as hvd"
    )

from allranks.tensorflow.keras import callbacks, elastic
from allranks.tensorflow.keras.functions import (
    SyncBatchNormalization,
    allgather,
    allreduce,
    broadcast,
    load_model,
    reducescatter,
)
from allranks.tensorflow.keras_optimizer import DistributedOptimizer

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min",
    "PartialDistributedOptimizer", "ProcessSet", "Product", "Sum", "SyncBatchNormalization",
    "add_process_set", "allgather", "allgather_object", "allreduce", "broadcast",
    "broadcast_global_variables", "broadcast_object", "broadcast_variables", "callbacks",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous",
    "is_initialized", "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "reducescatter", "remove_process_set",
    "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline", "sycl_built",
]  # fmt: skip
