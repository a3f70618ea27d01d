"""Values on their way to the ranks: which can be sent, and how large they are."""

import itertools
import pickle
import signal
import threading

import numpy
import pytest

from allranks.cluster.variables import load, pack, sent_nbytes
from allranks.errors import UsageError
from allranks.records.deferred import interrupts_to


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


class Interrupts:
    """A value that is interrupted while it is read."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGINT,)


def test_an_interrupt_ends_the_reading_of_a_value_also_in_a_cell_that_awaits():
    packed = pickle.dumps(Interrupts())
    with interrupts_to(lambda *_: None), pytest.raises(KeyboardInterrupt):
        load(packed, 0)
