"""scikit-learn's digits in the shapes of MNIST and CIFAR-10, for machines without a network.

With ``ALLRANKS_TEST_DOWNLOAD=1``, Keras' own ``load_data`` downloads the real data.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np

DOWNLOAD = "ALLRANKS_TEST_DOWNLOAD"
_TRAINED = 1500


def load(height: int, colours: int) -> Any:
    """Returns ``(images, labels), (images, labels)`` as Keras does: uint8, 0 to 255.

    Args:
        height: height and width of the pictures, at least 8.
        colours: number of colours; 0 for grey without a last dimension.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    scale, border = height // 8, height % 8
    images = np.kron(digits.images, np.ones((scale, scale)))
    images = np.pad(images, ((0, 0), *[(border // 2, border - border // 2)] * 2)) * (255 / 16)
    images, labels = images.astype(np.uint8), digits.target.astype(np.uint8)
    if colours:
        images, labels = np.repeat(images[..., None], colours, -1), labels[:, None]
    return (images[:_TRAINED], labels[:_TRAINED]), (images[_TRAINED:], labels[_TRAINED:])


def use() -> None:
    """Makes ``keras.datasets.mnist`` and ``cifar10`` load the digits in this process."""
    if os.environ.get(DOWNLOAD) == "1":
        return
    import tensorflow as tf

    for dataset, height, colours in (("mnist", 28, 0), ("cifar10", 32, 3)):
        for place in ("keras.src.datasets", "tensorflow.keras.datasets", "keras.datasets"):
            module = importlib.import_module(f"{place}.{dataset}")
            module.load_data = functools.partial(load, height, colours)
        getattr(tf.keras.datasets, dataset).load_data = module.load_data
