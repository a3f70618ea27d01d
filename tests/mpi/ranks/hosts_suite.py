"""Several hosts, pretended: memory on each, messages between their first ranks.

Run with ALLRANKS_RANKS_PER_HOST set.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_SECONDS, in_a_cell, next_cell_works, shortest_way

import allranks.collectives as c
from allranks.collectives.mpi.agreement import HostLeaders
from allranks.collectives.mpi.status_exchange import spread
from allranks.collectives.mpi.transport import MpiTransport
from allranks.errors import RankLeft

HOSTS = c.world.current().hosts
pytestmark = pytest.mark.skipif(
    len(set(HOSTS)) < 2, reason="ALLRANKS_RANKS_PER_HOST does not make two hosts"
)


def test_ranks_know_their_hosts():
    here = HOSTS[c.rank()]
    first = HOSTS.index(here)
    assert c.local_rank() == c.rank() - first
    assert c.local_size() == HOSTS.count(here)
    if c.local_rank() == 0:
        assert c.cross_rank() == here
    assert c.is_homogeneous() == (len({HOSTS.count(host) for host in HOSTS}) == 1)


def test_a_long_transfer_between_hosts_is_no_deadlock():
    for _ in range(2):
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


def slowly(move, seconds, over=lambda: False):
    """The same, with a pause at its end that the others wait in as well: until ``over()``."""

    def moved(self, call, *arguments):
        result = yield from move(self, call, *arguments)
        began = time.monotonic()
        while time.monotonic() < began + seconds and not over():
            yield call
        return result

    return moved


@pytest.mark.parametrize(
    "call",
    [
        lambda: c.broadcast(np.ones(300_000), 0),
        lambda: c.gather(np.ones(100_000), root=0),
        lambda: c.comm.allreduce(b"x" * 500_000),
        lambda: c.comm.allreduce(1),
    ],
    ids=["broadcast", "gather", "an object", "a number"],
)
def test_a_rank_that_has_done_its_part_and_left_is_not_missed(monkeypatch, call):
    """Every rank has arrived; one host's data comes when the others have left the cell already."""

    if HOSTS[c.rank()] == HOSTS[-1]:
        for name in ("gather", "broadcast"):
            monkeypatch.setattr(HostLeaders, name, slowly(getattr(HostLeaders, name), 0.5))
        exchanged, ends = HostLeaders.exchanged, []

        def exchanged_late(self):
            """From half a second on after it was true."""
            if exchanged(self):
                ends.append(time.monotonic() + 0.5)
            return bool(ends) and time.monotonic() > ends[0]

        monkeypatch.setattr(HostLeaders, "exchanged", exchanged_late)
    assert in_a_cell(call) is None
    monkeypatch.undo()
    next_cell_works()


def test_a_late_rank_of_another_host_is_told_of_with_its_line(monkeypatch, tmp_path):
    found: list[str] = []
    monkeypatch.setattr(c.world.current(), "late_seconds", 2.0)
    flag = c.broadcast_object(str(tmp_path / "told"))

    def notice(text):
        # The first ones may come before all other ranks, or before the line.
        waited = re.search(rf"has waited \d+ s for rank {c.size() - 1}\b", text)
        if waited and "time.sleep(0.01)  # the line to be found" in text:
            found.append(text)
            Path(flag).touch()

    c.on_notice(notice)

    def late():
        end = time.monotonic() + PATIENCE_SECONDS
        while c.rank() == c.size() - 1 and not os.path.exists(flag) and time.monotonic() < end:
            time.sleep(0.01)  # the line to be found
        c.allreduce(np.ones(3))

    assert in_a_cell(late) is None
    assert bool(found) == (c.rank() == 0)


