"""What programs written for Horovod call themselves: the two compressions."""

import numpy as np
import pytest

from allranks.collectives import Compression


@pytest.mark.parametrize(
    ("compression", "dtype", "sent"),
    [
        (Compression.none, "f4", "f4"),
        (Compression.fp16, "f4", "f2"),
        (Compression.fp16, "f8", "f2"),
        (Compression.fp16, "f2", "f2"),
        (Compression.fp16, "i8", "i8"),
    ],
)
def test_an_array_comes_back_as_it_was(compression, dtype, sent):
    array = np.arange(6, dtype=dtype)
    smaller, context = compression.compress(array)
    assert smaller.dtype == sent
    back = compression.decompress(smaller, context)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, array)
