"""The same weights to begin with, as many steps, the same metrics. Runs in every rank."""

from __future__ import annotations

from typing import Any, NoReturn

from allranks import collectives
from allranks.collectives import Min
from allranks.errors import UsageError
from allranks.records.ranks import label
from allranks.tensorflow.failures import CollectiveMismatch
from allranks.tensorflow.variables import broadcast_variables
from allranks.tensorflow.which_keras import build, keras, state_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks begin with the root's weights and its optimizer's state.

    Both are there before the first step, and that is when they are broadcast; a model that is
    built by its first batch gets them after it. It also says at once where ranks would train for
    different numbers of steps: without that, some would wait in the last ones.

    Args:
        root_rank: a rank of the world, the same on every rank.
        device: accepted.
        local_variables: variables that each rank keeps as they are, or layers with such.

    Raises:
        UsageError: in ``fit``, ranks bring different numbers of steps or epochs.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts what is there on all ranks. Collective over all ranks."""
        check_steps(self.params)
        if not self.broadcast_done and everywhere(self.model.built):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts what the first batch has built. Collective over all ranks, once."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None:
            build(optimizer, self.model.trainable_variables)
        state = [] if optimizer is None else state_of(optimizer)
        kept = {id(variable) for one in self._local for variable in _variables(one)}
        chosen = [v for v in [*self.model.weights, *state] if id(v) not in kept]
        broadcast_variables(chosen, self.root_rank)
        self.broadcast_done = True


def everywhere(flag: bool) -> bool:
    """Whether a flag is set on all ranks. Collective over all ranks."""
    return bool(collectives.allreduce(int(flag), Min, name="everywhere"))


def check_steps(params: dict[str, Any]) -> None:
    """Says where ranks would train for different numbers of steps. Collective over all ranks.

    Args:
        params: what Keras tells its callbacks.

    Raises:
        UsageError: they would; on every rank.
    """
    planned = collectives.allgather_object((params.get("epochs"), params.get("steps")))
    if len(set(planned)) == 1:
        return
    who: dict[Any, list[int]] = {}
    for rank, plan in enumerate(planned):
        who.setdefault(plan, []).append(rank)
    found = ", ".join(
        f"{epochs} epochs of {'unknown' if steps is None else steps} steps on {label(ranks)}"
        for (epochs, steps), ranks in who.items()
    )
    raise UsageError(
        f"fit needs the same number of steps on every rank, found {found}. Give every rank the "
        "same number of batches: pass steps_per_epoch, or cut the data to a multiple of batch size "
        "and ranks."
    )


def _variables(one: Any) -> list[Any]:
    return list(one.weights) if isinstance(one, keras.layers.Layer) else [one]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of an epoch all metrics are the averages over the ranks.

    Callbacks that stand behind it in the list see the averages, and so does the history.

    Args:
        device: accepted.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing. Keras calls those that look at no batch from another thread."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the epoch's metrics in place. Collective over all ranks.

        Raises:
            CollectiveMismatch: ranks have metrics of other names.
        """
        if logs is None:
            return
        every = collectives.allgather_object({name: float(logs[name]) for name in sorted(logs)})
        if any(one.keys() != every[0].keys() for one in every):
            _raise_other_metrics([", ".join(one) or "none" for one in every])
        for name in every[0]:
            logs[name] = sum(one[name] for one in every) / len(every)


def _raise_other_metrics(named: list[str]) -> NoReturn:
    found = ", ".join(
        f"{label([rank for rank, one in enumerate(named) if one == names])}: {names}"
        for names in dict.fromkeys(named)
    )
    raise CollectiveMismatch(
        f"MetricAverageCallback needs the same metrics on every rank, found {found}. Compile the "
        "model with the same metrics on every rank, and validate on all of them or on none."
    )
