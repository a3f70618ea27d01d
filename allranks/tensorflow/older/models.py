"""``compile(experimental_run_tf_function=…)`` and ``fit_generator``, as they were."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset
from keras.src.trainers.trainer import Trainer

_QUEUE = ("max_queue_size", "workers", "use_multiprocessing")
"""How a generator's batches were fetched; a ``keras.utils.PyDataset`` says so itself today."""


def _again(batches: Any, steps: int | None) -> Any:
    """Batches for so many steps; what has fewer begins again, as it did before Keras 3."""
    if not isinstance(batches, PyDataset) or steps is None or steps <= len(batches):
        return batches

    def without_end() -> Iterator[Any]:
        while True:
            yield from (batches[index] for index in range(len(batches)))
            batches.on_epoch_end()

    return without_end()


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
        generator = _again(generator, steps_per_epoch)
        if "validation_data" in rest:
            rest["validation_data"] = _again(rest["validation_data"], rest.get("validation_steps"))
        return fit(self, generator, steps_per_epoch=steps_per_epoch, epochs=epochs, **rest)

    def evaluate_generator(self: Any, generator: Any, steps: int | None = None, **rest: Any) -> Any:
        for name in _QUEUE:
            rest.pop(name, None)
        return self.evaluate(_again(generator, steps), steps=steps, **rest)

    Trainer.compile = compile
    Trainer.fit_generator = fit_generator
    Trainer.evaluate_generator = evaluate_generator
