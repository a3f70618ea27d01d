"""Learning rates that change while ``fit`` runs. Runs in every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from allranks import collectives
from allranks.errors import UsageError
from allranks.tensorflow import which_keras
from allranks.tensorflow.which_keras import inner, keras


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The learning rate is ``initial_lr`` times a factor that depends on the epoch.

    Args:
        initial_lr: what the factor multiplies; None for the optimizer's own at the beginning.
        multiplier: a function of the epoch, or a number m for ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch that it changes anything in.
        end_epoch: the first that it changes nothing in; None for never.
        staircase: whether the factor changes once an epoch; else with every batch.
        momentum_correction: whether momentum is scaled with the rate where that changes, so that
            the step it stands for is too. Source: Goyal et al., "Accurate, Large Minibatch SGD",
            2017, equation 10.
        steps_per_epoch: for ``staircase=False`` where Keras does not know.

    Raises:
        UsageError: in ``fit``, the optimizer has a schedule of its own, or ``steps_per_epoch``
            is not known.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Looks at the optimizer and at the number of steps."""
        optimizer = inner(self.model.optimizer)
        rate = which_keras.rate_of(optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            raise UsageError(
                f"{type(self).__name__} changes the learning rate, and the optimizer has a "
                f"schedule of its own, found {type(rate).__name__}. "
                "Create the optimizer with a number."
            )
        if self.initial_lr is None:
            self.initial_lr = rate_of(optimizer)
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
            if self.steps_per_epoch is None:
                raise UsageError(
                    f"{type(self).__name__} needs to know how many batches an epoch has, and Keras "
                    "does not. Pass steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate where it changes."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tells the history the rate."""
        if logs is not None:
            logs["lr"] = rate_of(inner(self.model.optimizer))

    def _set(self, epoch: float) -> None:
        assert self.initial_lr is not None
        optimizer = inner(self.model.optimizer)
        before, now = rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        if now == before:
            return
        optimizer.learning_rate = now
        if self.momentum_correction and before > 0 and getattr(optimizer, "momentum", False):
            # The compiled step has the coefficient of momentum in it: change what it multiplies.
            for velocity in self._velocities(optimizer):
                velocity.assign(velocity * (now / before))

    def _velocities(self, optimizer: Any) -> list[Any]:
        found = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))
        if found is None and hasattr(optimizer, "get_slot"):
            variables = self.model.trainable_variables
            found = [optimizer.get_slot(variable, "momentum") for variable in variables]
        return list(found or ())


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    Args:
        initial_lr: the rate to reach, already multiplied by the number of ranks; None for the
            optimizer's own.
        warmup_epochs: over how many epochs.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 to print when it is done.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def growing(epoch: float) -> float:
            size = collectives.size()
            # Reaches 1 with the last batch of the warm-up.
            done = min(1.0, (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs)
            return 1.0 / size * (done * (size - 1) + 1)

        super().__init__(
            initial_lr,
            growing,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tells the history the rate, and the reader when the warm-up is done."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = rate_of(inner(self.model.optimizer))
            sys.stdout.write(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.\n")


def rate_of(optimizer: Any) -> float:
    """The learning rate as a number."""
    rate = which_keras.rate_of(optimizer)
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)
