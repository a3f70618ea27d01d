"""The best model so far, written by one rank. Runs in every rank."""

from __future__ import annotations

from typing import Any

from allranks import collectives
from allranks.errors import UsageError
from allranks.tensorflow.which_keras import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model when a metric is the best so far; only the first rank writes.

    Put it behind `MetricAverageCallback`, so that the metric is that of all ranks.

    Args:
        filepath: where to; in Horovod a Spark job fills it in.
        monitor, verbose, save_weights_only, mode, save_freq: as in Keras' ``ModelCheckpoint``.

    Raises:
        UsageError: there is no ``filepath``.
    """

    def __init__(
        self,
        filepath: str | None = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        if filepath is None:
            raise UsageError(
                "BestModelCheckpoint needs a filepath, found none. "
                "Type for example: BestModelCheckpoint('best.keras')"
            )
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, *args: Any, **options: Any) -> None:
        if collectives.rank() == 0:
            super()._save_model(*args, **options)
