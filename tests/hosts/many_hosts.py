"""A start on many hosts, a cell, an exception, an interrupt and a death, and the traffic of it.

Not part of the suite: `make many-hosts HOSTS=16 RANKS=4` runs it, every night in CI.
"""

import json
import os

import pytest

from benchmarks.scale import measure
from tests.hosts.hosts import require

HOSTS, RANKS = (
    int(os.environ.get(name, default)) for name, default in (("HOSTS", 16), ("RANKS", 4))
)
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def found():
    require()
    found = measure(HOSTS, RANKS)
    print(json.dumps(found, indent=1))
    return found


def test_all_ranks_start_and_run_a_cell(found):
    assert found["ranks"] == HOSTS * RANKS


def test_the_rank_that_raises_is_named(found):
    assert found["exception"].startswith("CellFailed: "), found["exception"]
    assert f"rank {HOSTS * RANKS - 1}" in found["exception"]
    assert "ZeroDivisionError" in found["exception"]


def test_a_limit_of_time_interrupts_all_ranks(found):
    assert found["interrupt"].startswith("CellTimeout: "), found["interrupt"]


def test_the_rank_that_dies_is_named_with_its_signal(found):
    # RankDied, or, where it could not be replaced in time, ClusterLost.
    assert f": rank {HOSTS * RANKS - 1} " in found["death"], found["death"]
    assert "was killed by signal 9" in found["death"]


def test_no_process_or_file_is_left_on_any_host(found):
    assert found["left"] == []
