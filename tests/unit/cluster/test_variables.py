"""Values on their way to the ranks: which can be sent, and how large they are."""

import itertools
import threading

import numpy
import pytest

from allranks.cluster.variables import pack, sent_nbytes
from allranks.errors import UsageError


class Endless:
    """A list of words without end, for pickle."""

    def __reduce__(self):
        return list, (), None, itertools.repeat("a word")


def test_the_bytes_of_a_value_are_counted_without_pickling_all_of_it():
    assert 0 < sent_nbytes("x") < 100
    assert 8e6 <= sent_nbytes({"weights": numpy.zeros(1_000_000)}) < 8.1e6
    assert sent_nbytes(Endless()) > 1e6


def test_a_value_that_cannot_be_sent_is_named_with_what_to_send():
    assert sent_nbytes(threading.Lock()) is None
    with pytest.raises(UsageError, match=r"^lock cannot be sent to the ranks: .* Send its data"):
        pack({"x": 3, "lock": threading.Lock()}, "the ranks")
