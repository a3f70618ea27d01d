"""mpi4py's own calls on `comm` and on what is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import in_a_cell, next_cell_works, odd
from mpi4py import MPI

import allranks.collectives as c
from allranks.errors import CollectiveMismatch, RankLeft, StaleHandle, UsageError

RANKS = range(c.size())


def made() -> dict[str, MPI.Intracomm]:
    comm = c.comm
    return {"world": comm, "dup": comm.Dup(), "split": comm.Split(c.rank() % 2, -c.rank())}


@pytest.fixture(params=["world", "dup", "split"])
def comm(request):
    return made()[request.param]


def test_buffers_are_reduced(comm):
    n = comm.Get_size()
    total, part = np.empty(3), np.empty(1)
    comm.Allreduce(np.full(3, 2.0), total)
    assert (total == 2 * n).all()
    comm.Reduce_scatter_block(np.ones(n), part)
    assert part[0] == n
    comm.Scan(np.ones(1), part)
    assert part[0] == comm.Get_rank() + 1
    comm.Reduce(np.ones(1), part if comm.Get_rank() == 0 else None, MPI.SUM, 0)
    comm.Barrier()


def test_buffers_move(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    every, mine = np.empty(n, "i"), np.array([me], "i")
    comm.Allgather(mine, every)
    assert list(every) == list(range(n))
    comm.Gather(mine, every if me == 0 else None)
    comm.Scatter(every[::-1].copy() if me == 0 else None, mine)
    assert mine[0] == n - 1 - me
    comm.Bcast(mine, n - 1)
    assert mine[0] == 0
    comm.Alltoall(np.arange(n, dtype="i") + 10 * me, every)
    assert list(every) == [10 * r + me for r in range(n)]
    comm.Allgatherv(np.full(me, me, "i"), (np.empty(n * (n - 1) // 2, "i"), list(range(n))))


def test_objects_move(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    assert comm.bcast(me, n - 1) == n - 1
    assert comm.allgather(me) == list(range(n))
    assert comm.gather(me, 0) == (list(range(n)) if me == 0 else None)
    assert comm.scatter([r * r for r in range(n)] if me == 0 else None) == me * me
    assert comm.alltoall([(me, r) for r in range(n)]) == [(r, me) for r in range(n)]
    assert comm.allreduce(me) == n * (n - 1) // 2
    assert comm.allreduce(me, MPI.MAX) == n - 1
    assert comm.reduce(me, root=0) == (n * (n - 1) // 2 if me == 0 else None)
    assert comm.scan(1) == me + 1
    assert comm.exscan(1) == (me or None)
    comm.barrier()


@pytest.mark.parametrize("count", [1, 300_000])
def test_messages_go_around(comm, count):
    n, me = comm.Get_size(), comm.Get_rank()
    if n > 1:
        after, before = (me + 1) % n, (me - 1) % n
        got = np.empty(count)
        comm.Sendrecv(np.full(count, float(me)), after, 3, got, before, 3)
        assert (got == before).all()
        assert comm.sendrecv([me] * count, after, source=before) == [before] * count
        if me == 0:
            comm.send("object", 1)
            comm.Send(np.ones(count), 1)
        elif me == 1:
            status = MPI.Status()
            comm.probe(0, status=status)
            assert comm.recv(source=MPI.ANY_SOURCE) == "object"
            comm.Recv(got, 0)
            assert (got == 1).all()


def test_a_split_is_ordered_by_key():
    part = c.comm.Split(0, -c.rank())
    assert part.Get_rank() == c.size() - 1 - c.rank()
    assert part.allgather(c.rank()) == list(reversed(RANKS))


def test_a_rank_without_colour_gets_the_null_communicator():
    part = c.comm.Split(MPI.UNDEFINED if c.rank() == 0 else 1)
    assert (part == MPI.COMM_NULL) == (c.rank() == 0)
    if c.rank():
        assert part.allreduce(1) == c.size() - 1


two = pytest.mark.skipif(c.size() < 2, reason="a mistake takes two ranks")


@two
def test_a_split_that_not_all_call_raises():
    error = in_a_cell(lambda: None if odd() else c.comm.Split(0))
    assert isinstance(error, type(None) if odd() else RankLeft)
    next_cell_works()


@two
def test_a_root_that_differs_in_a_duplicate_is_named():
    def differ():
        c.comm.Dup().bcast(1, root=int(odd()))

    assert isinstance(in_a_cell(differ), CollectiveMismatch)
    next_cell_works()


@two
def test_a_split_ends_with_its_epoch():
    part = c.comm.Split(0)
    in_a_cell(lambda: None if odd() else c.barrier())
    with pytest.raises(StaleHandle, match="Call Split"):
        part.barrier()


@pytest.mark.parametrize("root", [-1, 99])
@pytest.mark.parametrize("op", ["bcast", "gather", "scatter", "reduce", "Bcast", "Reduce"])
def test_a_root_that_is_no_rank_says_which_there_are(comm, op, root):
    x = np.ones(2)
    arguments = {"Reduce": (x, np.empty(2)), "scatter": ([1] * comm.Get_size(),)}.get(op, (x,))
    with pytest.raises(UsageError, match=rf"comm.{op} needs a root .* found root={root}"):
        getattr(comm, op)(*arguments, root=root)
    comm.barrier()


def test_a_communicator_goes_by_one_name():
    from allranks.collectives import comm

    assert comm is c.comm
    assert comm.Get_size() == c.size()


def test_a_communicators_ranks_are_a_process_set():
    """Those of one communicator, or of each rank's own, as Split makes them."""
    plain = MPI.COMM_WORLD.Split(c.rank() % 2)
    both = [c.ProcessSet(plain)] if c.size() > 1 else []
    c.init(process_sets=both)
    for half in both:
        assert half.ranks == list(range(c.rank() % 2, c.size(), 2))
        assert c.allreduce(1, c.Sum, process_set=half) == half.size()
        assert half.mpi_comm is plain
        numbers = c.allgather_object((half.process_set_id, half.ranks))
        assert numbers == [numbers[r % 2] for r in RANKS]
        for number, ranks in sorted(dict(numbers).items()):
            gone = c.ProcessSet(ranks)
            gone.process_set_id = number
            assert c.remove_process_set(gone)


def test_a_further_init_registers_its_process_sets():
    first, again = c.ProcessSet([0]), c.ProcessSet([0])
    if c.size() == 1:
        with pytest.raises(ValueError, match="entry number 0, rank 0, is a duplicate"):
            c.init(process_sets=[first])
        return
    c.init(process_sets=[first])
    assert repr(first).endswith(f"_id={first.process_set_id}, ranks=[0], mpi_comm=None)")
    c.init(process_sets=[again])
    assert again.process_set_id == first.process_set_id
    with pytest.raises(ValueError, match="process set"):
        c.add_process_set([0])
    with pytest.raises(ValueError, match="entry number 1, rank 0, is a duplicate"):
        c.init(process_sets=[[0], [0]])
    assert c.remove_process_set(first)


def test_the_global_process_set_says_its_ranks():
    assert str(c.global_process_set) == (
        f"ProcessSet(process_set_id=0, ranks={list(RANKS)}, mpi_comm=None)"
    )
