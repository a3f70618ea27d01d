"""What elastic training commits and restores. Runs in every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.ops.keeping import keep_in
from allranks.errors import UsageError
from allranks.horovod.common.exceptions import HostsUpdatedInterrupt
from allranks.tensorflow.objects import broadcast_object
from allranks.tensorflow.variables import broadcast_variables

Broadcast = Callable[[Any], Any]


class State:
    """What training goes back to after a failure.

    Attributes:
        commits: how often it was committed.

    Args:
        bcast_object: returns the first rank's object on every rank.
        get_rank: returns this rank's number.
    """

    def __init__(
        self,
        bcast_object: Broadcast = broadcast_object,
        get_rank: Callable[[], int] = collectives.rank,
    ) -> None:
        self.commits = 0
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._updates: list[int] = []
        self.of_training = ""
        """The name of the training whose state this is, while it runs."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Has functions called before every further try."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """A further try begins: calls what was registered for that."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Hosts have changed. Nobody calls this here, as ranks stay; a program of yours may.

        Args:
            timestamp: when.
            update_res: 1 where hosts were only removed, so that the state is whole everywhere.
        """
        self._updates.append(update_res)

    def commit(self) -> None:
        """This is the state to go back to from now on. Collective over all ranks."""
        self.save()
        self._keep()
        self.commits += 1
        self.check_host_updates()

    def _keep(self) -> None:
        """Keeps what was saved for ranks that take the place of others. Collective."""
        kept = world.current().keeps
        if kept is not None and self.of_training and self.saved() is not None:
            found = {"training": self.of_training, "saved": self.saved()}
            keep_in(kept.of_training, lambda: found, copy=False)

    def saved(self) -> Any:
        """What `save` has kept, as it can be pickled; None where only this process can have it."""
        return None

    def take_up(self, saved: Any) -> bool:
        """The state is what another process had saved; False, and as it was, where none fits."""
        return False

    def check_host_updates(self) -> None:
        """Raises on every rank where the first rank has heard of new hosts.

        Raises:
            HostsUpdatedInterrupt: it has.

        Collective over all ranks.
        """
        updates = self._bcast_object(self._updates)
        if updates:
            self._updates.clear()
            raise HostsUpdatedInterrupt(all(update == 1 for update in updates))

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """The state is what it was at the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Every rank has the first rank's state. Collective over all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """A further try begins: for a class of yours to do something then."""


class ObjectState(State):
    """Values that can be copied: ``state.epoch``, ``state.batch`` and others by any names.

    Args:
        bcast_object, get_rank: as in `State`.
        kwargs: the values to begin with; each becomes an attribute.
    """

    def __init__(
        self,
        bcast_object: Broadcast = broadcast_object,
        get_rank: Callable[[], int] = collectives.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved: dict[str, Any] = kwargs
        self._show()

    def save(self) -> None:
        """Keeps a copy of the values."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """The values are what they were at the last `save`."""
        self._show()

    def saved(self) -> Any:
        """The values as they were at the last `save`."""
        return self._saved

    def take_up(self, saved: Any) -> bool:
        """The values are those that were saved, where they have the same names."""
        if not isinstance(saved, dict) or saved.keys() != self._saved.keys():
            return False
        self._saved = saved
        self._show()
        return True

    def sync(self) -> None:
        """Every rank has the first rank's values. Collective over all ranks."""
        if self._saved:
            own = {name: getattr(self, name) for name in self._saved}
            self._saved = self._bcast_object(own)
            self._show()

    def _show(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))


class TensorFlowState(ObjectState):
    """TensorFlow's variables, and values besides.

    Args:
        variables: of TensorFlow or Keras.
        session: accepted; there is none when TensorFlow executes eagerly.
        kwargs: values, as in `ObjectState`.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        super().__init__(broadcast_object, collectives.rank, **kwargs)
        self._given = variables
        self._values: list[np.ndarray[Any, Any]] = []
        self.save()

    @property
    def variables(self) -> list[Any]:
        """What is committed and restored."""
        return list(self._given() if callable(self._given) else self._given or ())

    def save(self) -> None:
        """Keeps a copy of the variables and values."""
        self._values = [variable.numpy().copy() for variable in self.variables]
        super().save()

    def restore(self) -> None:
        """The variables and values are what they were at the last `save`."""
        # Variables that were made since then, as an optimizer makes in its first step, begin at 0.
        for index, variable in enumerate(self.variables):
            known = index < len(self._values)
            variable.assign(self._values[index] if known else np.zeros_like(variable.numpy()))
        super().restore()

    def saved(self) -> Any:
        """The variables and values as they were at the last `save`."""
        return self._values, super().saved()

    def take_up(self, saved: Any) -> bool:
        """The variables and values are those that were saved, where they have the same shapes."""
        values, others = saved
        if [v.shape for v in values] != [tuple(v.shape) for v in self.variables]:
            return False
        if not super().take_up(others):
            return False
        self._values = values
        self.restore()
        return True

    def sync(self) -> None:
        """Every rank has the first rank's variables and values. Collective over all ranks."""
        broadcast_variables(self.variables, 0)
        super().sync()
        self.save()


class TensorFlowKerasState(TensorFlowState):
    """A Keras model with its optimizer, and values besides.

    Args:
        model: of Keras; it may be built by its first batch.
        optimizer: the model's own where it is None.
        backend: accepted.
        kwargs: values, as in `ObjectState`.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not hasattr(model, "weights"):
            raise UsageError(
                f"KerasState needs a model of Keras: found {type(model).__name__}. Pass the model "
                "that is trained, or for values alone: ObjectState(step=0)"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(self._of_model, **kwargs)

    def _of_model(self) -> list[Any]:
        state = [] if self.optimizer is None else which_keras().state_of(self.optimizer)
        return [*self.model.weights, *state]

    def take_up(self, saved: Any) -> bool:
        """The model and values are those that were saved, where they have the same shapes."""
        self._build()
        return super().take_up(saved)

    def sync(self) -> None:
        """Every rank has the first rank's model and values. Collective over all ranks."""
        self._build()
        super().sync()

    def _build(self) -> None:
        if self.optimizer is not None and self.model.built:
            which_keras().build(self.optimizer, self.model.trainable_variables)


def which_keras() -> Any:
    """What knows Keras: imported when it is used, as scripts of TensorFlow 1 do without."""
    from allranks.tensorflow import which_keras

    return which_keras
