"""A world within the world: neighbours that are all the ranks there are, and wait for no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives.start import under_mpi
from allranks.collectives.world.world import World
from allranks.errors import RankLeft

SIZE, RANK = c.size(), c.rank()
_worlds: dict[int, World] = {}
_number = 0


@pytest.fixture(params=[each for each in (1, 2, 3, 4) if SIZE % each == 0])
def each(request: pytest.FixtureRequest) -> int:
    """How many ranks a part has."""
    return int(request.param)


def in_part(each: int, body: Callable[[], Any]) -> Any:
    """Runs a cell in this rank's part, as an engine does; returns its value or what it raised."""
    global _number
    if each not in _worlds:
        _worlds[each] = under_mpi.divide(each)
    _number += 1
    with under_mpi.inside(_worlds[each]):
        c.scope.enter("this member", None, _number)
        value: Any
        try:
            value = body()
        except Exception as error:
            value = error
        c.scope.leave("it ended", failed=isinstance(value, Exception))
    return value


def test_a_part_has_ranks_and_a_communicator_of_its_own(each):
    def body():
        comm = c.comm
        return c.rank(), c.size(), comm.Get_rank(), comm.allgather(RANK)

    first = RANK // each * each
    mine = list(range(first, first + each))
    assert in_part(each, body) == (RANK - first, each, RANK - first, mine)
    assert (c.rank(), c.size()) == (RANK, SIZE)


def test_collectives_are_over_the_part(each):
    first = RANK // each * each

    def body():
        total = c.allreduce(np.full(4, float(RANK)), op=c.Sum)
        rows = c.allgather(np.array([RANK]))
        return total.tolist(), rows.tolist(), int(c.broadcast(np.array(RANK), each - 1))

    mine = list(range(first, first + each))
    assert in_part(each, body) == ([float(sum(mine))] * 4, mine, mine[-1])


def test_parts_wait_for_no_other_part(tmp_path):
    folder = Path(c.broadcast_object(str(tmp_path), 0))

    def passed():
        return len(list(folder.glob("passed*")))

    def body():
        # The first one comes when all others have gone through theirs.
        deadline = time.monotonic() + 30
        while RANK == 0 and passed() < SIZE - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = passed()
        c.barrier()
        (folder / f"passed{RANK}").touch()
        return found

    found = in_part(1, body)
    assert RANK or found == SIZE - 1
    c.barrier()


def test_process_sets_of_a_part_end_with_its_cell(each):
    if each == 1:
        pytest.skip("a part of one rank has no other set than itself")

    def body():
        half = c.add_process_set([0])
        return c.allreduce(1.0, op=c.Sum, process_set=half) if c.rank() == 0 else 1.0

    assert in_part(each, body) == 1.0
    assert in_part(each, body) == 1.0


def test_a_rank_that_fails_strands_its_part_alone_and_a_new_epoch_mends_it():
    if SIZE != 4:
        pytest.skip("needs 4 ranks: two parts of two")

    def body():
        if RANK == 1:
            raise ValueError("no")
        return c.allreduce(np.ones(3), op=c.Sum).tolist()

    found = in_part(2, body)
    if RANK < 2:
        assert isinstance(found, ValueError if RANK else RankLeft)
        with under_mpi.inside(_worlds[2]):
            c.renew()
    else:
        assert found == [2.0] * 3
    assert in_part(2, lambda: float(c.allreduce(1.0, op=c.Sum))) == 2.0
    assert float(c.allreduce(1.0, op=c.Sum)) == 4.0
