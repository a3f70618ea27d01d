"""Horovod's elastic training, on ranks whose number does not change. Runs in every rank.

If a collective fails on every rank, the state goes back to the last commit, and the function is
called again. In a notebook, commits are also kept outside the ranks until the training has ended.
So after a rank has died, the next call of the training continues from the last commit.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.ops.keeping import VersionedFiles, keep_in
from allranks.errors import CollectiveError, RankLeft, UsageError
from allranks.horovod.common import HorovodInternalError, HostsUpdatedInterrupt
from allranks.tensorflow.basics import broadcast_object, broadcast_variables
from allranks.tensorflow.gradients import identity

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

_MOST_FAILURES = 3
Broadcast = Callable[[Any], Any]


class State:
    """The state that a training restores after a failure; ``commits`` is their number.

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
        self._rank = get_rank  # for subclasses of the user, as in Horovod
        self._reset_callbacks: list[Callable[[], None]] = []
        self._updates: list[int] = []
        self._training = ""  # the name of the training that uses this state, while it runs

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions that are called before every further attempt."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the registered functions before a further attempt."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Records that hosts have changed. allranks never calls this; your program may.

        Args:
            timestamp: the time of the change.
            update_res: 1 if hosts were only removed, so that all ranks have the whole state.
        """
        self._updates.append(update_res)

    def commit(self) -> None:
        """Saves the state, and checks whether hosts have changed. Collective over all ranks."""
        self.save()
        kept = world.current().variable_store
        if kept is not None and self._training and self._saved() is not None:
            found = {"training": self._training, "saved": self._saved()}
            keep_in(kept.of_training, lambda: found, copy=False)
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises on every rank if hosts have changed on the first.

        Raises:
            HostsUpdatedInterrupt: hosts have changed.

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
        """Restores the state of the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the first rank's state. Collective over all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called before a further attempt; override it in a subclass."""

    def _saved(self) -> Any:
        # The saved state for another process; None if only this process can use it.
        return None

    def _load(self, saved: Any) -> bool:
        # Restores a state that another process has saved; False if it does not fit.
        return False


class ObjectState(State):
    """A state of values that can be copied: ``state.epoch``, ``state.batch`` or any other names.

    Args:
        bcast_object, get_rank: as in `State`.
        kwargs: the first values; each becomes an attribute.
    """

    def __init__(
        self,
        bcast_object: Broadcast = broadcast_object,
        get_rank: Callable[[], int] = collectives.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._values: dict[str, Any] = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._values:
            own = {name: getattr(self, name) for name in self._values}
            self._values = self._bcast_object(own)
            self._set_attributes()

    def _saved(self) -> Any:
        return self._values

    def _load(self, saved: Any) -> bool:
        if not isinstance(saved, dict) or saved.keys() != self._values.keys():
            return False
        self._values = saved
        self._set_attributes()
        return True

    def _set_attributes(self) -> None:
        for name, value in self._values.items():
            setattr(self, name, copy.deepcopy(value))


class TensorFlowState(ObjectState):
    """A state of TensorFlow variables and other values.

    Args:
        variables: variables of TensorFlow or Keras.
        session: ignored, because eager TensorFlow has no sessions.
        kwargs: values, as in `ObjectState`.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._given = variables
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._saved_variables: list[Any] = []
        self.save()

    @property
    def variables(self) -> list[Any]:
        """The variables that are committed and restored."""
        return list(self._given() if callable(self._given) else self._given or ())

    def save(self) -> None:
        self._saved_variables = self.variables
        self._arrays = [variable.numpy().copy() for variable in self._saved_variables]
        super().save()

    def restore(self) -> None:
        # By variable, since those created after `save` may come before the others.
        pairs = zip(self._saved_variables, self._arrays, strict=True)
        arrays = {identity(variable): array for variable, array in pairs}
        for variable in self.variables:
            if identity(variable) in arrays:
                variable.assign(arrays[identity(variable)])
            elif self._is_of_optimizer(variable):
                variable.assign(np.zeros_like(variable.numpy()))
        super().restore()

    def _is_of_optimizer(self, variable: Any) -> bool:
        # An optimizer creates its variables in the first step. Weights that this step has created
        # stay as they are: 0 is no value for them.
        return not variable.trainable

    def sync(self) -> None:
        broadcast_variables(self.variables, 0)
        super().sync()
        self.save()

    def _saved(self) -> Any:
        return self._arrays, super()._saved()

    def _load(self, saved: Any) -> bool:
        arrays, others = saved
        if [a.shape for a in arrays] != [tuple(v.shape) for v in self.variables]:
            return False
        if not super()._load(others):
            return False
        self._saved_variables, self._arrays = self.variables, arrays
        self.restore()
        return True


class TensorFlowKerasState(TensorFlowState):
    """A state of a Keras model with its optimizer, and other values.

    Args:
        model: a Keras model; it need not be built yet.
        optimizer: by default the model's own.
        backend: ignored.
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
        # Here, because it imports Keras, which scripts of TensorFlow 1 do not need.
        from allranks.keras.versions import state_of

        state = [] if self.optimizer is None else state_of(self.optimizer)
        return [*self.model.weights, *state]

    def _is_of_optimizer(self, variable: Any) -> bool:
        return all(variable is not weight for weight in self.model.weights)

    def sync(self) -> None:
        self._build()
        super().sync()

    def _load(self, saved: Any) -> bool:
        self._build()
        return super()._load(saved)

    def _build(self) -> None:
        from allranks.keras.versions import build

        if self.optimizer is not None and self.model.built:
            build(self.optimizer, self.model.trainable_variables)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func(state, …)``: synchronizes the state, and repeats the call after failures.

    All ranks begin with the first rank's state. If a collective fails on every rank
    (`HorovodInternalError`, `CollectiveMismatch`), every rank goes back to its last commit and
    calls ``func`` again. After three failures without a commit between them the exception is
    raised, because a fourth attempt would fail too. It is also raised if a rank has left, because
    that rank does not come back in this cell; the state is restored, and the next cell can
    continue. In a notebook, after a rank has died, the next call of a function of this name
    continues from the last commit, on the remaining ranks and on the new ones.

    Collective over all ranks.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Like `run`, and calls ``reset`` before every further attempt."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(
                "elastic.run needs a function whose first argument is its state: found "
                f"{state!r:.60}. Pass for instance KerasState(model, batch=0)"
            )
        with _keeping_commits(state, getattr(func, "__qualname__", "run")):
            return attempts(state, *args, **kwargs)

    def attempts(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, failures, commits = False, 0, state.commits
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, CollectiveError):
                state.restore()
                # A commit shows progress, so only failures since the last commit count.
                failures = failures + 1 if state.commits == commits else 1
                # After a rank has left, collectives fail until the next cell.
                if failures == _MOST_FAILURES or collectives.dirty():
                    raise
                skip_sync, commits = False, state.commits
            except HostsUpdatedInterrupt as update:
                skip_sync = update.skip_sync
            reset()
            state.on_reset()

    return wrapper


