"""Names of TensorFlow 1 and Keras 2 that newer versions lack, for older scripts.

Scripts that import Horovod by its own name get this automatically; ``ALLRANKS_HOROVOD=name`` leaves
TensorFlow and Keras unchanged. Eager execution stays on, as Keras 3 needs it: a script that builds
graphs of TensorFlow 1 needs ``ALLRANKS_TENSORFLOW=1`` (see `allranks.horovod.alias`). Runs in
every rank.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from allranks.keras.private_names import import_private, require
from allranks.keras.versions import LEGACY, keras
from allranks.post_import import look_up_in
from allranks.tensorflow import keras2_saving

# Module names of the backend of Keras 3 and Keras 2.
_BACKENDS = {
    f"{prefix}keras.backend"
    for prefix in ("", "tensorflow.", "keras._tf_keras.", "tf_", "tf_keras.api._v2.")
}
_BACKEND = ("get_value", "constant", "name_scope", "learning_phase")
_QUEUE_OPTIONS = ("max_queue_size", "workers", "use_multiprocessing")
_installed: list[bool] = []


def install() -> None:
    """Adds the older names unless ``ALLRANKS_HOROVOD`` is ``name``; a second call does nothing."""
    if _installed or os.environ.get("ALLRANKS_HOROVOD") == "name":
        return
    _add_names()
    if not LEGACY:  # Keras 2 itself has the older methods
        _patch_optimizers()
        _patch_models()
        _patch_layers()
        _add_functions()
        keras2_saving.install()
    _installed.append(True)


def _add_names() -> None:
    for module, older in ((tf, tf.compat.v1), (tf.train, tf.compat.v1.train)):
        look_up_in(module, older.__name__)
    # The import replaces `tf.keras.backend` by another module, so it comes first.
    importlib.import_module("tensorflow.keras.backend")
    # `from tensorflow.keras import backend`, `import tensorflow.keras.backend` and `import
    # keras.backend` are three modules. All that scripts have imported so far get the names.
    for module, backend in list(sys.modules.items()):
        if module not in _BACKENDS:
            continue
        for name in _BACKEND:
            if not hasattr(backend, name) and hasattr(tf.keras.backend, name):
                setattr(backend, name, getattr(tf.keras.backend, name))
        names: Any = backend
        # Keras 3 has no sessions, and the rank has its GPU already.
        names.set_session = lambda session: None
        names.set_value = lambda variable, value: variable.assign(value)


class _CallableList(list[Any]):
    """An optimizer's variables: a list as in Keras 3, callable as in Keras 2."""

    def __call__(self) -> _CallableList:
        return self


