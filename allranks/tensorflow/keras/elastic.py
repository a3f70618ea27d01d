"""Elastic training with ``model.fit``. Runs in every rank."""

from __future__ import annotations

from typing import Any

from allranks.keras.versions import keras
from allranks.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """A state of a Keras model with its optimizer, and other values: `TensorFlowKerasState`."""


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Without this method Keras calls the callback from another thread.
        ...


class CommitStateCallback(_StateCallback):
    """Commits the state after a number of batches, and at the end of every epoch.

    Args:
        state: the state to commit.
        batches_per_commit: the number of batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Collective over all ranks.
        self._left -= 1
        if self._left == 0:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Collective over all ranks.
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Sets ``state.batch`` to the number of the last batch, and to 0 at the end of an epoch.

    Put it before `CommitStateCallback`, so that the commit contains it. To continue in the middle
    of an epoch, pass ``steps_per_epoch=steps - state.batch``.

    Args:
        state: has the attribute ``batch``.
    """

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Sets ``state.epoch`` to the number of finished epochs, over all attempts.

    Args:
        state: has the attribute ``epoch``.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self._before + epoch + 1
