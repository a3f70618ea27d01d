"""Models from a file, ready to train on all ranks. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allranks.errors import UsageError
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.keras_optimizer import DistributedOptimizer
from allranks.tensorflow.which_keras import LEGACY, keras


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Returns the saved model, whose optimizer has its state and is distributed again.

    Args:
        filepath: what ``keras.models.load_model`` takes; every rank reads it.
        custom_optimizers: classes of optimizers that are not Keras' own.
        custom_objects: as for ``keras.models.load_model``.
        compression: as in `allreduce`.
        legacy_opts: Keras 2's optimizers: True with Keras 2 only.

    Raises:
        UsageError: ``legacy_opts=True``.
    """
    if legacy_opts and not LEGACY:
        raise UsageError(
            "Keras 3 has no legacy optimizers, found legacy_opts=True. Leave it out; a model that "
            "was saved with one loads with TF_USE_LEGACY_KERAS=1 and: "
            "pip install 'allranks[legacy-keras]'"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
