"""Lines of Keras 2 that save models and weights, for older scripts. Runs in every rank.

Weights go into a checkpoint of TensorFlow or a file of HDF5, as in Keras 2. Keras 3 can no longer
save a model as a folder.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from allranks.errors import UsageError
from allranks.keras.private_names import import_private, replace
from allranks.keras.versions import keras

_HDF5 = (".h5", ".hdf5")
# Keras 3 accepts these endings itself.
_WEIGHTS = (".keras", ".weights.h5", "weights.json")
_MODELS = (".keras", *_HDF5)
# Names in a checkpoint of TensorFlow.
_OBJECTS, _SAVED = "_CHECKPOINTABLE_OBJECT_GRAPH", "weights/{}/.ATTRIBUTES/VARIABLE_VALUE"
_LEGACY = "For the formats of Keras 2, set TF_USE_LEGACY_KERAS=1 before the ranks start."


def install() -> None:
    model = import_private("keras.src.models.model", "Model").Model
    replace(model, "save", _naming_formats)
    replace(model, "save_weights", _saving_checkpoints)
    replace(model, "load_weights", _loading_checkpoints)
    checkpoint = keras.callbacks.ModelCheckpoint
    replace(checkpoint, "__init__", _taking_older_arguments)
    replace(checkpoint, "on_epoch_end", _after_a_period)


def _naming_formats(save: Callable[..., Any]) -> Callable[..., Any]:
    def named(self: Any, filepath: Any, *args: Any, **options: Any) -> Any:
        _check_model_path(filepath, f"model.save({str(filepath) + '.keras'!r})")
        return save(self, filepath, *args, **options)

    return named


def _check_model_path(filepath: Any, line: str) -> None:
    path = str(filepath)
    if not path.endswith(_MODELS) and not path.startswith("hf://"):
        raise UsageError(
            f"Keras 3 saves a whole model only in a file that ends in .keras or .h5, found {path}. "
            f"Type {line}. {_LEGACY}"
        )


def _saving_checkpoints(save_weights: Callable[..., Any]) -> Callable[..., Any]:
    def save(
        self: Any,
        filepath: Any,
        overwrite: bool = True,
        save_format: str | None = None,
        options: Any = None,
        **others: Any,
    ) -> Any:
        path = os.fspath(filepath)
        if path.endswith(_WEIGHTS) or others or not overwrite:
            return save_weights(self, filepath, overwrite=overwrite, **others)
        if not self.built:
            raise UsageError(
                f"save_weights needs a model that has weights: {self.name} is not built. Build the "
                "model before: call it once."
            )
        if path.endswith(_HDF5) or save_format in ("h5", "hdf5"):
            return _save_hdf5(self, path)
        _checkpoint(self).write(path, options)
        # So that tf.train.latest_checkpoint finds it.
        files = import_private(
            "tensorflow.python.checkpoint.checkpoint_management", "update_checkpoint_state_internal"
        )
        files.update_checkpoint_state_internal(
            os.path.dirname(path) or ".", path, [path], save_relative_paths=True
        )
        return None

    return save


def _checkpoint(model: Any) -> Any:
    # By their order: TensorFlow does not find the variables in all models of Keras 3.
    return tf.train.Checkpoint(weights=[variable.value for variable in model.weights])


def _save_hdf5(model: Any, path: str) -> None:
    h5py: Any = importlib.import_module("h5py")
    name = "keras.src.legacy.saving.legacy_h5_format"
    legacy = import_private(name, "save_weights_to_hdf5_group")
    with h5py.File(path, "w") as file:
        legacy.save_weights_to_hdf5_group(file, model)


def _loading_checkpoints(load_weights: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, filepath: Any, *args: Any, **options: Any) -> Any:
        path = os.fspath(filepath)
        if not os.path.exists(f"{path}.index"):
            return load_weights(self, filepath, *args, **options)
        found = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        found.pop(_OBJECTS, None)
        # Before the first weight changes: TensorFlow raises after it has read what fits.
        if found != {_SAVED.format(n): list(one.shape) for n, one in enumerate(self.weights)}:
            raise UsageError(
                "load_weights needs a checkpoint that save_weights of this version of Keras has "
                f"written for a model with the same weights, found another one in {path}. Build "
                "the model before: call it once. To read a checkpoint of Keras 2, set "
                "TF_USE_LEGACY_KERAS=1 before the ranks start."
            )
        return _checkpoint(self).read(path)

    return load


def _taking_older_arguments(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def __init__(self: Any, filepath: Any, *args: Any, **options: Any) -> None:
        path = os.fspath(filepath)
        self._older_period = options.pop("period", None) or 1
        self._older_epochs = 0
        # In Keras 2 and 3 this is the fifth argument.
        weights_only = args[3] if len(args) > 3 else options.get("save_weights_only", False)
        if weights_only:
            accepted = path if path.endswith(_WEIGHTS) else f"{path}.weights.h5"
            begin(self, accepted, *args, **options)
            self.filepath = path
        else:
            _check_model_path(
                path, f"ModelCheckpoint({path + '.keras'!r}), or add save_weights_only=True"
            )
            begin(self, filepath, *args, **options)

    return __init__


def _after_a_period(end: Callable[..., Any]) -> Callable[..., Any]:
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        self._older_epochs += 1
        if self._older_epochs >= self._older_period:
            self._older_epochs = 0
            end(self, epoch, logs)

    return on_epoch_end
