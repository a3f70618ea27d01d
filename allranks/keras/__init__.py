"""Keras on all ranks, with any backend: ``import allranks.keras as hvd``. Runs in every rank.

The backend is Keras' own choice: TensorFlow, jax or torch. `allranks.tensorflow.keras` has
Horovod's API, which needs TensorFlow.
"""

from typing import Any

from allranks.collectives import (
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    global_process_set,
    init,
    local_rank,
    local_size,
    rank,
    size,
)

__all__ = [
    "Average", "BestModelCheckpoint", "BroadcastGlobalVariables", "DistributedOptimizer",
    "LearningRateSchedule", "LearningRateWarmup", "LiveCurves", "MetricAverage", "ModelCheckpoint",
    "ProcessSet", "Sum", "add_process_set", "broadcast_variables", "global_process_set", "init",
    "local_rank", "local_size", "rank", "size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Importing Keras takes seconds, and `allranks.tensorflow` without Keras uses this package too.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "DistributedOptimizer":
        from allranks.keras.optimizer import DistributedOptimizer

        return DistributedOptimizer
    if name == "broadcast_variables":
        from allranks.keras.variables import broadcast_variables

        return broadcast_variables
    from allranks.keras import callbacks

    return getattr(callbacks, name, None) or getattr(callbacks, f"{name}Callback")


def __dir__() -> list[str]:
    return __all__
