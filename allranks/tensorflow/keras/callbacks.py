"""Callbacks for ``model.fit`` on all ranks. Runs in every rank."""

from allranks.tensorflow.keras.checkpoints import BestModelCheckpoint
from allranks.tensorflow.keras.curves import LiveCurvesCallback
from allranks.tensorflow.keras.rates import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from allranks.tensorflow.keras.together import (
    BroadcastGlobalVariablesCallback,
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
