"""What other packages bring to collectives: a dtype, and arrays."""

import sys

import numpy as np
import pytest

from allranks.collectives.arrays import libraries
from allranks.errors import MissingDependency


def test_a_dtype_that_numpy_lacks_is_found_by_its_name():
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    assert libraries.to_dtype(dtype.name) == dtype


def test_a_package_that_a_rank_lacks_is_named_with_what_needs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    said = "bfloat16 arrays need the package ml_dtypes on every rank. pip install ml_dtypes"
    with pytest.raises(MissingDependency, match=said):
        libraries.to_dtype("bfloat16")
