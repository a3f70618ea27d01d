"""mpi4py's own calls on `comm` and on what is made of it."""

from __future__ import annotations

import gc
import pickle
import re
import threading
import weakref
from concurrent.futures import BrokenExecutor
from inspect import signature

import numpy as np
import psutil
import pytest
from conftest import ODD, in_a_cell, next_cell_works, odd
from mpi4py import MPI
from mpi4py.futures import MPIPoolExecutor
from mpi4py.futures import _core as core

import allranks.collectives as c
from allranks.collectives import world
from allranks.collectives.calls.call import nbytes_of
from allranks.collectives.ops.bounds import mistake
from allranks.collectives.ops.communicator import File, Win, check_pools
from allranks.collectives.ops.point_to_point import Op, Request
from allranks.errors import CollectiveMismatch, RankLeft, StaleHandle, UsageError

RANKS = range(c.size())
X = np.ones(1)
Z = np.zeros(12)
two = pytest.mark.skipif(c.size() < 2, reason="a mistake takes two ranks")

MADE = {
    "world": lambda: c.comm,
    "dup": lambda: c.comm.Dup(),
    "split": lambda: c.comm.Split(c.rank() % 2, -c.rank()),
    "host": lambda: c.comm.Split_type(MPI.COMM_TYPE_SHARED),
    "group": lambda: c.comm.Create(c.comm.Get_group()),
    "grid": lambda: c.comm.Create_cart([c.size()], [True]),
}


@pytest.fixture(params=MADE)
def comm(request):
    return MADE[request.param]()


def defaults(method):
    return [one.default for one in signature(method).parameters.values()]


def test_what_a_call_leaves_out_is_what_mpi4py_takes():
    ours = [cls for cls in type(c.comm).__mro__ if not cls.__module__.startswith("mpi4py")]
    names = {name for cls in ours for name in vars(cls) if name[0] != "_"}
    names &= {*dir(MPI.Intracomm)} - {"Spawn", "Spawn_multiple"}  # which are refused
    assert {"Ssend", "recv", "Sendrecv", "Ireduce"} <= names
    wanted = {name: defaults(getattr(MPI.Intracomm, name)) for name in names}
    assert {name: defaults(getattr(type(c.comm), name)) for name in names} == wanted


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


SUMS = {
    "Allreduce": lambda me, n: n * (n + 1) / 2,
    "Scan": lambda me, n: (me + 1) * (me + 2) / 2,
    "Exscan": lambda me, n: me * (me + 1) / 2 or 1.0,
    "Reduce": lambda me, n: 1.0 + me if me else n * (n + 1) / 2,
}


@pytest.mark.parametrize("form", ["{}", "I{}", "{}_init"])
@pytest.mark.parametrize("op", SUMS)
def test_equal_buffers_mean_in_place_as_from_mpi4py_4_2_on(comm, op, form):
    if (op, form) == ("Allreduce", "I{}"):
        pytest.skip("nothing compares it with other ranks")
    name = form.format(op if form != "I{}" else op.lower())
    me, mine = comm.Get_rank(), np.full(20000, comm.Get_rank() + 1.0)
    received = [mine, [mine.view(), MPI.DOUBLE], mine[:]][me % 3]
    request = getattr(comm, name)(mine, received)
    if form == "{}_init":
        request.Start()
    if request is not None:
        request.Wait()
    assert set(mine) == {SUMS[op](me, comm.Get_size())}


def test_equal_buffers_of_a_reduction_with_counts_mean_in_place(comm):
    n = comm.Get_size()
    mine = np.arange(2.0 * n)
    comm.Reduce_scatter(mine, mine, [2] * n)
    first = 2 * comm.Get_rank()
    assert comm.Get_rank() or list(mine[:2]) == [n * first, n * (first + 1)]


def test_buffers_that_begin_alike_and_differ_in_length_are_no_equal_ones():
    with pytest.raises(ValueError, match="mismatch in send count"):
        c.world.current().mpi.alone.Allreduce(np.ones(2), np.ones(4)[:1])
    x = np.ones(4)
    with pytest.raises(ValueError, match="mismatch in send count"):
        c.world.current().mpi.alone.Allreduce(x, x[:2])
    c.renew()


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


def test_an_argument_that_mpi4py_refuses_on_every_rank_leaves_the_epoch_whole(comm):
    n = comm.Get_size()
    with pytest.raises(TypeError, match="expecting buffer"):
        comm.Bcast("a string")
    with pytest.raises(BufferError, match="not writable"):
        comm.Allreduce(np.ones(1), bytes(8))
    with pytest.raises(KeyError, match="cannot map"):
        comm.Allgather([np.ones(1), "no type"], np.empty(n))
    with pytest.raises(ValueError, match="mismatch"):
        comm.Allreduce(np.ones(1), np.ones(2))
    assert comm.allreduce(1) == n


@two
def test_an_argument_that_mpi4py_refuses_on_one_rank_is_named_to_the_others():
    error = in_a_cell(lambda: c.comm.Allreduce(np.ones(1), "text" if odd() else np.empty(1)))
    assert type(error) is (TypeError if odd() else RankLeft)
    assert odd() or "rank 1 has left this cell at cell:1 (TypeError" in str(error)
    next_cell_works()


CREATE = MPI.MODE_CREATE | MPI.MODE_RDWR
#: Calls that make or use an object of all ranks; ``wrong`` is an argument that cannot be passed.
MADE_TOGETHER = {
    "Win.Create": lambda comm, file, wrong: Win.Create(wrong or X, comm=comm),
    "Win.Create read-only": lambda comm, file, wrong: Win.Create(
        bytes(8) if wrong else X, comm=comm
    ),
    "Win.Create without a unit": lambda comm, file, wrong: Win.Create(
        X, 0 if wrong else 8, MPI.INFO_NULL, comm
    ),
    "Win.Allocate": lambda comm, file, wrong: Win.Allocate(-1 if wrong else 8, comm=comm),
    "Win.Allocate_shared": lambda comm, file, wrong: Win.Allocate_shared(wrong or 8, comm=comm),
    "Win.Create_dynamic": lambda comm, file, wrong: Win.Create_dynamic(
        wrong or MPI.INFO_NULL, comm
    ),
    "File.Open": lambda comm, file, wrong: File.Open(comm, 5 if wrong else file, CREATE),
    "File.Open of no mode": lambda comm, file, wrong: File.Open(comm, file, 0 if wrong else CREATE),
    "File.Open of none": lambda comm, file, wrong: File.Open(
        comm, "/missing/file" if wrong else file, amode=CREATE
    ),
    "File.Open of none to read": lambda comm, file, wrong: File.Open(
        comm, "/missing" if wrong else __file__
    ),
    "Fence": lambda comm, file, wrong: Win.Allocate(8, comm=comm).Fence(wrong or 0),
    "Read_all": lambda comm, file, wrong: File.Open(comm, __file__).Read_all(wrong or np.zeros(1)),
    "Write_at_all": lambda comm, file, wrong: File.Open(comm, file, CREATE).Write_at_all(
        wrong or 0, X
    ),
    "Set_view": lambda comm, file, wrong: File.Open(comm, file, CREATE).Set_view(0, wrong),
    "Split": lambda comm, file, wrong: comm.Split(0, wrong or 0),
    "Create": lambda comm, file, wrong: comm.Create(wrong or comm.group),
    "Create of nothing": lambda comm, file, wrong: comm.Create(
        MPI.GROUP_NULL if wrong else comm.group
    ),
    "Create_dist_graph": lambda comm, file, wrong: comm.Create_dist_graph([0], [1], [wrong or 0]),
    "Create_intercomm": lambda comm, file, wrong: comm.Split(c.rank() % 2).Create_intercomm(
        wrong or 0, comm, 1 - c.rank() % 2
    ),
}
ON_ALL = (TypeError, BufferError, ValueError, LookupError, MPI.Exception)


@two
@pytest.mark.parametrize("how", MADE_TOGETHER)
def test_what_one_rank_cannot_make_no_rank_waits_for(how, tmp_path_factory):
    file = c.comm.bcast(str(tmp_path_factory.mktemp("files") / "shared"))
    make = MADE_TOGETHER[how]
    error = in_a_cell(lambda: make(c.comm, file, "wrong" if odd() or how == "Set_view" else None))
    if how == "Set_view" or odd():  # refused on every rank
        assert isinstance(error, ON_ALL)
    else:
        assert isinstance(error, RankLeft)
        assert "rank 1 has left this cell at cell:1" in str(error)
    next_cell_works()


@two
@pytest.mark.parametrize("how", MADE_TOGETHER)
def test_what_no_rank_can_make_leaves_the_epoch_whole(how, tmp_path_factory):
    file = c.comm.bcast(str(tmp_path_factory.mktemp("files") / "shared"))
    with pytest.raises(ON_ALL):
        MADE_TOGETHER[how](c.comm, file, "wrong")
    assert c.comm.allreduce(1) == c.size()
    assert not c.dirty()


def test_a_file_is_opened_by_one_name_and_in_one_mode(tmp_path_factory):
    file = c.comm.bcast(str(tmp_path_factory.mktemp("files") / "shared"))
    first = c.rank() == 0
    if c.size() > 1:
        with pytest.raises(CollectiveMismatch, match=r"File\.Open"):
            File.Open(c.comm, file, CREATE if first else MPI.MODE_CREATE | MPI.MODE_WRONLY)
        with pytest.raises(CollectiveMismatch, match=r"File\.Open"):
            File.Open(c.comm, file + str(c.rank()), CREATE)
    opened = File.Open(c.comm, file, CREATE)
    opened.Write_at_all(8 * c.rank(), X)
    opened.Close()


def _ones():
    return np.ones(c.size() * 2)


REFUSED = {
    "Reduce": lambda comm: comm.Reduce(
        np.ones(2, "i8"), _ones() if odd() else _ones()[:2], root=ODD
    ),
    "Gather": lambda comm: comm.Gather(np.ones(2), "text" if odd() else None, root=ODD),
    "Gatherv": lambda comm: comm.Gatherv(np.ones(2), [_ones(), [9]] if odd() else None, root=ODD),
    "Scatter": lambda comm: comm.Scatter(
        _ones(), np.frombuffer(bytes(16)) if odd() else np.ones(2)
    ),
}
GIVEN = {
    "Reduce": lambda comm: comm.Reduce(X, np.zeros(1), root=ODD),
    "Barrier": lambda comm: comm.Barrier(),
    "Dup": lambda comm: comm.Dup(),
    "Win.Create": lambda comm: Win.Create(X, comm=comm),
}


