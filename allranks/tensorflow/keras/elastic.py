"""Elastic training with ``model.fit``. Runs in every rank."""

from __future__ import annotations

from typing import Any

from allranks.tensorflow.elastic import TensorFlowKerasState, run
from allranks.tensorflow.which_keras import keras

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """A Keras model with its optimizer, and values besides: `TensorFlowKerasState`."""


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state after every so many batches, and at the end of every epoch.

    Args:
        state: to commit.
        batches_per_commit: after how many batches.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Batches count from 0."""
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits where it is time to. Collective over all ranks."""
        self._left -= 1
        if self._left == 0:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits. Collective over all ranks."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """``state.batch`` is the number of the batch that was last, 0 at the end of an epoch.

    Put it before `CommitStateCallback`, so that what is committed is up to date. To go on in the
    middle of an epoch, pass ``steps_per_epoch=steps - state.batch``.

    Args:
        state: whose ``batch`` to set.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch is done."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """``state.epoch`` is the number of epochs that are done, over all tries.

    Args:
        state: whose ``epoch`` to set.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes what was done in earlier tries."""
        self._before = self.state.epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing. Keras calls those that look at no batch from another thread."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts."""
        self.state.epoch = self._before + epoch + 1
