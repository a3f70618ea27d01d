"""Lines of older scripts that TensorFlow 2 or Keras 3 have given up, made to work again.

Scripts that import Horovod by its own name get this by itself; ``ALLRANKS_HOROVOD=name`` leaves
TensorFlow and Keras as they are. Runs in every rank.
"""

from __future__ import annotations

from allranks.records import settings
from allranks.tensorflow.older import names
from allranks.tensorflow.which_keras import LEGACY

_mended: list[bool] = []


def mend() -> None:
    """The older lines work in this process from now on; a second call does nothing.

    Does nothing where the environment's ``ALLRANKS_HOROVOD`` is ``name``.
    """
    if _mended or settings.horovod() == "name":
        return
    names.mend()
    if not LEGACY:  # Keras 2 has them itself
        from allranks.tensorflow.older import models, optimizers

        optimizers.mend()
        models.mend()
    _mended.append(True)