def test_data_that_does_not_move_is_told_of(monkeypatch, tmp_path):
    told: list[str] = []
    found: list[str] = []
    monkeypatch.setattr(c.world.current(), "late_seconds", 1.0)
    flag = c.broadcast_object(str(tmp_path / "told"))

    def notice(text):
        # The first ones may come before the other ranks.
        told.append(text)
        waits = f"rank {c.size() - 1} waits in allreduce(Sum) at "
        if "has moved no data for" in text and waits in text:
            found.append(text)
            Path(flag).touch()

    c.on_notice(notice)
    for name in ("gather", "reduce"):
        late = slowly(getattr(HostLeaders, name), PATIENCE_SECONDS, lambda: os.path.exists(flag))
        monkeypatch.setattr(HostLeaders, name, late)
    assert in_a_cell(lambda: c.allreduce(np.ones(60_000), c.Sum)) is None
    assert bool(found) == (c.rank() == 0), told


def test_ranks_of_other_hosts_that_wait_are_named_with_their_line():
    def fails():
        if c.rank() == 0:
            time.sleep(5)  # A busy machine takes seconds to send the lines to the other hosts.
            raise ValueError("bad batch")
        c.allreduce(np.ones(3))

    error = in_a_cell(fails)
    next_cell_works()  # First: a rank that fails here would leave the others waiting in it.
    if c.rank():
        assert isinstance(error, RankLeft)
        others = "rank 1" if c.size() == 2 else f"ranks 1–{c.size() - 1}"
        assert f"{others} at " in str(error)


@pytest.mark.parametrize("count", [1, 200_000])
def test_ranks_that_are_not_the_first_of_a_host_send_nothing(monkeypatch, count):
    """Where what they bring is little, or becomes less on the way."""

    def flat(*_):
        raise AssertionError("data goes from each rank to each")

    monkeypatch.setattr(MpiTransport, "comm", flat)
    size, rank = c.size(), c.rank()
    mine = np.arange(size * count, dtype="int32") + rank
    cut = slice(rank * count, (rank + 1) * count)
    total = size * np.arange(size * count) + sum(range(size))
    assert (c.allreduce(mine, c.Sum) == total).all()
    assert (c.reducescatter(mine, c.Sum) == total[cut]).all()
    assert len(c.allgather(mine)) == size * mine.size
    assert (c.broadcast(mine, 0) == mine - rank).all()
    assert {record.transport for record in c.records()[-4:]} == {"hosts"}
    if count == 1:
        assert (c.alltoall(mine) == rank + np.arange(size)).all()
        gathered = c.gather(mine, root=size - 1)
        assert gathered is None or len(gathered) == size * size


@pytest.mark.parametrize("op", [c.Sum, c.Average], ids=lambda op: op.name)
def test_a_small_array_passes_few_functions(op):
    """Each costs as much as a part of the message between two hosts takes."""
    array = np.ones(3, np.float32)
    way = [name for _, name in shortest_way(lambda: c.allreduce(array, op), 200)]
    if c.local_rank():
        assert len(way) <= 16, way
    elif len(set(HOSTS)) == 2:
        assert len(way) <= 34, way  # three for each further look at the message


def test_each_leader_sends_an_agreement_and_small_data_in_one_message(monkeypatch):
    """To each other host, or, of many hosts, to as many as the logarithm of their number."""
    leaders = c.world.current().groups[0].agreement.leaders
    if c.local_rank() == 0:
        counted = Counting(leaders.comm)
        monkeypatch.setattr(leaders, "comm", counted)
    for _ in range(5):
        c.allreduce(np.ones(1000, np.float32), c.Sum)
    if c.local_rank() == 0:
        each = len(spread(len(set(HOSTS))))
        assert counted.posted == {"Isend": 5 * each, "Irecv": 5 * each}


class Counting:
    """A communicator that counts what is posted."""

    def __init__(self, comm):
        self.comm, self.posted = comm, Counter()

    def __getattr__(self, name):
        self.posted[name] += 1
        return getattr(self.comm, name)


def test_records_are_on_one_clock():
    c.barrier()
    c.allreduce(np.ones(4), name="clock")
    record = c.records()[-1]
    # Ranks of a machine that has much to do end a call at quite different times.
    assert abs(max(c.allgather_object(record.ended)) - record.ended) < 30
