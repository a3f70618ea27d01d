"""Several hosts, pretended: agreement by messages, data through MPI.

Run with ALLRANKS_RANKS_PER_HOST set.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from conftest import in_a_cell, next_cell_works, odd

import allranks.collectives as c
from allranks.collectives.mpi.transport import Mpi
from allranks.errors import CollectiveMismatch, RankLeft

PER_HOST = int(os.environ.get("ALLRANKS_RANKS_PER_HOST", "0"))
pytestmark = pytest.mark.skipif(
    not 0 < PER_HOST < c.size(), reason="ALLRANKS_RANKS_PER_HOST does not make two hosts"
)


def test_ranks_know_their_hosts():
    assert c.local_rank() == c.rank() % PER_HOST
    assert c.local_size() == min(PER_HOST, c.size() - c.rank() // PER_HOST * PER_HOST)
    assert c.cross_rank() == c.rank() // PER_HOST
    assert c.is_homogeneous() == (c.size() % PER_HOST == 0)


def test_a_difference_is_named_across_hosts():
    error = in_a_cell(lambda: c.allreduce(np.ones(3 + odd())))
    assert isinstance(error, CollectiveMismatch)
    assert "rank 1 has (4,)" in str(error)
    next_cell_works()


def test_a_mismatch_across_hosts_leaves_the_epoch_clean():
    before = c.epoch()
    with pytest.raises(CollectiveMismatch):
        c.broadcast(1.0, int(odd()))
    assert c.allreduce(1, c.Sum) == c.size()
    assert c.epoch() == before


def test_a_long_transfer_between_hosts_is_no_deadlock():
    for _ in range(3):
        found = c.allreduce(np.ones(8_000_000), c.Sum)
        assert found[0] == found[-1] == c.size()


def test_a_rank_of_another_host_that_left_is_named():
    def fails():
        if c.rank() == c.size() - 1:
            raise ValueError("bad batch")
        c.allreduce(np.ones(3))

    for _ in range(3):
        error = in_a_cell(fails)
        if c.rank() < c.size() - 1:
            assert isinstance(error, RankLeft)
            assert f"rank {c.size() - 1} has left" in str(error)
            assert "ValueError: bad batch" in str(error)
        next_cell_works()


def test_a_rank_that_has_done_its_part_and_left_is_not_missed(monkeypatch):
    """Every rank has arrived; the slowest sends when the others have left the cell already."""
    move = Mpi._do

    def slowly(self, call, *arguments):
        time.sleep(1)
        yield from move(self, call, *arguments)

    if c.rank() == c.size() - 1:
        monkeypatch.setattr(Mpi, "_do", slowly)
    assert in_a_cell(lambda: c.gather(np.ones(3), root=0)) is None
    assert in_a_cell(lambda: c.comm.allreduce(1)) is None
    monkeypatch.undo()
    next_cell_works()


def test_a_late_rank_of_another_host_is_awaited():
    if c.rank() == c.size() - 1:
        time.sleep(0.5)
    next_cell_works()


def test_records_are_on_one_clock():
    c.barrier()
    c.allreduce(np.ones(4), name="clock")
    record = c.records()[-1]
    assert abs(max(c.allgather_object(record.ended)) - record.ended) < 1.0
