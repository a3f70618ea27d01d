from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import world as worlds
from allranks.collectives.transports import loopback
from allranks.errors import CollectiveMismatch, NotInitialized, RankLeft, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.fixture(params=[1, 2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_every_rank_is_one_thread(size):
    assert loopback.run(size, lambda: (c.rank(), c.size())) == [(r, size) for r in range(size)]


@pytest.mark.parametrize("count", [0, 1, 1000, 70_000, 600_000])
def test_allreduce_sums(size, count):
    found = loopback.run(size, lambda: c.allreduce(np.full(count, c.rank() + 1), c.Sum))
    assert all((one == size * (size + 1) // 2).all() and one.shape == (count,) for one in found)


def test_allgather_joins_uneven_rows(size):
    found = loopback.run(size, lambda: c.allgather(np.full((c.rank(), 2), c.rank())))
    wanted = np.concatenate([np.full((r, 2), r) for r in range(size)])
    assert all((one == wanted).all() for one in found)


def test_alltoall_transposes(size):
    found = loopback.run(size, lambda: list(c.alltoall(np.arange(size) + 10 * c.rank())))
    assert found == [[10 * r + me for r in range(size)] for me in range(size)]


def test_a_process_set_has_a_world_of_its_own():
    def odd_sum() -> int | None:
        odds = c.add_process_set([1, 3])
        return c.allreduce(c.rank(), c.Sum, process_set=odds) if odds.included() else None

    assert loopback.run(4, odd_sum) == [None, 4, None, 4]


def test_a_mismatch_reads_in_three_beats():
    def differ() -> None:
        c.allreduce(np.ones((4, 3) if c.rank() == 2 else (4, 2)))

    with pytest.raises(CollectiveMismatch) as caught:
        loopback.run(4, differ)
    first, *lines = str(caught.value).splitlines()
    assert first == (
        "allreduce(Average) needs the same shape on every rank: rank 2 has (4, 3), "
        "ranks 0–1, 3 have (4, 2). Check the last batch, or drop the remainder."
    )
    assert len(lines) == 1
    assert lines[0].startswith("  ranks 0–3 at ")
    assert lines[0].endswith(": c.allreduce(np.ones((4, 3) if c.rank() == 2 else (4, 2)))")


def test_a_rank_that_raised_comes_before_those_that_waited():
    def one_fails() -> None:
        if c.rank() == 1:
            raise ValueError("bad batch")
        c.barrier()

    with pytest.raises(ValueError, match="bad batch"):
        loopback.run(3, one_fails)


def test_those_that_waited_hear_who_left_and_why():
    heard: list[str] = []

    def one_fails() -> None:
        if c.rank() == 1:
            raise ValueError("bad batch")
        try:
            c.barrier()
        except RankLeft as error:
            heard.append(str(error))

    with pytest.raises(ValueError, match="bad batch"):
        loopback.run(3, one_fails)
    assert len(heard) == 2
    assert "rank 1 has left the program at " in heard[0]
    assert "(raised ValueError: bad batch)" in heard[0]


def test_a_notice_names_the_late_rank_once():
    told: list[str] = []

    def one_sleeps() -> None:
        c.on_notice(told.append)
        worlds.current().late_seconds = 0.2
        deadline = time.monotonic() + 20
        while c.rank() == 1 and not told and time.monotonic() < deadline:
            time.sleep(0.01)
        c.barrier()

    loopback.run(3, one_sleeps)
    assert len(told) == 1
    assert "has waited 0 s for rank 1" in told[0]


def test_what_a_rank_waits_for_can_be_asked_from_outside():
    seen: list[str] = []
    waiting: list[worlds.World] = []

    def one_looks() -> None:
        if c.rank() == 0:
            waiting.append(worlds.current())
        else:
            deadline = time.monotonic() + 20
            while not (waiting and waiting[0].doing) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(waiting[0].doing)
        c.barrier()

    loopback.run(2, one_looks)
    assert seen == ["waiting in barrier for rank 1"]


def test_queries_before_init_say_what_to_call():
    with pytest.raises(NotInitialized, match=r"Call allranks\.collectives\.init\(\)"):
        c.rank()


def test_importing_collectives_imports_no_mpi():
    code = (
        "import sys, allranks.collectives; "
        "print([m for m in ('mpi4py', 'torch', 'tensorflow', 'cupy', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_that_no_launcher_has_started_leaves_nothing_in_shared_memory():
    code = (
        "import allranks.collectives as c\nc.init()\n"
        "from allranks.collectives.host.memory import of_open_mpi\nprint(*of_open_mpi())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [path for path in done.stdout.split() if Path(path).exists()] == []


def test_ranks_are_spelled_alike_in_every_refusal():
    def refused():
        said = []
        for mistake in (lambda: c.broadcast(1, root=7), lambda: c.add_process_set([0, 1, 2])):
            with pytest.raises(UsageError) as error:
                mistake()
            said.append(str(error.value))
        return said

    for root, taken in loopback.run(3, refused):
        assert "found 7, and it has ranks 0–2." in root
        assert "found ranks 0–2, which process set 0 has." in taken
