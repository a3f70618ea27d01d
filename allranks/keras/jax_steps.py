"""Keeps the variables of a model on jax if a step of ``fit`` fails or is interrupted.

Keras lets each compiled step overwrite the memory of all variables ("donates" it). From then on the
values exist only in what the step returns. So the step has to end: a collective that fails returns
its arguments, the optimizer returns the variables that it was given, and the exception is raised
after the step. Runs in every rank.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from allranks.collectives.calls.rank_state import interrupt_pipe
from allranks.keras.private_names import import_private, replace

_TRAINABLE, _FIXED = "trainable_variables", "non_trainable_variables"
_OPTIMIZER, _METRICS = "optimizer_variables", "metrics_variables"
# What a step gets and returns. Keras writes it back to the model from a dictionary.
_NAMES = {
    4: (_TRAINABLE, _FIXED, _OPTIMIZER, _METRICS),
    3: (_TRAINABLE, _FIXED, _METRICS),
    2: (_TRAINABLE, _FIXED),
}

traced_step: ContextVar[CompiledStep | None] = ContextVar("traced_step", default=None)
"""The step in which jax traces the code that runs now."""


class CompiledStep:
    """The compiled step of one model.

    Attributes:
        failure: what a collective of the present run has raised.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._runs = False
        self._waits = False
        self._postponed: Callable[[], object] | None = None

    def run(self, compiled: Any, state: Any, data: Any, keep: Callable[[Any], None]) -> Any:
        """Returns what the compiled step returns, or raises after ``keep`` has its new state."""
        self.failure, self._waits, self._postponed = None, False, None
        token = traced_step.set(self)
        try:
            with self._until_it_has_ended(state):
                self._runs = True
                made = compiled(state, data)
                # Only now it is certain whether a collective has failed.
                jax.block_until_ready(made)
                keep(made[1])
        finally:
            self._runs = False
            traced_step.reset(token)
        if self.failure is not None:
            raise self.failure
        return made

    def catching(self, call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Returns a function that also returns whether ``call`` has failed, in place of raising."""

        def caught(*arrays: Any) -> list[Any]:
            if not self._runs:
                # The user's program calls what was traced here, and nothing else would raise.
                return [*call(*arrays), np.False_]
            if self.failure is None:
                try:
                    self._waits = threading.current_thread() is threading.main_thread()
                    if self._postponed:
                        self._postponed()
                    made = call(*arrays)
                    self._waits = False
                except BaseException as error:
                    self._waits = False
                    self.failure = error
                else:
                    return [*made, np.False_]
            return [*map(np.asarray, arrays), np.True_]

        return caught

    def has_failed(self) -> Any:
        """Whether a collective has failed; traced by jax, behind those that are traced before."""
        flag = jax.ShapeDtypeStruct((), np.bool_)
        look = lambda: np.bool_(self._runs and self.failure is not None)  # noqa: E731
        return io_callback(look, flag, ordered=True)

    @contextmanager
    def _until_it_has_ended(self, state: Any) -> Iterator[None]:
        """Postpones interrupts while the variables exist only in the step that runs."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return
        handler = before

        def interrupt(number: int, frame: FrameType | None) -> None:
            # The wait in a collective ends at once; then the step ends by itself.
            if self._waits or not any(one.is_deleted() for one in jax.tree.leaves(state)):
                handler(number, frame)
            else:
                self._postponed = lambda: handler(number, sys._getframe())

        signal.signal(signal.SIGINT, interrupt)
        try:
            interrupt_pipe.received()  # the main thread has handled an interrupt from before
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            if self._postponed and not isinstance(self.failure, KeyboardInterrupt):
                self._postponed()


def install() -> None:
    trainer = import_private("keras.src.backend.jax.trainer", "JAXTrainer").JAXTrainer
    replace(trainer, "_make_function", _keeping_variables)
    for name in ("evaluate", "predict"):
        replace(trainer, name, _writing_back)


def _keeping_variables(make: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of Keras' trainer that makes the function which calls a step."""

    def make_function(self: Any, step_function: Any, *args: Any, **options: Any) -> Any:
        def keep(state: Any) -> None:
            # Not by setattr, because Keras tracks what is assigned to a model.
            kept = dict(zip(_NAMES[len(state)], state, strict=True))
            object.__setattr__(self, "_jax_state", kept)

        def one_step(state: Any, data: Any) -> Any:
            return step.run(step_function, state, data, keep)

        step = CompiledStep()
        compiled = self.jit_compile and not self.run_eagerly
        function = make(self, one_step if compiled else step_function, *args, **options)

        def keeping(state: Any, iterator: Any) -> Any:
            keep(state)  # the iterator may raise before the first step
            return function(state, iterator)

        return keeping

    return make_function


def _writing_back(method: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of Keras' trainer: the variables come back also if it raises, as in fit."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        finally:
            self.jax_state_sync()

    return call
