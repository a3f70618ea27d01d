"""Callbacks for ``model.fit`` on all ranks. Runs in every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from allranks import collectives
from allranks.collectives import Min
from allranks.engine import telemetry
from allranks.errors import CollectiveMismatch, UsageError
from allranks.keras.private_names import require
from allranks.keras.variables import broadcast_variables
from allranks.keras.versions import LEGACY, build, inner, keras, rate_of, state_of, stored_rate
from allranks.records.ranks import label

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LiveCurvesCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the root's weights and optimizer state before the first step.

    If the first batch builds the model, the broadcast follows that batch. Before the first step the
    callback also raises if the numbers of steps differ between ranks, because otherwise some ranks
    would wait in their last steps.

    Args:
        root_rank: a rank of the world, the same on every rank.
        device: ignored.
        local_variables: variables that are not broadcast, or layers with such variables.

    Raises:
        UsageError: in ``fit``, the numbers of steps or epochs differ between ranks.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Collective over all ranks.
        # Horovod broadcasts after the first batch, in which the ranks' weights still differ.
        _check_steps(self.params)
        # On all ranks, because a single rank may have loaded a model that is already built.
        if not self.broadcast_done and collectives.allreduce(
            int(self.model.built), Min, name="everywhere"
        ):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # For a model that the first batch has built. Collective over all ranks, once.
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        _fetch(self.model)
        optimizer = self.model.optimizer
        if optimizer is not None:
            build(optimizer, self.model.trainable_variables)
        state = [] if optimizer is None else state_of(optimizer)
        layers = [one for one in self._local if isinstance(one, keras.layers.Layer)]
        kept = {id(v) for v in [*self._local, *(v for layer in layers for v in layer.weights)]}
        chosen = [v for v in [*self.model.weights, *state] if id(v) not in kept]
        if _on_tensorflow():
            from allranks.tensorflow import basics

            basics.broadcast_variables(chosen, self.root_rank)
        else:
            broadcast_variables(chosen, self.root_rank)
        self.broadcast_done = True


def _on_tensorflow() -> bool:
    return LEGACY or keras.backend.backend() == "tensorflow"


def _fetch(model: Any) -> None:
    # While `fit` runs with jax, the variables of a model are empty until this is called.
    getattr(model, "jax_state_sync", lambda: None)()


def _check_steps(params: dict[str, Any]) -> None:
    # Collective.
    planned = collectives.allgather_object((params.get("epochs"), params.get("steps")))
    if len(set(planned)) == 1:
        return
    by_plan: dict[Any, list[int]] = {}
    for rank, plan in enumerate(planned):
        by_plan.setdefault(plan, []).append(rank)
    found = ", ".join(
        f"{epochs} epochs of {'unknown' if steps is None else steps} steps on {label(ranks)}"
        for (epochs, steps), ranks in by_plan.items()
    )
    raise UsageError(
        f"fit needs the same number of steps on every rank, found {found}. Give every rank the "
        "same number of batches: pass steps_per_epoch, or cut the data to a multiple of batch size "
        "and ranks."
    )


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces all metrics by their averages over the ranks at the end of an epoch.

    The history and the callbacks after this one in the list get the averages.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Without this method Keras calls the callback from another thread.
        ...

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Collective over all ranks.
        if logs is None:
            return
        # Not by allreduce, which would round to float32 and not notice different names.
        every = collectives.allgather_object({name: float(logs[name]) for name in sorted(logs)})
        if any(one.keys() != every[0].keys() for one in every):
            named = [", ".join(one) or "none" for one in every]
            found = ", ".join(
                f"{label([rank for rank, one in enumerate(named) if one == names])}: {names}"
                for names in dict.fromkeys(named)
            )
            raise _mismatch()(
                f"MetricAverageCallback needs the same metrics on every rank, found {found}. "
                "Compile the model with the same metrics on every rank, and validate on all of "
                "them or on none."
            )
        for name in every[0]:
            logs[name] = sum(one[name] for one in every) / len(every)


def _mismatch() -> Any:
    # With TensorFlow it is also an instance of the error that Horovod raises.
    if not _on_tensorflow():
        return CollectiveMismatch
    from allranks.tensorflow import graph_errors

    return graph_errors.CollectiveMismatch


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr`` times a factor that depends on the epoch.

    Args:
        initial_lr: by default the optimizer's rate at the beginning.
        multiplier: a function of the epoch, or a number m for ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch in which the rate changes.
        end_epoch: the first epoch in which it no longer changes; None for no end.
        staircase: whether the factor changes once per epoch; else with every batch.
        momentum_correction: whether a change of the rate also scales the momentum. Source: Goyal
            et al., "Accurate, Large Minibatch SGD", 2017, equation 10.
        steps_per_epoch: for ``staircase=False`` if Keras does not know the number.

    Raises:
        UsageError: in ``fit``, the optimizer has its own schedule, or ``steps_per_epoch`` is
            unknown.
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
        optimizer = inner(self.model.optimizer)
        rate = stored_rate(optimizer)
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
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = rate_of(inner(self.model.optimizer))

    def _set(self, epoch: float) -> None:
        assert self.initial_lr is not None
        _fetch(self.model)
        optimizer = inner(self.model.optimizer)
        before, now = rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        if now == before:
            return
        optimizer.learning_rate = now
        if self.momentum_correction and before > 0 and getattr(optimizer, "momentum", False):
            # The momentum coefficient is a constant in the compiled step, so the velocities that
            # it multiplies are scaled instead.
            for velocity in self._velocities(optimizer):
                velocity.assign(velocity * (now / before))

    def _velocities(self, optimizer: Any) -> list[Any]:
        found = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))
        if found is None and hasattr(optimizer, "get_slot"):
            variables = self.model.trainable_variables
            found = [optimizer.get_slot(variable, "momentum") for variable in variables]
        return list(found or ())


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate from ``initial_lr / size`` to ``initial_lr``.

    Args:
        initial_lr: the rate to reach, already multiplied by the number of ranks; by default the
            optimizer's own.
        warmup_epochs: the number of epochs.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 to print a line at the end of the warm-up.

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
            # Reaches 1 in the last batch of the warm-up.
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
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = rate_of(inner(self.model.optimizer))
            sys.stdout.write(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.\n")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras' ``ModelCheckpoint``, with the same arguments; only the first rank writes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        require(keras.callbacks.ModelCheckpoint, "_save_model")
        super().__init__(*args, **options)

    def _save_model(self, *args: Any, **options: Any) -> None:
        if collectives.rank() == 0:
            super()._save_model(*args, **options)


class BestModelCheckpoint(ModelCheckpoint):
    """Saves the model when a metric is the best so far; only the first rank writes.

    Put it after `MetricAverageCallback`, so that the metric is the average of all ranks.

    Args:
        filepath: the path of the saved model. In Horovod, a Spark job sets it.
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


class LiveCurvesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Draws the metrics of ``fit`` in the notebook: one curve for each metric and rank.

    Args:
        every: the number of batches between two logs of an epoch's running means; 0 to log only
            at the end of an epoch.
        prefix: put before every name, for instance ``"teacher/"``.
        member: the number of the model, if this rank trains several.

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
        self._seen: frozenset[str] = frozenset()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if self.every and self._batches % self.every == 0:
            self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Values that Keras measures once per epoch: validation, the learning rate.
        batchwise = not self.every
        self._log({n: v for n, v in (logs or {}).items() if batchwise or n not in self._seen})

    def _log(self, logs: dict[str, Any] | None) -> None:
        if not logs:
            return
        if not self._seen:
            self._seen = frozenset(logs)
        named = {self._prefix + name: float(value) for name, value in logs.items()}
        telemetry.log(named, step=self._batches, member=self._member)