@contextmanager
def _keeping_commits(state: State, name: str) -> Iterator[None]:
    # Collective. If a rank's death has ended a training of this name, the state becomes its last
    # commit.
    this = world.current()
    if this.variable_store is None:
        yield
        return
    series: VersionedFiles = this.variable_store.of_training
    series.settle()  # a commit of an earlier training may not be written completely yet
    _load_last_commit(this, state, name)
    state._training = name
    try:
        yield
        # The commits stay until all ranks are here, because a rank may die before that.
        collectives.barrier()
    except RankLeft:
        # The commits stay, because the cell may run again after a dead rank is replaced.
        this.variable_store.cut_off()
        raise
    except BaseException:
        series.drop()
        raise
    else:
        series.drop()
    finally:
        state._training = ""


def _load_last_commit(this: world.World, state: State, name: str) -> None:
    """Loads the commit of an interrupted training on all ranks or on none, and reports it."""
    assert this.variable_store is not None
    series: VersionedFiles = this.variable_store.of_training
    found, problem, version = None, "", series.newest()
    if not this.shared_by_all:  # each host has its own files
        version = min(collectives.allgather_object(version))
    try:
        found = series.load(version)
    except Exception as error:  # unpickling runs code of the user
        problem = f"rank {this.rank} cannot read it: {type(error).__name__}: {error}"
    at, kept = found or (time.time(), {})
    own = kept.get("training") == name
    if own:
        state.save()
    # Restored below, if another rank cannot load its commit.
    before = state._saved()
    fits = own and state._load(kept["saved"])
    if own and not fits:
        problem = f"it does not fit the state of rank {this.rank}"
    every = collectives.allgather_object((fits, problem))
    notice = ""
    # Ranks that began with different commits would train different models.
    if all(fits for fits, _ in every):
        notice = f"{name} continues from its last commit, {time.time() - at:.0f} s ago"
    else:
        if fits:
            state._load(before)
        series.drop()
        problems = [problem for _, problem in every if problem]
        if problems:
            notice = (
                f"{name} starts from the beginning: its last commit cannot be used: {problems[0]}"
            )
    if notice and this.rank == 0:
        this.notice(notice)
