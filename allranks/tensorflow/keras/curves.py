"""Metrics of ``model.fit`` as live curves. Runs in every rank."""

from __future__ import annotations

from typing import Any

from allranks.engine.cells import metrics
from allranks.errors import UsageError
from allranks.tensorflow.which_keras import keras


class LiveCurvesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """What ``fit`` measures is drawn in the notebook while it runs: one curve a metric and rank.

    Args:
        every: after how many batches the running means of an epoch are logged; 0 for epochs only.
        prefix: put before every name, as ``"teacher/"``.
        member: which model of several on this rank.

    Raises:
        UsageError: ``every`` is negative.
    """

    def __init__(self, every: int = 1, prefix: str = "", member: object = "") -> None:
        super().__init__()
        if every < 0:
            raise UsageError(f"LiveCurvesCallback needs every=0 or more, found {every}.")
        self.every = every
        self._prefix = prefix
        self._member = member
        self._batches = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Steps count from 0."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the running means of the epoch."""
        self._batches += 1
        if self.every and self._batches % self.every == 0:
            self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs what is measured once an epoch: validation, the learning rate."""
        batchwise = not self.every
        self._log({n: v for n, v in (logs or {}).items() if batchwise or n not in self._seen})

    _seen: frozenset[str] = frozenset()

    def _log(self, logs: dict[str, Any] | None) -> None:
        if not logs:
            return
        if not self._seen:
            self._seen = frozenset(logs)
        named = {self._prefix + name: float(value) for name, value in logs.items()}
        metrics.log(named, step=self._batches, member=self._member)