def _patch_optimizers() -> None:
    """Adds ``SGD(lr=)``, ``opt.lr``, ``opt.variables()``, ``opt.get_weights()`` and others."""
    base = import_private("keras.src.optimizers.base_optimizer", "BaseOptimizer").BaseOptimizer
    variable = import_private("keras.src.backend.common.variables", "Variable").Variable
    require(base, "apply_gradients", "variables", "_get_current_learning_rate")
    _patch_learning_rate(base)
    apply, variables = base.apply_gradients, base.variables.fget
    # Scripts for TensorFlow 2.11 to 2.15 name the optimizers of Keras 2.10 so.
    for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):
        setattr(tf.keras.optimizers.legacy, name, getattr(keras.optimizers, name))
        setattr(keras.optimizers.legacy, name, getattr(keras.optimizers, name))

    @functools.wraps(apply)
    def apply_gradients(
        self: Any,
        grads_and_vars: Any,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        return apply(self, grads_and_vars)

    base.apply_gradients = apply_gradients
    base.variables = property(lambda self: _CallableList(variables(self)))
    base.get_weights = lambda self: [one.numpy() for one in variables(self)]
    variable.ref = lambda self: self.value.ref()  # a dictionary key, as in tf.Variable


def _patch_learning_rate(base: Any) -> None:
    begin, current, config = base.__init__, base._get_current_learning_rate, base.get_config

    @functools.wraps(begin)
    def __init__(self: Any, learning_rate: Any, *args: Any, **options: Any) -> None:
        given = options.pop("lr", None)
        decay = options.pop("decay", None) or 0.0
        begin(self, learning_rate if given is None else given, *args, **options)
        self._older_decay = float(decay)

    @functools.wraps(current)
    def rate(self: Any) -> Any:
        decay = getattr(self, "_older_decay", 0.0)
        if not decay:
            return current(self)
        return current(self) / (1.0 + decay * keras.ops.cast(self.iterations, "float32"))

    @functools.wraps(config)
    def get_config(self: Any) -> Any:
        # Keras without allranks ignores a decay, with a warning.
        decay = getattr(self, "_older_decay", 0.0)
        return {**config(self), "decay": decay} if decay else config(self)

    def lr(self: Any) -> Any:
        # The variable, without any decay.
        return getattr(self, "inner_optimizer", self)._learning_rate

    def set_lr(self: Any, value: Any) -> None:
        self.learning_rate = value

    # All optimizers of Keras pass these on to the base class.
    base.__init__ = __init__
    base._get_current_learning_rate = rate
    base.get_config = get_config
    base.lr = property(lr, set_lr)


def _patch_models() -> None:
    trainer = import_private("keras.src.trainers.trainer", "Trainer").Trainer
    compile_now, fit_now = trainer.compile, trainer.fit

    def without_queue(options: dict[str, Any]) -> dict[str, Any]:
        # In Keras 3 the options of the queue are attributes of the `keras.utils.PyDataset`.
        return {name: value for name, value in options.items() if name not in _QUEUE_OPTIONS}

    @functools.wraps(compile_now)
    def compile(self: Any, *args: Any, **options: Any) -> Any:
        options.pop("experimental_run_tf_function", None)
        return compile_now(self, *args, **options)

    @functools.wraps(fit_now)
    def fit_generator(
        self: Any, generator: Any, steps_per_epoch: int | None = None, epochs: int = 1, **rest: Any
    ) -> Any:
        # The generator shuffles its batches, if anything does; Keras 3 shuffles a PyDataset.
        rest = {**without_queue(rest), "shuffle": False}
        if "validation_data" in rest:
            rest["validation_data"] = _endless(
                rest["validation_data"], rest.get("validation_steps")
            )
        batches = _endless(generator, steps_per_epoch)
        return self.fit(batches, steps_per_epoch=steps_per_epoch, epochs=epochs, **rest)

    def evaluate_generator(self: Any, generator: Any, steps: int | None = None, **rest: Any) -> Any:
        return self.evaluate(_endless(generator, steps), steps=steps, **without_queue(rest))

    trainer.compile = compile
    trainer.fit_generator = fit_generator
    trainer.evaluate_generator = evaluate_generator


def _add_functions() -> None:
    # `tf.keras.losses.mean_squared_error` and others: TensorFlow's modules have short names only.
    for older, newer in ((tf.keras.losses, keras.losses), (tf.keras.metrics, keras.metrics)):
        for name in set(dir(newer)) - set(dir(older)):
            setattr(older, name, getattr(newer, name))
    keras.metrics.Metric.reset_states = lambda self: self.reset_state()


def _patch_layers() -> None:
    layer = keras.layers.BatchNormalization
    begin = layer.__init__

    # Without functools.wraps: Keras compares the signature with the real arguments.
    def __init__(self: Any, *args: Any, fused: bool | None = None, **options: Any) -> None:
        begin(self, *args, **options)

    layer.__init__ = __init__


def _endless(batches: Any, steps: int | None) -> Any:
    # As in Keras 2, batches start again if there are fewer than `steps`.
    if not isinstance(batches, keras.utils.PyDataset) or steps is None or steps <= len(batches):
        return batches

    def again() -> Iterator[Any]:
        while True:
            yield from (batches[index] for index in range(len(batches)))
            batches.on_epoch_end()

    return again()
