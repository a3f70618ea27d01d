"""Horovod's elastic training, as far as ranks that stay can have it. Runs in every rank.

The number of ranks does not change while a cell or a script runs. What is here commits and restores
state: a collective that has failed on every rank is tried again from the last commit.
"""

from allranks.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from allranks.tensorflow.elastic.run import run, run_fn
from allranks.tensorflow.elastic.state import (
    ObjectState,
    State,
    TensorFlowKerasState,
    TensorFlowState,
)

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]
