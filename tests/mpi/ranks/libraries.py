"""What the suites on other libraries' arrays share: the library, what ranks bring, numpy's sums."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import allranks.collectives as c

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def package(name: str, install: str = "") -> Any:
    """A library; skips the test where it is missing, and says what to install."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"the package {name} is missing: pip install {install or name}")


def values(rank: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    """What a rank brings: small whole numbers, whose sums every dtype holds exactly."""
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    base = (np.arange(int(np.prod(shape))) * 7 + rank * 3) % 11
    if dtype.kind == "b":
        return (base > 4).reshape(shape)
    return (base + (1j * rank if dtype.kind == "c" else 0)).astype(dtype).reshape(shape)


def total(shape: tuple[int, ...], name: str) -> np.ndarray:
    """What all ranks bring, summed up by numpy."""
    parts = np.stack([values(r, shape, name) for r in range(c.size())])
    return parts.any(axis=0) if name == "bool" else parts.sum(axis=0, dtype=parts.dtype)


def equal(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert (found == wanted).all()