@two
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("refused", REFUSED)
def test_a_call_that_one_rank_refuses_does_not_mix_with_the_next(refused, given):
    comm = c.comm.Dup()

    def both():
        try:
            REFUSED[refused](comm)
        except (TypeError, ValueError, BufferError):
            assert odd()
        GIVEN[given](comm)

    error = in_a_cell(both)
    # MPI may send the parts of a Reduce through the rank that refuses: then the others wait for it.
    through = (RankLeft,) if refused == "Reduce" and c.size() > 2 else ()
    assert isinstance(error, (CollectiveMismatch, *through))
    if isinstance(error, CollectiveMismatch):
        assert "needs the same earlier calls on every rank" in str(error)
        assert "rank 1 has refused 1" in str(error)
    c.renew()  # as the next cell would
    total = np.zeros(1)
    c.comm.Reduce(X, total, root=ODD)
    assert total[0] == (c.size() if odd() else 0)


@two
@pytest.mark.parametrize("given", ["Ireduce", "Reduce"])
def test_a_call_without_a_wait_that_one_rank_refuses_ends_the_epoch(given):
    total = np.zeros(1)

    def both():
        try:
            c.comm.Igather(X, "text" if odd() else None, root=ODD)
        except TypeError:
            assert odd()
        getattr(c.comm, given)(X, total, root=ODD)

    error = in_a_cell(both)
    assert total[0] == 0
    if odd():
        assert "needs an intact epoch" in str(error)
    elif given == "Reduce":
        assert isinstance(error, RankLeft)
    next_cell_works()


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


NOWHERE = MPI.PROC_NULL
SHORT = {
    "Recv": lambda comm, into: comm.Recv(into, 0),
    "Recv with a type": lambda comm, into: comm.Recv([into, 5, MPI.DOUBLE], 0),
    "Recv of bytes": lambda comm, into: comm.Recv(memoryview(into).cast("B"), 0),
    "Sendrecv": lambda comm, into: comm.Sendrecv(X, NOWHERE, 0, into, 0),
    "Sendrecv_replace": lambda comm, into: comm.Sendrecv_replace([into, "d"], NOWHERE, 0, 0),
    "Mprobe": lambda comm, into: comm.Mprobe(0).Recv(into),
    "Improbe": lambda comm, into: _found(comm.Improbe, 0).Recv(into),
}


def _found(probe, source):
    while (message := probe(source)) is None:
        pass
    return message


@two
@pytest.mark.parametrize("count", [100, 300_000])
@pytest.mark.parametrize("how", SHORT)
def test_a_message_that_is_longer_than_its_buffer_writes_nothing(how, count):
    whole = np.zeros(count)
    if c.rank() == 0:
        for value in (1, 2):
            c.comm.Send(np.full(count, float(value)), 1)
    elif c.rank() == 1:
        sizes = f"rank 0 has sent {8 * count:,} bytes .*, and the buffer has 40"
        with pytest.raises(UsageError, match=sizes) as raised:
            SHORT[how](c.comm, whole[:5])
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
        assert not whole.any()
        c.comm.Recv(whole, 0)
        assert (whole == 2).all()


def _until(test, *requests):
    while not (found := test(*requests)) or found == (MPI.UNDEFINED, False):
        pass
    return found


ENDED = {
    "Wait": lambda request: request.Wait(),
    "Waitall": lambda request: Request.Waitall([Request(), request]),
    "Waitany": lambda request: Request.Waitany([request]),
    "Waitsome": lambda request: Request.Waitsome([request], []),
    "Test": lambda request: _until(request.Test),
    "Testall": lambda request: _until(Request.Testall, [request]),
    "Testany": lambda request: _until(Request.Testany, [request]),
    "Testsome": lambda request: _until(Request.Testsome, [request]),
    "wait": lambda request: request.wait(MPI.Status()),
    "waitany": lambda request: Request.waitany([request]),
}


def _started(request):
    request.Start()
    return request


TWO_OF_THREE = MPI.DOUBLE.Create_vector(1, 2, 3).Create_resized(0, 24).Commit()
POSTED = {
    "Irecv": lambda comm, into: comm.Irecv(into, 0),
    "Irecv by name": lambda comm, into: comm.Irecv(source=0, buf=into),
    "Irecv of bytes": lambda comm, into: comm.Irecv(memoryview(into).cast("B"), 0),
    "Irecv with a count": lambda comm, into: comm.Irecv([into[:3], 5, MPI.DOUBLE], 0),
    "Irecv of a part": lambda comm, into: comm.Irecv([into.base, (5, 0), "d"], 0),
    "Isendrecv": lambda comm, into: comm.Isendrecv(X, NOWHERE, 0, into, 0),
    "Isendrecv_replace": lambda comm, into: comm.Isendrecv_replace([into, "d"], NOWHERE, 0, 0),
    "Recv_init": lambda comm, into: _started(comm.Recv_init(into, 0)),
}
POSTED_AND_ENDED = [
    *((how, "Wait") for how in POSTED),
    *(("Irecv", how) for how in ENDED if how != "Wait"),
]
EARLY = "Open MPI" in MPI.Get_library_version()


@two
@pytest.mark.parametrize("count", [100, 300_000])
@pytest.mark.parametrize(("how", "ends"), POSTED_AND_ENDED)
def test_a_longer_message_than_a_posted_buffer_writes_nothing_behind_it(how, ends, count):
    whole = np.zeros(count)
    if c.rank() == 0:
        for value in (1, 2):
            c.comm.Send(np.full(count, float(value)), 1)
    elif c.rank() == 1:
        request = POSTED[how](c.comm, whole[:5])
        with pytest.raises(MPI.Exception) as raised:
            ENDED[ends](request)
        if EARLY:
            assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
            sizes = f"rank 0 has sent {8 * count:,} bytes (tag 0), and the buffer has 40"
            assert sizes in str(raised.value)
        assert not whole[5:].any()
        c.comm.Recv(whole, 0)
        assert (whole == 2).all()


@two
def test_a_longer_message_than_the_gaps_of_a_derived_type_writes_nothing_else():
    whole = np.zeros(60_000)
    if c.rank() == 0:
        c.comm.Send(np.ones(whole.size), 1)
        c.comm.Send(np.full(4, 2.0), 1)
    elif c.rank() == 1:
        with pytest.raises(MPI.Exception):
            c.comm.Irecv([whole[:6], TWO_OF_THREE], 0).Wait()
        assert not whole[[2, *range(5, whole.size)]].any()
        c.comm.Irecv([whole[:6], TWO_OF_THREE], 0).Wait()
        assert list(whole[:7]) == [2, 2, 0, 2, 2, 0, 0]


@two
@pytest.mark.parametrize("count", [10, 100_000])
def test_requests_get_the_messages_in_the_order_in_which_they_were_posted(count):
    if c.rank() == 0:
        for value in range(6):
            c.comm.Send(np.full(count, float(value)), 1, tag=value % 2)
    elif c.rank() == 1:
        parts, about = np.zeros((6, count)), [MPI.Status() for _ in range(6)]
        anyone = MPI.ANY_SOURCE
        requests = [
            c.comm.Irecv(parts[0], anyone, 0),
            c.comm.Irecv(parts[1], 0),
            c.comm.Irecv(parts[2], 0, 0),
        ]
        c.comm.Recv(parts[3], anyone)
        requests += [c.comm.Irecv(parts[4]), c.comm.Irecv(parts[5], 0)]
        requests[4].Wait(about[5])
        requests[3].Wait(about[4])
        left = requests[:3]
        while (at := Request.Waitany(left, about[3])) != MPI.UNDEFINED:
            assert about[3].Get_count(MPI.DOUBLE) == count
            assert about[3].Get_elements(MPI.DOUBLE) == count
            assert left[at] == MPI.REQUEST_NULL
        assert parts.mean(1).tolist() == [0, 1, 2, 3, 4, 5]
        assert [one.Get_tag() for one in about[4:]] == [0, 1]
    c.comm.Barrier()


def test_a_persistent_receive_is_started_again(comm):
    me, got, status = comm.Get_rank(), np.zeros(5), MPI.Status()
    request = comm.Recv_init(got, me, 3)
    for count in (5, 2, 0):
        request.Start()
        comm.Send(np.full(count, float(count)), me, 3)
        request.Wait(status)
        assert status.Get_count(MPI.DOUBLE) == count
    assert list(got) == [2, 2, 5, 5, 5]
    request.Free()


def test_a_receive_is_cancelled_or_freed(comm):
    me, got, status = comm.Get_rank(), np.zeros((2, 3)), MPI.Status()
    cancelled = comm.Irecv(got[0], me)
    cancelled.Cancel()
    cancelled.Wait(status)
    assert status.Is_cancelled()
    freed = comm.Irecv(got[1], me, 1)
    freed.Free()
    comm.Send(np.ones(3), me, 1)
    last = comm.Irecv(got[0], me, 2)  # messages of one rank arrive in order
    comm.Send(np.ones(3), me, 2)
    last.Wait()
    assert (got == 1).all()


def test_some_of_several_receives_end(comm):
    me, got = comm.Get_rank(), np.zeros((3, 2))
    requests = [comm.Irecv(got[at], me, at) for at in range(3)]
    comm.Send(X, me, 1)
    assert _until(Request.Testsome, requests) == [1]
    about: list[MPI.Status] = []
    for at in (0, 2):
        comm.Send(np.ones(2), me, at)
    Request.Waitall(requests, about)
    assert [one.Get_count(MPI.DOUBLE) for one in about] == [2, 0, 2]
    assert got.tolist() == [[1, 1], [1, 0], [1, 1]]


LONGER = {
    "Gather": lambda comm, part, whole: comm.Gather(part, whole),
    "Gather of a type": lambda comm, part, whole: comm.Gather([part, "d"], [whole, MPI.DOUBLE]),
    "Scatter": lambda comm, part, whole: comm.Scatter(whole, part),
}


