"""Tries a function again from the last commit when a collective has failed. Runs in every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from allranks import collectives
from allranks.errors import CollectiveError, UsageError
from allranks.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from allranks.tensorflow.elastic.resuming import resumed
from allranks.tensorflow.elastic.state import State

_MOST_FAILURES = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func(state, …)``: all ranks begin with the first rank's state, and try again.

    A collective that fails on every rank (`HorovodInternalError`, `CollectiveMismatch`) takes every
    rank back to its last commit, and ``func`` is called again. It is not called again after three
    failures with no commit between them, as it would fail for ever; nor where a rank has left, as
    that one does not come back: then the state is restored and the exception goes on, so that the
    next cell can. In a notebook, where a rank has died, the next call of a function of this name
    goes on from the last commit, on the ranks that are left and on those that are new.

    Collective over all ranks.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """As `run`, and calls ``reset`` before every further try."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(
                "elastic.run needs a function whose first argument is its state: found "
                f"{state!r:.60}. Pass for instance KerasState(model, batch=0)"
            )
        with resumed(state, getattr(func, "__qualname__", "run")):
            return attempt(state, *args, **kwargs)

    def attempt(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, failures, commits = False, 0, state.commits
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, CollectiveError):
                state.restore()
                failures = failures + 1 if state.commits == commits else 1
                if failures == _MOST_FAILURES or collectives.dirty():
                    raise
                skip_sync, commits = False, state.commits
            except HostsUpdatedInterrupt as update:
                skip_sync = update.skip_sync
            reset()
            state.on_reset()

    return wrapper
