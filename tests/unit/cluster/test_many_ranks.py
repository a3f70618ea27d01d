"""What lets a hundred ranks start on a few cores."""

import ctypes
import os
import sys

import pytest

from allranks.cluster import options
from allranks.engine import processes


def test_there_may_be_128_ranks_on_any_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert options.choose_size(128, ()) == 128


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a thread sleep longer")
def test_ranks_that_outnumber_the_cores_sleep_longer_while_mpi_starts():
    def slack() -> int:
        return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)

    before = slack()
    with processes.sleeping_longer(100 * (os.cpu_count() or 1)):
        assert slack() > before
    assert slack() == before
    with processes.sleeping_longer(1):
        assert slack() == before