@two
@pytest.mark.parametrize("how", LONGER)
def test_a_part_that_is_longer_than_its_room_at_the_root_is_not_sent(how):
    n, count = c.size(), 20_000
    room = np.zeros(4 * n * count)
    whole = room[: n * count] if c.rank() == 0 else None
    part = np.ones(2 * count if odd() else count)
    with pytest.raises(CollectiveMismatch, match="bytes"):
        LONGER[how](c.comm, part, whole)
    assert not room.any()
    assert (part == 1).all()
    LONGER[how](c.comm, part[:count], whole)
    assert room[n * count :].sum() == 0
    assert c.rank() or room.any() == how.startswith("Gather")


BEYOND = {
    "Gatherv": lambda comm, x, room, twos: comm.Gatherv(x, [room, twos]),
    "Gatherv_init": lambda comm, x, room, twos: comm.Gatherv_init(x, [room, 2, MPI.DOUBLE]),
    "displaced": lambda comm, x, room, twos: comm.Gatherv(x, [room, (twos, 40), MPI.DOUBLE]),
    "before": lambda comm, x, room, twos: comm.Allgatherv(x, [room, twos, [-2 for _ in twos], "d"]),
    "Scatterv": lambda comm, x, room, twos: comm.Scatterv((room, np.array(twos)), x),
    "Allgatherv": lambda comm, x, room, twos: comm.Allgatherv(x, (room, twos)),
    "Alltoallv": lambda comm, x, room, twos: comm.Alltoallv((np.tile(x, len(twos)), 2), [room, 2]),
}


@pytest.mark.parametrize("how", BEYOND)
def test_parts_behind_the_end_of_a_buffer_are_not_moved(comm, how):
    n, behind, part = comm.Get_size(), np.zeros(200), np.ones(2)
    room = behind[40 : 40 + 2 * n - 1]
    with pytest.raises(
        (UsageError, CollectiveMismatch), match=r"buffer for all of its parts: foun"
    ):
        BEYOND[how](comm, part, room, [2] * n)
    assert not behind.any()
    assert (part == 1).all()
    comm.Barrier()


def test_parts_behind_the_end_of_a_buffer_are_not_moved_without_a_wait_either():
    behind = np.zeros(100)
    with pytest.raises(MPI.Exception, match=r"Iallgatherv needs a buffer for all of its parts"):
        c.comm.Iallgatherv(X, [behind[: c.size() - 1], [1] * c.size()])
    assert not behind.any()
    c.renew()


@pytest.mark.parametrize("op", ["Allgatherv", "Gatherv"])
def test_a_part_that_is_shorter_than_its_count_is_refused(comm, op):
    """MPI would leave a gap. Without counts, mpi4py divides the buffer equally."""
    whole = np.zeros(2 * comm.Get_size())
    with pytest.raises((UsageError, CollectiveMismatch), match="the same length of a part"):
        getattr(comm, op)(np.ones(1), whole)
    assert not whole.any()
    comm.Barrier()


OVERLAPPING = {
    "Allreduce": lambda comm, x: comm.Allreduce(x[:-1], x[1:]),
    "Scan": lambda comm, x: comm.Scan([x, 3, MPI.DOUBLE], [x[2:], 3, MPI.DOUBLE]),
    "Allgather": lambda comm, x: comm.Allgather(x[-1:], x),
    "Alltoall": lambda comm, x: comm.Alltoall(x[:-1], x[1:]),
    "Allgatherv": lambda comm, x: comm.Allgatherv(x[5 * comm.rank + 1 :][:5], [x[:-1], 5]),
    "Alltoallv": lambda comm, x: comm.Alltoallv([x[:-1], 5], [x[1:], 5]),
    "Alltoallw": lambda comm, x: comm.Alltoallw(
        _of_doubles(comm, x[:-1]), _of_doubles(comm, x[1:])
    ),
    "Ialltoallw": lambda comm, x: comm.Ialltoallw(
        _of_doubles(comm, x[:-1]), _of_doubles(comm, x[1:])
    ),
    "Alltoallv_init": lambda comm, x: comm.Alltoallv_init([x[:-1], 5], [x[1:], 5]),
    "Sendrecv": lambda comm, x: comm.Sendrecv(x[:-1], comm.rank, 0, x[1:], comm.rank, 0),
    "Isendrecv": lambda comm, x: comm.Isendrecv(x[1:], comm.rank, recvbuf=x[:-1], source=comm.rank),
}


def _of_doubles(comm, x):
    n = comm.Get_size()
    return [x, ([5] * n, [40 * rank for rank in range(n)]), [MPI.DOUBLE] * n]


@pytest.mark.parametrize("op", OVERLAPPING)
def test_buffers_that_overlap_are_refused(comm, op):
    if op == "Allgather":  # on the last rank it is the own part
        mine = np.arange(comm.Get_size() + 0.5)
    else:
        mine = np.arange(5.0 * comm.Get_size() + 1)
    with pytest.raises((UsageError, CollectiveMismatch), match="buffers that do not overlap"):
        OVERLAPPING[op](comm, mine)
    assert (mine == range(len(mine))).all()
    if op == "Ialltoallw":
        c.renew()
    else:
        comm.Barrier()


COUNTED = {
    "Gatherv": ((Z[4:6], [Z[:6], [2, 2, 2]]), "buffers that do not overlap"),
    "Scatterv": (([Z[:6], [2, 2, 2]], Z[1:3]), "buffers that do not overlap"),
    "Alltoallv": (([Z[:6], 2], [Z[5:], [3, 2, 1]]), "buffers that do not overlap"),
    "Neighbor_allgatherv": ((Z[1:3], [Z[:6], [2, 2, 2]]), "buffers that do not overlap"),
    "Allgatherv": (
        (X, [Z, ([2, 1, 4], [0, 4, 1])]),
        "received parts that do not overlap: found parts 0 and 2 .*, from byte 8 of",
    ),
    "Alltoallw": (
        (MPI.IN_PLACE, [Z, ([4, 2, 2], [16, 0, 40]), [MPI.DOUBLE] * 3]),
        "received parts that do not overlap: found parts 0 and 2 .*, from byte 40 of",
    ),
}


@pytest.mark.parametrize("call", COUNTED)
def test_parts_that_overlap_are_a_mistake(call):
    arguments, said = COUNTED[call]
    assert re.match(said, mistake(call, arguments, 1, 3))


