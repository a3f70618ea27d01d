"""cupy, or the FAKE one of tests/fakes: without either, a suite that imports this is skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="the package cupy is missing: pip install cupy-cuda12x")
if not cupy.is_available():
    pytest.skip("there is no GPU that cupy can use", allow_module_level=True)
FAKE = hasattr(cupy, "FAKE")
fake_only = pytest.mark.skipif(not FAKE, reason="looks into the fake, or breaks it on purpose")


def needs_a_gpu(why: str) -> None:
    if FAKE:
        pytest.skip(why, allow_module_level=True)


def ones(count: int = 4, dtype: str = "float32") -> Any:
    return cupy.asarray(np.ones(count, dtype))


def host(array: Any) -> np.ndarray:
    assert isinstance(array, cupy.ndarray)
    return cupy.asnumpy(array)
