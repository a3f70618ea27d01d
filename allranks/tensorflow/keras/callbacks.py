"""Horovod's callbacks for ``model.fit``, which are those of `allranks.keras`. In every rank."""

from allranks.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    LiveCurvesCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LiveCurvesCallback",
    "MetricAverageCallback",
]