def test_parts_side_by_side_in_one_buffer_are_no_mistake():
    assert mistake("Gatherv", (Z[2:4], [Z[:6], [2, 2, 2]]), 1, 3) == ""  # the own part
    assert mistake("Scatterv", ([Z, ([2] * 3, [0, 0, 0])], Z[6:8]), 1, 3) == ""
    assert mistake("Allgatherv", (Z[2:4], [Z, ([2, 2, 2], [8, 4, 0])]), 1, 3) == ""
    sent, received = [Z, ([2] * 3, [0, 4, 8])], [Z, ([2] * 3, [2, 6, 10])]
    assert mistake("Alltoallv", (sent, received), 1, 3) == ""
    rows = MPI.DOUBLE.Create_subarray([4, 3], [4, 1], [0, 0]).Commit()
    others = MPI.DOUBLE.Create_subarray([4, 3], [4, 1], [0, 2]).Commit()
    assert mistake("Alltoallw", ([Z, [rows] * 3], [Z, [others] * 3]), 1, 3) == ""
    rows.Free()
    others.Free()
    sent, received = ([MPI.Get_address(x) + 16 * rank for rank in range(3)] for x in (Z, Z[6:]))
    doubles = [MPI.DOUBLE] * 3
    apart = [MPI.BOTTOM, ([2] * 3, sent), doubles], [MPI.BOTTOM, ([2] * 3, received), doubles]
    assert mistake("Alltoallw", apart, 1, 3) == ""
    whole = [MPI.BOTTOM, ([2] * 3, [place // 8 for place in received]), MPI.DOUBLE]
    assert mistake("Allgatherv", (Z[:2], whole), 1, 3) == ""


def test_an_own_part_and_buffers_side_by_side_do_not_overlap():
    x, n = np.arange(12.0), 3
    assert mistake("Allgather", (x[4:8], x), 1, n) == ""
    assert mistake("Scatter", (x, x[8:]), 2, n) == ""
    assert mistake("Allreduce", (x[:6], x[6:]), 0, n) == ""
    pairs = np.zeros(8, np.dtype("d,i4", align=True))  # predefined, and with gaps
    whole = [pairs, [2, 2, 2], MPI.DOUBLE_INT]
    assert mistake("Allgatherv", ([pairs[6:], 2, MPI.DOUBLE_INT], whole), 0, n) == ""
    column = MPI.DOUBLE.Create_vector(3, 1, 4).Commit()
    assert mistake("Allreduce", ([x, 1, column], [x[1:], 1, column]), 0, n) == ""
    column.Free()


TOO_LONG = {
    "Bcast": lambda comm, n, x, y: comm.Bcast([x, 7, MPI.DOUBLE]),
    "Allreduce": lambda comm, n, x, y: comm.Allreduce([x, 7, MPI.DOUBLE], [y, 7, MPI.DOUBLE]),
    "Alltoall": lambda comm, n, x, y: comm.Alltoall([x, 6 // n + 1, "d"], [y, 6 // n + 1, "d"]),
    "Allgather": lambda comm, n, x, y: comm.Allgather([x, (1, 6), MPI.DOUBLE], y[:n]),
    "a type": lambda comm, n, x, y: comm.Bcast([x, 3, PAIRS_WITH_GAPS]),
    "Ibcast": lambda comm, n, x, y: comm.Ibcast([x, 7, MPI.DOUBLE]),
    "Iallgather": lambda comm, n, x, y: comm.Iallgather([x, 7, MPI.DOUBLE], y),
    "Neighbor_allgather": lambda comm, n, x, y: comm.Create_cart([n], [True]).Neighbor_allgather(
        [x, 4, MPI.DOUBLE], [y, 4, MPI.DOUBLE]
    ),
    "Send": lambda comm, n, x, y: comm.Send([x, 7, MPI.DOUBLE], comm.rank),
    "Recv": lambda comm, n, x, y: comm.Recv([x, (2, 5), MPI.DOUBLE], comm.rank),
    "Isend": lambda comm, n, x, y: comm.Isend([x, (1, -1), MPI.DOUBLE], comm.rank),
    "Irecv": lambda comm, n, x, y: comm.Irecv([x, 7, MPI.DOUBLE], comm.rank),
    "Sendrecv": lambda comm, n, x, y: comm.Sendrecv(x, comm.rank, 0, [y, 7, MPI.DOUBLE], comm.rank),
    "Isendrecv": lambda comm, n, x, y: comm.Isendrecv([x, 7], comm.rank, 0, y, comm.rank),
    "Sendrecv_replace": lambda comm, n, x, y: comm.Sendrecv_replace(
        [x, 10**7, MPI.DOUBLE], comm.rank, 0, comm.rank
    ),
    "Gatherv": lambda comm, n, x, y: comm.Gatherv([x, 7, "d"], [np.ones(7 * n), [7] * n]),
    "Scatterv": lambda comm, n, x, y: comm.Scatterv([np.ones(7 * n), [7] * n], [x, 7, "d"]),
    "Allgatherv": lambda comm, n, x, y: comm.Allgatherv([x, 7, "d"], [np.ones(7 * n), [7] * n]),
    "Iallgatherv": lambda comm, n, x, y: comm.Iallgatherv([x, 7, "d"], [np.ones(7 * n), [7] * n]),
    "Reduce_scatter_block": lambda comm, n, x, y: comm.Reduce_scatter_block(
        MPI.IN_PLACE, [x, 6 // n + 1, MPI.DOUBLE]
    ),
}
"""Calls whose messages do not end in their buffers of six elements."""
PAIRS_WITH_GAPS = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()


@pytest.mark.parametrize("call", TOO_LONG)
def test_a_count_that_leaves_the_buffer_is_refused(comm, call):
    sent, received = np.ones(6), np.zeros(6)
    with pytest.raises(UsageError, match="needs a buffer for all of its elements: found one of 48"):
        TOO_LONG[call](comm, comm.Get_size(), sent, received)
    assert not received.any()
    if call.startswith("I") and not call.endswith(("send", "recv")):
        c.renew()


def test_a_count_and_a_place_within_the_array_are_taken(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    whole, matrix = np.zeros(2 * n + 1), np.arange(12.0).reshape(3, 4)
    column = MPI.DOUBLE.Create_vector(3, 1, 4).Commit()
    # The count is that of one part.
    comm.Gather([np.full(2, 1.0 + me), 2, MPI.DOUBLE], [whole, (2, 1), MPI.DOUBLE])
    assert me or whole.tolist() == [0, *np.repeat(np.arange(1.0, n + 1), 2)]
    comm.Scatter([whole, (2, 1), MPI.DOUBLE], [whole[:2].copy(), 2, MPI.DOUBLE])
    comm.Gather(MPI.IN_PLACE if me == 0 else np.ones(2), [whole, 2, MPI.DOUBLE])
    got = np.zeros(3)
    comm.Sendrecv([matrix[0, 1:], 1, column], me, 0, got, me)  # the column goes on in other rows
    assert got.tolist() == [1, 5, 9]
    comm.Send([whole[:0], 2, MPI.DOUBLE], MPI.PROC_NULL)  # no buffer is needed
    comm.Isend([whole[:0], 2, MPI.DOUBLE], MPI.PROC_NULL).Wait()
    column.Free()


def test_a_place_for_the_part_of_another_rank_may_not_be_sent():
    y = np.zeros(6)
    whole = [y, 2, MPI.DOUBLE]
    assert not mistake("Gather", (y[2:4], whole), 1, 3)
    assert not mistake("Gather", (np.zeros(2), whole), 0, 3)
    assert "do not overlap" in mistake("Gather", (y[2:4], whole), 0, 3)
    assert not mistake("Alltoall", (np.zeros(6), whole), 0, 3)


def test_a_send_of_an_object_knows_its_length(comm):
    # A wait for it is no deadlock as long as a message of this length may be on its way.
    me = comm.Get_rank()
    for send in (comm.isend, comm.issend):
        received, sent = comm.irecv(source=me), send({"x": bytes(1 << 20)}, dest=me)
        assert nbytes_of(sent.buffers[0]) > 1 << 20
        assert MPI.Request.waitall([sent, received]) == [None, {"x": bytes(1 << 20)}]


def test_an_alltoall_of_equal_buffers_is_in_place(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    mine = np.repeat(np.arange(float(n)), 20_000) + 10 * me
    comm.Alltoall(mine, mine)
    assert (mine == np.repeat(10.0 * np.arange(n), 20_000) + me).all()


@pytest.mark.parametrize("call", ["Alltoallv", "Alltoallw", "Ialltoallv", "Ialltoallw"])
def test_parts_of_different_lengths_are_exchanged_in_place(comm, call):
    n, me = comm.Get_size(), comm.Get_rank()
    counts = [3000 * ((me + other) % 3) for other in range(n)]
    begins = [sum(counts[:other]) for other in range(n)]
    both = np.repeat(np.arange(n), counts) + n * me
    message = [both, counts, begins, MPI.LONG]
    if call.endswith("w"):
        message[2:] = [8 * begin for begin in begins], [MPI.LONG] * n
    request = getattr(comm, call)(MPI.IN_PLACE, message)
    if request is not None:
        request.Wait()
    assert (both == np.repeat(n * np.arange(n) + me, counts)).all()


PREPARED = {
    "Bcast_init": (lambda comm, mine, all_: comm.Bcast_init(mine), "bytes"),
    "Scatter_init": (lambda comm, mine, all_: comm.Scatter_init(all_, mine, root=0), "bytes"),
    "Gather_init": (lambda comm, mine, all_: comm.Gather_init(sendbuf=mine, recvbuf=all_), "bytes"),
    "Allreduce_init": (lambda comm, mine, all_: comm.Allreduce_init(mine, mine.copy()), "bytes"),
    "another type": (lambda comm, mine, all_: comm.Bcast_init(mine.view("qd"[odd()])), "dtype"),
    "another op": (
        lambda comm, mine, all_: comm.Allreduce_init(mine, X, op=(MPI.SUM, MPI.MAX)[odd()]),
        "reduction",
    ),
    "another root": (lambda comm, mine, all_: comm.Bcast_init(mine, root=int(odd())), "root"),
}


@two
@pytest.mark.parametrize("what", PREPARED)
def test_ranks_compare_their_arguments_when_they_make_a_persistent_collective(what):
    n, count = c.size(), 20_000
    room = np.zeros(4 * n * count)
    whole = room[: n * count] if c.rank() == 0 else None
    shorter = odd() and what.endswith("_init")
    make, differs = PREPARED[what]
    with pytest.raises(CollectiveMismatch, match=differs) as caught:
        make(c.comm, room[: count // 2 if shorter else count], whole)
    if differs == "bytes":
        assert {"160000", "80000"} <= {*re.findall(r"\d+", str(caught.value).replace(",", ""))}
    again = c.comm.Bcast_init(room[:count] if c.rank() else np.ones(count))
    for _ in range(2):
        again.Start()
        again.Wait()
    again.Free()
    assert room.sum() == (count if c.rank() else 0)


def test_a_buffer_that_mpi4py_refuses_leaves_the_message(comm):
    me = comm.Get_rank()
    sent, got = comm.Isend(X, me), np.zeros(2)
    for wrong in ("text", bytes(8), np.zeros(4)[::2], [X, "no type"]):
        with pytest.raises((TypeError, ValueError, BufferError, KeyError)):
            comm.Recv(wrong, me)
        with pytest.raises((TypeError, ValueError, BufferError, KeyError)):
            comm.Irecv(wrong, me)
    status = MPI.Status()
    comm.Recv(got, me, status=status)
    sent.Wait()
    assert list(got) == [1, 0]
    assert (status.Get_source(), status.Get_count(MPI.DOUBLE)) == (me, 1)


@pytest.mark.parametrize("nbytes", [10, 40_000, 3_000_000])
def test_a_request_receives_an_object_of_any_size(comm, nbytes):
    me = comm.Get_rank()
    requests = [comm.irecv(source=me, tag=tag) for tag in (1, 2)]
    sent = [comm.isend((tag, bytes(nbytes)), me, tag) for tag in (2, 1)]
    assert [request.wait() for request in requests[::-1]] == [
        (2, bytes(nbytes)),
        (1, bytes(nbytes)),
    ]
    type(sent[0]).waitall(sent)


@pytest.mark.parametrize("post", ["Irecv", "Recv_init"])
def test_a_request_without_a_variable_keeps_its_buffer_until_it_has_ended(comm, post):
    me, into = comm.Get_rank(), np.zeros(2)
    seen = weakref.ref(into)
    request = getattr(comm, post)(into, me, 5)
    if post == "Recv_init":
        request.Start()
    del request, into
    gc.collect()
    assert _arrives(comm, seen)
    # What has ended is released in other calls, after what was dropped before.
    for _ in range(2 + len(world.current().dropped_requests)):
        comm.sendrecv(None, me, 6, None, me, 6)
    gc.collect()
    assert seen() is None


def _arrives(comm, seen):
    """Whether a message of this rank to itself arrives in a buffer that MPI alone still uses."""
    into, me = seen(), comm.Get_rank()
    if into is None:
        return False
    comm.Isend(X, me, 5).Wait()
    comm.sendrecv(None, me, 6, None, me, 6)  # MPICH receives only while a call waits
    return list(into) == [1, 0]


LAST = {
    "a copy": lambda request: Request(request),
    "a copy of a copy": lambda request: Request(Request(request)),
    "its original": lambda request: (request, Request(request))[0],
}


@pytest.mark.parametrize("last", LAST)
def test_copies_of_a_request_keep_its_buffer_until_it_has_ended(comm, last):
    me, into = comm.Get_rank(), np.zeros(2)
    seen = weakref.ref(into)
    copy = LAST[last](comm.Irecv(into, me, 5))
    del into, copy
    gc.collect()
    assert _arrives(comm, seen)


@pytest.mark.parametrize("dropped", ["before the wait", "after the wait"])
def test_a_request_is_not_looked_at_after_a_copy_of_it_has_ended(comm, dropped):
    me, into = comm.Get_rank(), np.zeros(2)
    request = comm.Irecv(into, me, 5)
    copy = Request(request)
    if dropped == "before the wait":
        del request
    comm.Send(X, me, 5)
    before = len(world.current().dropped_requests)
    copy.Wait()
    del copy
    request = None
    assert len(world.current().dropped_requests) <= before
    assert list(into) == [1, 0]


def test_the_request_of_a_probed_message_is_guarded(comm):
    me, into = comm.Get_rank(), np.zeros(2)
    comm.Isend(X, me, 5)
    request = comm.Mprobe(me, 5).Irecv(into)
    assert (request.comm, request.peer) == (comm, me)
    request.Wait()
    assert list(into) == [1, 0]


@two
def test_the_wait_for_a_copy_of_a_request_ends_when_its_peer_has_left():
    def cell():
        if c.rank() == 0:
            Request(c.comm.Irecv(np.zeros(2), 1, 5)).Wait()

    raised = in_a_cell(cell)
    assert isinstance(raised, RankLeft) == (c.rank() == 0)
    next_cell_works()


def test_a_request_that_is_freed_keeps_its_buffer_until_it_has_ended(comm):
    me, into = comm.Get_rank(), np.zeros(2)
    seen = weakref.ref(into)
    request = comm.Irecv(into, me, 5)
    request.Free()
    assert request == MPI.REQUEST_NULL
    del request, into
    gc.collect()
    assert _arrives(comm, seen)


def test_the_end_of_a_cell_releases_dropped_requests_that_have_ended():
    seen = []

    def cell():
        into, me = np.zeros(2), c.rank()
        seen.append(weakref.ref(into))
        for tag in range(5):
            c.comm.Irecv(into, me, tag)
        for tag in range(5):
            c.comm.Send(X, me, tag)

    in_a_cell(cell)
    gc.collect()
    assert seen[0]() is None


def test_an_empty_buffer_is_replaced_by_an_empty_message(comm):
    me = comm.Get_rank()
    comm.Sendrecv_replace([np.empty(0), "d"], me, 0, me, 0)
    comm.Isendrecv_replace([np.empty(0), "d"], me, 0, me, 0).Wait()


def test_buffers_may_overlap_where_a_peer_is_no_rank(comm):
    x = np.arange(3.0)
    comm.Isendrecv(x, MPI.PROC_NULL, 0, x, MPI.PROC_NULL, 0).Wait()
    assert list(x) == [0, 1, 2]


def test_objects_that_are_sent_without_a_variable_arrive(comm):
    me = comm.Get_rank()
    for tag in range(5):
        comm.isend((tag, bytes(500_000)), me, tag)
        junk = [bytes([255]) * 500_000 for _ in range(3)]  # where a freed buffer was
    assert [comm.recv(source=me, tag=tag) for tag in range(5)] == [
        (tag, bytes(500_000)) for tag in range(5)
    ]
    del junk


def test_the_size_of_what_mpi4py_moves_is_recorded():
    n, me, text = c.size(), c.rank(), bytes(8000)
    found, array = np.empty((n, 1000)), np.ones(1000)
    c.comm.bcast(text if me == 0 else None)
    c.comm.scatter([text] * n if me == 0 else None)
    c.comm.alltoall([text] * n)
    c.comm.Bcast(array)
    c.comm.Allreduce(array, found[0])
    c.comm.Allgather(array, found)
    c.comm.Reduce(array, found[0] if me == 0 else None)
    records = c.records()[-7:]
    assert (records[0].op, records[-1].op) == ("comm.bcast", "comm.Reduce")
    assert all(record.nbytes >= 8000 for record in records), records


def test_a_sendrecv_is_recorded_as_one_call_with_what_it_sends_and_receives():
    text, n = bytes(300_000), c.size()
    c.comm.Barrier()
    c.comm.sendrecv(text, (c.rank() + 1) % n, source=(c.rank() - 1) % n)
    before, record = c.records()[-2:]
    assert (before.op, record.op) == ("comm.Barrier", "comm.sendrecv")
    assert 2 * len(text) <= record.nbytes < 3 * len(text)


def test_200_ping_pongs_of_800_kb_take_the_memory_of_mpi4py_alone():
    if c.size() == 1:
        pytest.skip("a rank sends nothing to itself here")
    message = np.ones(100_000)

    def play(comm):
        for _ in range(200):
            if c.rank() == 0:
                comm.send(message, 1)
                comm.recv(source=1)
            elif c.rank() == 1:
                comm.recv(source=0)
                comm.send(message, 0)
        return psutil.Process().memory_info().rss

    assert play(MPI.COMM_WORLD) + (20 << 20) > play(c.comm)


def test_an_op_that_raises_fails_the_call_on_every_rank_and_no_more():
    def refuses(first, second, datatype):
        raise ArithmeticError("not these")

    op = Op.Create(refuses, commute=True)
    total = np.empty(1)
    if c.size() > 1:
        with pytest.raises((ArithmeticError, RankLeft), match="not these"):
            c.comm.Allreduce(np.ones(1), total, op)
        with pytest.raises(ArithmeticError, match="not these"):
            c.comm.allreduce(1, op)
        request, found = c.comm.Iallreduce(np.ones(1), total, op), False
        try:
            while not request.Test():
                pass
        except ArithmeticError:
            found = True
        assert any(c.allgather_object(found))  # MPI calls it on some ranks only
    with pytest.raises(ArithmeticError, match="not these"):
        op.Reduce_local(np.ones(1), total)
    op.Free()
    assert c.comm.allreduce(1) == c.size()


def test_threads_of_a_rank_send_to_each_other(comm):
    """So that each waits for the other one's next call."""
    me, found = comm.Get_rank(), []

    def answer():
        for count in range(5):
            found.append(comm.recv(source=me, tag=1))
            comm.send(count, me, tag=2)

    thread = threading.Thread(target=answer)
    thread.start()
    for count in range(5):
        comm.send(count, me, tag=1)
        found.append(comm.recv(source=me, tag=2))
    thread.join()
    assert sorted(found) == sorted([*range(5)] * 2)
    assert comm.allreduce(1) == comm.Get_size()


def test_a_split_is_ordered_by_key_and_a_rank_without_colour_gets_the_null_communicator():
    part = c.comm.Split(0, -c.rank())
    assert part.Get_rank() == c.size() - 1 - c.rank()
    assert part.allgather(c.rank()) == list(reversed(RANKS))
    part = c.comm.Split(MPI.UNDEFINED if c.rank() == 0 else 1)
    assert (part == MPI.COMM_NULL) == (c.rank() == 0)
    if c.rank():
        assert part.allreduce(1) == c.size() - 1


DIFFERENCES = {
    "bcast needs the same root": lambda: c.comm.Dup().bcast(1, root=int(odd())),
    "Create_cart needs the same shape": lambda: c.comm.Create_cart([1 if odd() else c.size()]),
    "Allreduce needs the same reduction": lambda: c.comm.Allreduce(
        np.ones(2), np.empty(2), MPI.MAX if odd() else MPI.SUM
    ),
    "Allreduce(SUM) needs the same kind of send buffer": lambda: c.comm.Allreduce(
        MPI.IN_PLACE if odd() else np.ones(2), np.ones(2)
    ),
    "Scan(SUM) needs the same dtype": lambda: c.comm.Scan(
        np.ones(2, "f4" if odd() else "i4"), np.empty(2, "f4" if odd() else "i4")
    ),
    "Reduce(SUM) needs the same number of bytes": lambda: c.comm.Reduce(
        np.ones(1 + odd()), np.empty(2)
    ),
    "Bcast needs the same number of bytes": lambda: c.comm.Bcast(np.ones(3 + odd())),
    "Bcast needs the same dtype": lambda: c.comm.Bcast(np.ones(2, "i8" if odd() else "f8")),
    "Gather needs the same dtype": lambda: c.comm.Gather(
        np.ones(2, "i8"), np.empty(c.size() * 2) if c.rank() == 0 else None
    ),
    "Gatherv needs the same dtype": lambda: c.comm.Gatherv(
        np.ones(2, "i8"), [np.empty(c.size() * 2), [2] * c.size()] if c.rank() == 0 else None
    ),
    "Scatter needs the same dtype": lambda: c.comm.Scatter(
        np.ones(c.size()) if c.rank() == 0 else None, np.empty(1, "i8" if odd() else "f8")
    ),
    "Allgather needs the same dtype": lambda: c.comm.Allgather(
        np.ones(1, "i8" if odd() else "f8"), np.empty(c.size())
    ),
    "Bcast needs the same order in memory": lambda: c.comm.Bcast(
        np.ones((2, 3), order="F" if odd() else "C")
    ),
    "Reduce(SUM) needs the same order in memory": lambda: c.comm.Reduce(
        np.ones((2, 3), order="F" if odd() else "C"), None if c.rank() else np.ones((2, 3))
    ),
    "Gatherv needs the same order in memory": lambda: c.comm.Gatherv(
        np.ones((2, 3)).T, None if c.rank() else np.empty((3 * c.size(), 2))
    ),
    "Alltoall needs the same dtype": lambda: c.comm.Alltoall(
        np.ones(c.size(), "i8" if odd() else "f8"), np.empty(c.size(), "i8" if odd() else "f8")
    ),
}
ONE_TYPE = {
    "Allgather": lambda comm, x: comm.Allgather(x, np.empty(comm.Get_size())),
    "Allgatherv": lambda comm, x: comm.Allgatherv(x, np.empty(comm.Get_size())),
    "Alltoall": lambda comm, x: comm.Alltoall(np.repeat(x, comm.Get_size()), np.empty(comm.size)),
}


@pytest.mark.parametrize("op", ONE_TYPE)
def test_buffers_of_two_types_are_refused_on_every_rank(comm, op):
    with pytest.raises(UsageError, match=f"comm.{op} needs buffers of one type: found i8 and f8"):
        ONE_TYPE[op](comm, np.ones(1, "i8"))
    assert comm.allreduce(1) == comm.Get_size()
    comm.Barrier()


ONE_ORDER = {
    "Allreduce(SUM)": lambda comm, x: comm.Allreduce(x.T, np.empty((3, 2))),
    "Allgather": lambda comm, x: comm.Allgather(x.T, np.empty((comm.size, 3, 2))),
    "Allgatherv": lambda comm, x: comm.Allgatherv([x.T, MPI.DOUBLE], np.empty((comm.size, 3, 2))),
    "Alltoall": lambda comm, x: comm.Alltoall(np.ones((2, comm.size)).T, np.ones((comm.size, 2))),
}


@pytest.mark.parametrize("op", ONE_ORDER)
def test_a_transposed_array_and_one_in_c_order_are_refused_on_every_rank(comm, op):
    """MPI would mix up their values. With one rank the array of Alltoall is in both orders."""
    if comm.Get_size() == 1 and op == "Alltoall":
        pytest.skip("a transposed row is as it was")
    with pytest.raises(UsageError, match=f"comm.{re.escape(op)} needs buffers of one order"):
        ONE_ORDER[op](comm, np.ones((2, 3)))
    assert comm.allreduce(1) == comm.Get_size()
    comm.Barrier()


def test_transposed_arrays_on_both_sides_are_right(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    mine, total = np.arange(6.0).reshape(2, 3).T + me, np.empty((2, 3)).T
    comm.Allreduce(mine, total)
    assert (total == np.arange(6.0).reshape(2, 3).T * n + sum(range(n))).all()
    comm.Bcast(mine, n - 1)
    assert (mine == np.arange(6.0).reshape(2, 3).T + n - 1).all()
    columns = np.empty((2, 3 * n), order="F")
    comm.Allgather(np.full((2, 3), me, "d", "F"), columns)
    assert (columns == np.repeat(range(n), 3)).all()
    # The columns of a matrix that the root has.
    matrix = np.asfortranarray(np.arange(5.0 * n).reshape(5, n)) if me == 0 else None
    column = np.empty(5)
    comm.Scatter(matrix, column)
    assert (column == np.arange(5.0 * n).reshape(5, n)[:, me]).all()
    whole = np.empty((5, n), order="F") if me == 0 else None
    comm.Gather(column, whole)
    assert whole is None or (whole == matrix).all()
    flat = np.empty(6 * n)
    comm.Allgather(np.arange(6.0).reshape(2, 3).T, flat)
    assert (flat.reshape(n, 6) == range(6)).all()


@two
def test_a_transposed_part_is_refused_although_the_root_has_its_own_in_place(comm):
    if comm.Get_size() == 1:
        pytest.skip("no other rank has a part")
    whole, block = np.empty((comm.Get_size(), 3, 2)), np.ones((2, 3)).T
    mine = (MPI.IN_PLACE, whole) if comm.Get_rank() == 0 else (block, None)
    with pytest.raises(CollectiveMismatch, match="order in memory"):
        comm.Gather(*mine)
    comm.Barrier()


@two
def test_a_message_of_a_transposed_array_says_so(monkeypatch):
    said = list[str]()
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    mine, got = np.arange(6.0).reshape(2, 3), np.empty((3, 2), order="F")
    if c.rank() == 0:
        c.comm.Ssend(mine.T.copy(), 1)
        assert said == []
        c.comm.Ssend(mine.T, 1)
        assert "comm.Ssend moves memory as it lies" in said[0]
        assert "Pass np.ascontiguousarray(x)" in said[0]
    elif c.rank() == 1:
        c.comm.Recv(got.reshape(-1), 0)
        c.comm.Recv(got, 0)
        assert (got == mine.T).all()
        assert said == []


def test_a_call_with_a_masked_array_says_once_what_moves(monkeypatch):
    said = list[str]()
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    mine, total = np.ma.masked_array([1.0, 2.0], [False, False]), np.empty(2)
    c.comm.Allreduce(mine, total)
    assert said == []
    mine[1] = np.ma.masked
    for _ in range(2):
        c.comm.Allreduce(mine, total)
    assert list(total) == [1.0 * c.size(), 2.0 * c.size()]
    (text,) = said
    assert "comm.Allreduce moves all values of an array, also those that its mask hides" in text
    assert "Pass x.filled(0), or send x as an object: comm.allreduce(x)" in text


def test_types_that_are_the_same_are_not_told_apart(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    got = np.zeros(n, "q")
    comm.Gather(np.full(1, me, "l"), got if me == 0 else None)
    assert me or list(got) == list(range(n))
    column = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 8).Commit()
    square = np.arange(4.0).reshape(2, 2)
    comm.Bcast([square, 1, column] if me == 0 else square.reshape(-1)[:2])
    letters = np.frombuffer(b"abcdefgh", "S1").copy()
    comm.Bcast([[letters, MPI.CHAR], bytearray(8), letters.view("u1")][me % 3])
    mine = np.full(me, me, "i8") if me else np.array([])
    every = np.zeros(n * (n - 1) // 2, "i8")
    comm.Allgatherv(mine, (every, list(range(n))))
    assert every.sum() == sum(rank * rank for rank in range(n))


@two
@pytest.mark.parametrize("said", DIFFERENCES)
def test_a_difference_between_ranks_is_named(said):
    error = in_a_cell(DIFFERENCES[said])
    assert isinstance(error, CollectiveMismatch)
    assert f"comm.{said}" in str(error)
    next_cell_works()


def test_the_same_message_may_be_written_in_different_forms(comm):
    mine, total = np.full(4, 1.0), np.zeros(4)
    forms = [mine, [mine, MPI.DOUBLE], [mine, 4, "d"], [np.ones(9), (4, 0), MPI.DOUBLE]]
    comm.Allreduce(forms[comm.Get_rank() % len(forms)], total)
    assert list(total) == [comm.Get_size()] * 4
    whole = mine if comm.Get_rank() else [mine, 2, MPI.DOUBLE.Create_contiguous(2).Commit()]
    comm.Bcast(whole)
    if comm.Get_rank() == 0:
        comm.Reduce(MPI.IN_PLACE, mine)
        assert list(mine) == [comm.Get_size()] * 4
    else:
        comm.Reduce(mine, None)


@two
def test_a_split_ends_with_its_epoch():
    part = c.comm.Split(0)
    in_a_cell(lambda: None if odd() else c.barrier())
    with pytest.raises(StaleHandle, match="Make it again"):
        part.barrier()


TRAFFIC = {
    "objects": lambda: c.comm.sendrecv(0, c.rank(), 0, None, c.rank()),
    "arrays": lambda: c.comm.Sendrecv(np.ones(1), c.rank(), 0, np.ones(1), c.rank()),
    "requests": lambda: MPI.Request.Waitall([c.comm.Irecv(X, c.rank()), c.comm.Isend(X, c.rank())]),
    "requests of collectives": lambda: c.comm.Ibarrier(),
    "persistent requests": lambda: c.comm.Send_init(X, c.rank()),
    "collectives of arrays": lambda: c.comm.Allreduce(MPI.IN_PLACE, X.copy()),
    "windows": lambda: Win.Create(X, comm=c.comm).Free(),
    "grids": lambda: c.comm.Create_cart([c.size()]).neighbor_allgather(0),
    "this rank's own": lambda: c.world.current().mpi.alone.isend(0, 0),
}


@pytest.mark.parametrize("what", TRAFFIC)
def test_an_epoch_in_which_messages_may_be_left_is_known(what):
    traffic = c.world.current().traffic
    c.renew()
    c.comm.bcast(0)
    c.comm.Dup()
    c.allreduce(X)
    assert not traffic
    TRAFFIC[what]()
    assert traffic
    c.renew()
    assert not traffic


def test_a_message_that_was_not_received_ends_with_its_epoch():
    alone = c.world.current().mpi.alone
    for comm in (c.comm, alone):
        comm.isend("old", comm.rank)
    c.renew()
    for comm in (c.comm, alone):
        request = comm.isend("new", comm.rank)
        assert comm.recv(source=comm.rank) == "new"
        request.wait()


STALE = {
    "Isend": lambda comm: comm.Isend(X, 0),
    "irecv": lambda comm: comm.irecv(source=0),
    "Ibarrier": lambda comm: comm.Ibarrier(),
    "Iprobe": lambda comm: comm.Iprobe(),
    "improbe": lambda comm: comm.improbe(),
    "Send": lambda comm: comm.Send(X, 0),
    "bcast": lambda comm: comm.bcast(0),
}


def test_a_request_of_an_earlier_epoch_does_not_receive_what_a_failed_cell_has_sent():
    me, got = c.rank(), np.zeros((3, 1))
    posted, again = c.comm.Irecv(got[0], me), c.comm.Recv_init(got[1], me, 2)
    send = c.comm.Send_init(X, me, 2)
    sent = [c.comm.Isend(X, me, 1), c.comm.Isend(X, me, 3)]
    send.Start()
    send.Wait()
    found = c.comm.Mprobe(me, 3)
    Request.Waitall(sent)
    c.renew()  # as after a cell that has failed
    for refused in (
        posted.Wait,
        posted.Test,
        lambda: Request.Waitany([Request(), posted]),
        lambda: Request.testall([posted]),
        again.Start,
        lambda: type(again).Startall([again]),
        lambda: found.Recv(got[2]),
    ):
        with pytest.raises(StaleHandle, match="of epoch"):
            refused()
    assert not got[1:].any()
    sent[0].Wait()  # has ended before
    c.comm.Send_init(X, me, 2).Start()
    c.comm.Recv(got[1], me, 2)
    assert got[1] == 1


def test_a_duplicate_of_an_earlier_epoch_is_refused():
    duplicate = c.comm.Dup()
    c.renew()
    for call in STALE.values():
        with pytest.raises(StaleHandle, match="ends its epoch: this one is of epoch"):
            call(duplicate)


@pytest.mark.parametrize("root", [-1, 99])
@pytest.mark.parametrize("op", ["bcast", "gather", "scatter", "reduce", "Bcast", "Reduce"])
def test_a_root_that_is_no_rank_says_which_there_are(comm, op, root):
    x = np.ones(2)
    arguments = {"Reduce": (x, np.empty(2)), "scatter": ([1] * comm.Get_size(),)}.get(op, (x,))
    with pytest.raises(UsageError, match=rf"comm.{op} needs a root .* found root={root}"):
        getattr(comm, op)(*arguments, root=root)
    comm.barrier()


@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_of_a_communicator_is_guarded_too(kind):
    made = MADE[kind]()
    assert isinstance(made, MPI.Intracomm)
    assert isinstance(made, type(c.comm))
    if made != c.comm:
        made.Free()
        assert made == MPI.COMM_NULL
        with pytest.raises(MPI.Exception):
            made.Barrier()
        made.free()


WITH_A_ROOT = {
    "bcast": lambda comm, last: comm.bcast(comm.rank, last) == last,
    "gather": lambda comm, last: comm.gather(comm.rank, last) == (ours(comm, last) or None),
    "reduce": lambda comm, last: comm.reduce([comm.rank], root=last) == (ours(comm, last) or None),
    "scatter": lambda comm, last: comm.scatter(range(comm.size), last) == comm.rank,
    "Bcast": lambda comm, last: _filled(lambda x: comm.Bcast(x, last), comm) == last,
    "Ibcast": lambda comm, last: _filled(lambda x: comm.Ibcast(x, last).Wait(), comm) == last,
    "Bcast_init": lambda comm, last: _filled(
        lambda x: _started(comm.Bcast_init(x, last)).Wait(), comm
    ) == last,
}  # fmt: skip


def ours(comm, root):
    return list(range(comm.size)) if comm.rank == root else []


def _filled(fill, comm):
    x = np.full(2, comm.rank)
    fill(x)
    return x[0]


@pytest.mark.parametrize("number", [float, np.float64, np.int8])
@pytest.mark.parametrize("call", WITH_A_ROOT)
def test_a_root_may_be_a_float(call, number):
    # As of size / 2, which was an int in Python 2.
    assert WITH_A_ROOT[call](c.comm, number(c.size() - 1))


TO_ONE_RANK = {
    "send": (lambda to: c.comm.send(5, to), lambda x, of: c.comm.recv(source=of)),
    "send with a tag": (
        lambda to: c.comm.send(5, to, to),
        lambda x, of: c.comm.recv(None, of, 1.0),
    ),
    "Send": (lambda to: c.comm.Send(X * 5, to), lambda x, of: c.comm.Recv(x, of, 0.0) or x[0]),
    "Ssend": (lambda to: c.comm.Ssend(X * 5, to), lambda x, of: c.comm.Recv(x, of) or x[0]),
    "isend": (lambda to: c.comm.isend(5, to).wait(), lambda x, of: c.comm.irecv(None, of).wait()),
    "Isend": (
        lambda to: c.comm.Isend(X * 5, to).Wait(),
        lambda x, of: c.comm.Irecv(x, of).Wait() and x[0],
    ),
    "Send_init": (
        lambda to: _started(c.comm.Send_init(X * 5, to)).Wait(),
        lambda x, of: _started(c.comm.Recv_init(x, of)).Wait() and x[0],
    ),
    "probe": (
        lambda to: c.comm.send(5, to),
        lambda x, of: c.comm.probe(of, 0.0) and c.comm.recv(source=of),
    ),
}


@two
@pytest.mark.parametrize("number", [float, np.float64, np.int8])
@pytest.mark.parametrize("call", TO_ONE_RANK)
def test_a_peer_and_a_tag_may_be_floats(call, number):
    send, receive = TO_ONE_RANK[call]
    if c.rank() == 0:
        send(number(1))
    elif c.rank() == 1:
        assert receive(np.zeros(1), number(0)) == 5


REFUSED_BY_MPI = {
    "Free": (lambda: c.comm.Free(), MPI.ERR_COMM),
    "Split": (lambda: c.comm.Split(-5), MPI.ERR_ARG),
    "root": (lambda: c.comm.bcast(0, root=c.size()), MPI.ERR_ROOT),
}


@pytest.mark.parametrize("call", REFUSED_BY_MPI)
def test_a_program_may_catch_the_exception_of_mpi4py(call):
    refused, code = REFUSED_BY_MPI[call]
    with pytest.raises(MPI.Exception) as raised:
        refused()
    assert raised.value.Get_error_class() == code
    c.comm.barrier()


def test_the_communicator_of_all_ranks_is_not_freed():
    with pytest.raises(UsageError, match="lasts as long as the ranks"):
        c.comm.Free()
    c.comm.free()
    c.comm.barrier()


def test_the_communicator_of_all_ranks_looks_like_mpis_own():
    whole = MPI.COMM_WORLD
    assert c.comm.name == whole.name
    assert c.world.current().mpi.alone.name == MPI.COMM_SELF.name
    for key in (MPI.TAG_UB, MPI.IO, MPI.WTIME_IS_GLOBAL, MPI.APPNUM, MPI.LASTUSEDCODE):
        assert c.comm.Get_attr(key) == whole.Get_attr(key)
    assert pickle.loads(pickle.dumps(c.comm)) is c.comm
    assert MPI.Comm.Compare(c.comm, whole) == MPI.CONGRUENT
    assert MPI._sizeof(c.comm) == MPI._sizeof(whole)
    assert MPI.Comm.fromhandle(c.comm.handle) == c.comm == MPI.Comm.f2py(c.comm.py2f())


def test_a_rank_by_itself_has_a_communicator_of_its_own():
    alone = c.world.current().mpi.alone
    assert alone.allgather(c.rank()) == [c.rank()]
    request = alone.isend("to myself", 0)
    assert alone.recv(source=0) == "to myself"
    request.wait()
    error = in_a_cell(lambda: alone.recv(source=0))
    assert isinstance(error, CollectiveMismatch)
    next_cell_works()


def test_a_grid_finds_its_neighbours():
    n, me = c.size(), c.rank()
    grid = c.comm.Create_cart(MPI.Compute_dims(n, 2), [True, False])
    assert isinstance(grid, MPI.Cartcomm)
    assert grid.Get_cart_rank(grid.coords) == me
    assert isinstance(grid.Dup(), MPI.Cartcomm)
    row = grid.Sub([False, True])
    assert row.allreduce(1) == grid.dims[1]
    before, after = grid.Shift(1, 1)

    def from_there(rank):
        return None if rank == MPI.PROC_NULL else rank

    assert grid.sendrecv(me, after, source=before) == from_there(before)
    mine, theirs = np.full(1, me), np.full(4, -1)
    grid.Neighbor_allgather(mine, theirs)
    around = [rank for axis in (0, 1) for rank in grid.Shift(axis, 1)]
    assert list(theirs) == [max(rank, -1) for rank in around]
    assert grid.neighbor_allgather(me) == list(map(from_there, around))
    got = grid.neighbor_alltoall([(me, way) for way in range(4)])
    assert got == [
        None if rank == MPI.PROC_NULL else (rank, way ^ 1) for way, rank in enumerate(around)
    ]


WAYS = 4
EXCHANGES = {
    "arrays": ("alltoall", lambda x: x),
    "counts": ("alltoall", lambda x: [x, 2, MPI.LONG]),
    "a count and a displacement": ("alltoall", lambda x: [x, (2, 0), MPI.LONG]),
    "a derived type": ("alltoall", lambda x: [x, 1, PAIRS]),
    "v: arrays": ("alltoallv", lambda x: x),
    "v: one count": ("alltoallv", lambda x: [x, 2]),
    "v: a distance": ("alltoallv", lambda x: [x, 2, 2, MPI.LONG]),
    "v: counts": ("alltoallv", lambda x: [x, [2] * WAYS]),
    "v: displacements": ("alltoallv", lambda x: [x, ([2] * WAYS, range(0, 8, 2)), MPI.LONG]),
    "w: counts": ("alltoallw", lambda x: [x, ([2] * WAYS, range(0, 64, 16)), [MPI.LONG] * WAYS]),
    "w: types": ("alltoallw", lambda x: [x, [1] * WAYS, range(0, 64, 16), [PAIRS] * WAYS]),
}
PAIRS = MPI.LONG.Create_contiguous(2).Commit()


@pytest.mark.parametrize("call", ["Neighbor_{}", "Ineighbor_{}", "Neighbor_{}_init"])
@pytest.mark.parametrize("form", EXCHANGES)
def test_parts_come_from_the_side_of_a_grid_where_they_were_sent(call, form):
    # In a periodic dimension of one or two ranks, both sides are one rank.
    kind, message = EXCHANGES[form]
    grid = c.comm.Create_cart([c.size(), 1], [True, True])
    mine, theirs = np.arange(2 * WAYS) + 10 * c.rank(), np.full(2 * WAYS, -1)
    request = getattr(grid, call.format(kind))(message(mine), message(theirs))
    if call.endswith("init"):
        request.Start()
    if request is not None:
        request.Wait()
    around = [rank for axis in (0, 1) for rank in grid.Shift(axis, 1)]
    expected = [10 * rank + 2 * (way ^ 1) + at for way, rank in enumerate(around) for at in (0, 1)]
    assert theirs.tolist() == expected
    grid.Free()


def test_graphs_find_their_neighbours():
    n, me = c.size(), c.rank()
    after, before = (me + 1) % n, (me - 1) % n
    ring = c.comm.Create_graph(list(range(1, n + 1)), [(rank + 1) % n for rank in range(n)])
    assert ring.Get_neighbors(me) == [after]
    ring = c.comm.Create_dist_graph_adjacent([before], [after])
    assert ring.neighbor_alltoall([me]) == [before]
    ring = c.comm.Create_dist_graph([me], [1], [after])
    assert ring.neighbor_allgather(me) == [before]


def test_objects_move_along_the_edges_of_a_graph_from_one_rank_to_the_others():
    others = [rank for rank in RANKS if rank]
    star = c.comm.Create_dist_graph_adjacent(*(([0], []) if c.rank() else ([], others)))
    expected = [c.rank()] if c.rank() else []
    assert star.neighbor_alltoall([] if c.rank() else others) == expected
    assert star.neighbor_allgather({"from": c.rank()}) == [{"from": 0}] * len(expected)


def test_requests_are_waited_for(comm):
    n, me = comm.Get_size(), comm.Get_rank()
    after, before = (me + 1) % n, (me - 1) % n
    got = np.empty(3)
    requests = [comm.Isend(np.full(3, float(me)), after), comm.Irecv(got, before)]
    assert all(isinstance(request, MPI.Request) for request in requests)
    type(requests[0]).Waitall(requests)
    assert (got == before).all()
    sent, received = comm.isend({"from": me}, after, 5), comm.irecv(source=before, tag=5)
    assert received.wait() == {"from": before}
    sent.wait()
    every = [comm.irecv(source=before, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        comm.send(tag, after, tag)
    assert type(sent).waitall(every) == [1, 2]
    total = np.empty(1)
    comm.Iallreduce(np.ones(1), total).Wait()
    assert total[0] == n
    start = comm.Recv_init(got, before)
    start.Start()
    comm.Send(np.zeros(3), after)
    start.Wait()
    assert not got.any()
    one = [comm.irecv(source=before), MPI.REQUEST_NULL]
    comm.send("one", after)
    assert type(sent).waitany(one) == (0, "one")


@pytest.mark.skipif(c.size() != 2, reason="two ranks exchange")
@pytest.mark.parametrize("how", ["Sendrecv", "Waitall", "Isend", "Barrier", "barrier"])
def test_ranks_between_which_data_is_under_way_are_not_taken_for_stuck(how):
    mine, theirs, other = np.ones(3_000_000), np.zeros(3_000_000), 1 - c.rank()
    if how == "Sendrecv":
        c.comm.Sendrecv(mine, other, 0, theirs, other)
    elif how == "Waitall":
        both = [c.comm.Isend(mine, other), c.comm.Irecv(theirs, other)]
        type(both[0]).Waitall(both)
    elif "arrier" in how:
        meet = c.barrier if how == "barrier" else c.comm.Barrier
        if c.rank():
            sent = c.comm.Isend(mine, other)
            meet()
            sent.Wait()
        else:
            c.comm.Recv(theirs, other)
            meet()
        theirs[0] = 1
    elif c.rank():
        sent = c.comm.Isend(mine, other)
        theirs[0] = c.comm.recv(source=other)
        sent.Wait()
    else:
        c.comm.Recv(theirs, other)
        c.comm.send(1, other)
    assert theirs[0] == 1


@pytest.mark.parametrize("form", ["", "I", "_init"])
@pytest.mark.parametrize("call", ["Allreduce", "Reduce_scatter_block", "Scan"])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2"])
def test_sums_of_short_integers_wrap_at_any_length(dtype, call, form):
    size, rank = c.size(), c.rank()
    name = f"I{call.lower()}" if form == "I" else call + form
    if not hasattr(c.comm, name):
        pytest.skip("MPI has no persistent collectives")
    for length in (3, 1000):
        mine = np.full(length * size, np.iinfo(dtype).max, dtype)
        found = np.zeros(length if "scatter" in call else length * size, dtype)
        request = getattr(c.comm, name)(mine, found)
        if form == "_init":
            request.Start()
        if request is not None:
            request.Wait()
        terms = rank + 1 if call == "Scan" else size
        wanted = mine[: len(found)].astype(np.int64) * terms
        assert (found == wanted.astype(dtype)).all()


def test_an_exchange_with_neighbours_that_all_refuse_leaves_the_epoch_intact():
    grid = c.comm.Create_cart([c.size()], periods=[True])
    theirs = np.zeros(2)
    with pytest.raises((TypeError, ValueError, BufferError)):
        grid.Neighbor_alltoall("text", theirs)
    grid.Neighbor_alltoall(np.full(2, float(c.rank())), theirs)
    assert list(theirs) == [(c.rank() - 1) % c.size(), (c.rank() + 1) % c.size()]
    grid.Free()


MISSED = {
    "irecv": lambda comm: comm.irecv(source=1).wait(),
    "irecv of any": lambda comm: comm.irecv(source=1 if c.size() > 2 else MPI.ANY_SOURCE).wait(),
    "issend": lambda comm: comm.issend("x", 1).wait(),
    "Waitall": lambda comm: _waitall([comm.isend(1, 1, 9), comm.irecv(source=1)]),
    "Waitany": lambda comm: type(comm.irecv()).Waitany([comm.irecv(source=1)]),
    "Ibarrier": lambda comm: comm.Ibarrier().Wait(),
    "Sendrecv_replace": lambda comm: comm.Sendrecv_replace(np.ones(1), 1, 0, 1, 0),
    "mprobe": lambda comm: comm.mprobe(1),
    "Create_cart": lambda comm: comm.Create_cart([c.size()]),
    "Split": lambda comm: comm.Split(0),
}


def _waitall(requests):
    type(requests[0]).waitall(requests)


@two
@pytest.mark.parametrize("missed", MISSED)
def test_who_waits_for_a_rank_that_has_left_is_told(missed):
    error = in_a_cell(lambda: None if odd() else MISSED[missed](c.comm))
    if odd():
        assert error is None
    else:
        assert isinstance(error, RankLeft), error
        assert "rank 1 has left this cell" in str(error)
    next_cell_works()


BESIDE = {
    "Ineighbor_alltoall": lambda grid, x, y: grid.Ineighbor_alltoall(x, y),
    "Ineighbor_allgather": lambda grid, x, y: grid.Ineighbor_allgather(x[:1], y),
    "Neighbor_alltoall_init": lambda grid, x, y: _started(grid.Neighbor_alltoall_init(x, y)),
}


@two
@pytest.mark.parametrize("call", BESIDE)
def test_who_waits_for_a_neighbour_that_has_left_is_told(call):
    grid = c.comm.Create_cart([c.size()], [True])
    mine, theirs = np.full(2, float(c.rank())), np.zeros(2)
    error = in_a_cell(lambda: None if odd() else BESIDE[call](grid, mine, theirs).Wait())
    if odd() or 1 not in grid.Shift(0, 1):  # all that it needs has come
        assert error is None
    else:
        assert isinstance(error, RankLeft), error
        assert "rank 1 has left this cell" in str(error)
    next_cell_works()


@two
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_replaced_by_the_other_ranks_whatever_its_order_in_memory_is(order):
    if c.rank() < 2:
        other = 1 - c.rank()
        mine = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], order=order) + 10 * c.rank()
        expected = mine + 10 * (other - c.rank())
        c.comm.Sendrecv_replace(mine, other, source=other)
        assert (mine == expected).all()


@two
@pytest.mark.parametrize("replace", ["Sendrecv_replace", "Isendrecv_replace"])
def test_a_column_is_replaced_that_begins_in_a_shorter_array(replace):
    if c.rank() < 2:
        other = 1 - c.rank()
        mine = np.arange(9.0).reshape(3, 3) + 10 * c.rank()
        column = MPI.DOUBLE.Create_vector(3, 1, 3).Commit()
        request = getattr(c.comm, replace)([mine[0, 1:], 1, column], other, source=other)
        if request is not None:
            request.Wait()
        expected = np.arange(9.0).reshape(3, 3) + 10 * c.rank()
        expected[:, 1] += 10 * (other - c.rank())
        assert (mine == expected).all()
        column.Free()


class Float32:
    """A dtype that numpy does not know."""

    def __str__(self) -> str:
        return "torch.float32"


class Tensor(np.ndarray):
    dtype = Float32()


@two
def test_a_tensor_and_an_array_of_the_same_type_are_alike():
    every = np.zeros((c.size(), 3), "f4") if c.rank() == 0 else None
    c.comm.Gather(np.full(3, c.rank(), "f4").view(Tensor), every)
    if every is not None:
        assert (every == np.arange(c.size())[:, None]).all()


def test_a_request_for_a_message_from_nowhere_needs_no_buffer():
    c.comm.Irecv(None, MPI.PROC_NULL).Wait()
    requests = [c.comm.Recv_init(None, MPI.PROC_NULL), c.comm.Recv_init(X, source=MPI.PROC_NULL)]
    type(requests[0]).Startall(requests)
    Request.Waitall(requests)


def test_a_message_from_nowhere_is_none():
    nowhere = MPI.PROC_NULL
    assert c.comm.recv(source=nowhere) is None
    assert c.comm.sendrecv(1, nowhere, source=nowhere) is None
    c.comm.send(1, nowhere)


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
    assert c.add_process_set([0]).process_set_id == first.process_set_id
    with pytest.raises(ValueError, match="entry number 1, rank 0, is a duplicate"):
        c.init(process_sets=[[0], [0]])
    assert c.remove_process_set(first)


def test_a_set_that_one_communicator_has_twice_is_refused_on_all_ranks():
    """Of the two that Split() makes one may be a set of ranks that is named too."""
    evens = list(range(0, c.size(), 2))
    plain = MPI.COMM_WORLD.Split(c.rank() % 2)
    with pytest.raises(UsageError, match=r"entry number \d, ranks? [\d, ]+, is a duplicate"):
        c.init(process_sets=[c.ProcessSet(plain), evens])
    nowhere = [c.ProcessSet(MPI.COMM_NULL), c.ProcessSet(MPI.COMM_NULL)]
    c.init(process_sets=nowhere)
    assert [none.process_set_id for none in nowhere] == [None, None]
    plain.Free()


@two
def test_ranks_that_register_different_numbers_of_sets_all_say_so():
    with pytest.raises(UsageError, match="the same number of process sets on every rank"):
        c.init(process_sets=[[0]] * (c.rank() % 2))


@pytest.mark.skipif(c.size() < 2, reason="the set of all ranks is there already")
def test_adding_a_set_of_registered_ranks_returns_it():
    first, again = c.add_process_set([0]), c.add_process_set([0])
    assert again.process_set_id == first.process_set_id
    assert c.add_process_set(list(RANKS)).process_set_id == 0
    assert c.remove_process_set(again)
    # The number is used again, and is not that of the first one's ranks.
    other = c.add_process_set([1])
    with pytest.raises(UsageError, match="has been removed"):
        c.allreduce(1, process_set=first)
    assert not c.remove_process_set(first)
    assert c.remove_process_set(other)


@two
def test_adding_a_registered_set_is_compared_with_what_others_add():
    some = c.add_process_set([0])
    with pytest.raises(CollectiveMismatch, match="add_process_set needs the same ranks"):
        c.add_process_set([0] if c.rank() == 0 else [1])
    assert c.remove_process_set(some)


def test_the_global_process_set_has_the_communicator_of_init():
    assert str(c.global_process_set) == (
        f"ProcessSet(process_set_id=0, ranks={list(RANKS)}, mpi_comm=None)"
    )
    plain = MPI.COMM_WORLD.Dup()
    c.init(plain)
    assert c.global_process_set.mpi_comm is plain
    assert c.global_process_set.ranks == list(RANKS)
    c.global_process_set.mpi_comm = None
    plain.Free()


def test_a_pool_of_a_service_that_cannot_be_reached_ends_its_futures(monkeypatch):
    check_pools(core)
    with pytest.raises(BrokenExecutor, match=r"mpi4py\.MPI\.Exception"):
        MPIPoolExecutor(service="a name without a service").submit(abs, -1).result()
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    with pytest.raises(UsageError, match=r"comm\.Connect needs tcp"):
        MPIPoolExecutor(service=("localhost", 1)).submit(abs, -1)
