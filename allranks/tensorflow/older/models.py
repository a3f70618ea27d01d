"""``compile(experimental_run_tf_function=…)`` and ``fit_generator``, as they were."""

from __future__ import annotations

import functools
from typing import Any

from keras.src.trainers.trainer import Trainer

_QUEUE = ("max_queue_size", "workers", "use_multiprocessing")
"""How a generator's batches were fetched; a ``keras.utils.PyDataset`` says so itself today."""


def mend() -> None:
    """Keras' models take what they did before Keras 3."""
    compile_now, fit_now = Trainer.compile, Trainer.fit

    @functools.wraps(compile_now)
    def compile(self: Any, *args: Any, **options: Any) -> Any:
        options.pop("experimental_run_tf_function", None)
        return compile_now(self, *args, **options)

    def fit(self: Any, *args: Any, **options: Any) -> Any:
        for name in _QUEUE:
            options.pop(name, None)
        return self.fit(*args, **options)

    @functools.wraps(fit_now)
    def fit_generator(
        self: Any, generator: Any, steps_per_epoch: int | None = None, epochs: int = 1, **rest: Any
    ) -> Any:
        # A generator shuffles what it yields itself, or not at all.
        rest = {**rest, "shuffle": False}
        return fit(self, generator, steps_per_epoch=steps_per_epoch, epochs=epochs, **rest)

    def evaluate_generator(self: Any, generator: Any, steps: int | None = None, **rest: Any) -> Any:
        for name in _QUEUE:
            rest.pop(name, None)
        return self.evaluate(generator, steps=steps, **rest)

    Trainer.compile = compile
    Trainer.fit_generator = fit_generator
    Trainer.evaluate_generator = evaluate_generator
