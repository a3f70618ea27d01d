"""`expect` judges sixty solutions of students rightly, and tells each what was seen."""

import re
from pathlib import Path

import pytest

import allranks
from allranks.errors import CellFailed, CellTimeout, RankDied

SOLUTIONS = Path(__file__).with_name("solutions.py").read_text()


@pytest.fixture(scope="module", params=[2, 3, 4, 5])
def cluster(request):
    with allranks.Cluster(request.param, show_output=False) as started:
        started.run(SOLUTIONS)
        yield started


def test_thirty_right_and_thirty_wrong_solutions_are_told_apart(cluster):
    told = cluster.run("{name: judged(name) for name in SOLUTIONS}")
    kinds = "{name: (text, by_luck) for name, (*_, text, by_luck) in SOLUTIONS.items()}"
    expected = cluster.run(kinds)[0]
    assert len(expected) == 60
    assert sum(not text for text, _ in expected.values()) == 30
    misjudged = {}
    for name, (text, by_luck) in expected.items():
        found = [each[name] for each in told]
        passes = not text or len(cluster) in by_luck
        if any(found) if passes else not all(found) or not any(text in each for each in found):
            misjudged[name] = found
    assert misjudged == {}


@pytest.fixture(scope="module")
def four():
    with allranks.Cluster(4, show_output=False) as started:
        started.run(
            "import numpy as np\nfrom allranks.grading import expect, line, ring\nkept = rank"
        )
        yield started


FAKE_RING = """
import numpy as np

def my_allgather(array):
    if rank == 0:
        found = [array] + [recv(r) for r in range(1, size)]
        for r in range(1, size):
            send(np.concatenate(found), r)
        return found
    send(array, 0)
    return np.split(recv(0), size)

with expect(ring(rounds=size - 1), bytes_per_rank=3_000_000):
    my_allgather(np.zeros(125_000))
"""


def failure(cluster, source, **options):
    with pytest.raises(CellFailed) as failed:
        cluster.run(source, **options)
    return failed.value


def test_the_page_shows_the_message_of_its_example(four):
    page = (Path(__file__).parents[2] / "docs" / "teaching.md").read_text()
    cell = r"test_expect.py -->\n```python\n%%[^\n]*\n(.*?)```"
    ((example, shown),) = re.findall(
        rf"{cell}.*?```text\nExpectationFailed: (.*?)```", page, re.DOTALL
    )
    four.run(FAKE_RING.partition("with expect")[0])
    assert failure(four, example).reports[0].message == shown.rstrip()


def test_the_message_compares_what_was_seen_with_a_ring(four):
    told = failure(four, FAKE_RING).reports[0].message
    assert "a ring: each rank sends 3 messages of 1 MB to one neighbour" in told
    assert (
        "found: rank 0 received 3 messages of 1 MB from ranks 1–3 and sent 3 messages of 4 MB to "
        "ranks 1–3." in told
    )
    assert "all messages begin or end at rank 0, which all other ranks wait for" in told
    assert "In each round send to rank (rank + 1) % size" in told


SENDS_FIRST = (
    "comm.Send(np.zeros(10), (rank + 1) % size); comm.Recv(np.zeros(10), (rank - 1) % size)"
)


def test_an_order_of_sends_that_needs_buffers_passes_where_deadlocks_are_allowed(four):
    four.run(f"with expect(ring(1), no_deadlock=False): {SENDS_FIRST}")
    assert "ranks that wait for each other" in str(failure(four, f"with expect(): {SENDS_FIRST}"))


def test_the_lines_of_waits_are_named_and_ranks_that_have_returned(four):
    source = "with expect():\n    if rank == 0:\n        send(np.zeros(10), 3)\n        # end"
    told = failure(four, source).reports[0].message
    assert "rank 0 waits at" in told
    assert ":3: send(np.zeros(10), 3)\n  ranks 1–3 have returned" in told


def test_ranks_and_communicators_stay_usable_afterwards(four):
    four.run("circle = comm.Create_cart([size], periods=[True])")
    passes = "@expect(ring(1))\ndef passes():\n    return circle.sendrecv(rank, (rank + 1) % size)"
    assert four.run(f"{passes}\npasses()") == [3, 0, 1, 2]
    # Each begins an epoch within the cell, which the notebook must follow.
    for _ in range(2):
        failure(four, f"with expect(): {SENDS_FIRST}")
    failure(four, "if rank: allreduce(1)")
    assert four.run("allreduce(kept, op=Sum)") == [6] * 4


def test_receives_that_a_failed_solution_left_take_no_message_of_the_next_one(four):
    four.run("left, right = (rank - 1) % size, (rank + 1) % size; import numpy as np")
    posts = "for _ in range(9): comm.Irecv(np.zeros(10), left)\n    raise ValueError('stops')"
    assert "ValueError: stops" in str(failure(four, f"with expect():\n    {posts}"))
    passes = "with expect(ring(1)): found = comm.sendrecv(rank, right, source=left)\nfound"
    assert four.run(passes) == [3, 0, 1, 2]
    moves = "comm.Sendrecv(np.full(10, rank), right, 0, found := np.zeros(10, int), left)"
    assert four.run(f"with expect(ring(1)): {moves}\nint(found[0])") == [3, 0, 1, 2]


def test_the_ranks_begin_the_same_epoch_after_a_cell_has_begun_one(four):
    four.run("from allranks.collectives import renew\nrenew()\nrenew()")
    failure(four, "recv(1) if rank == 0 else None")
    assert four.run("allreduce(kept, op=Sum)") == [6] * 4


def test_a_loop_without_end_ends_with_the_timeout_and_no_hang_is_left(four):
    source = "with expect():\n    while rank == 2: pass"
    assert isinstance(failure(four, source, timeout=1), CellTimeout)
    source = "with expect():\n    if rank == 2:\n        while True: pass\n    recv(2)"
    assert isinstance(failure(four, source, timeout=1), CellTimeout)
    assert four.run("with expect(ring(1)): comm.sendrecv(0, (rank + 1) % size)\nkept") == [
        0,
        1,
        2,
        3,
    ]


def test_an_exception_is_raised_on_its_rank_and_named_on_the_others(four):
    told = failure(four, "with expect():\n    if rank == 2: 1 / 0\n    recv((rank + 1) % size)")
    assert {report.rank: report.etype for report in told.reports if not report.waiting} == {
        2: "ZeroDivisionError"
    }
    assert "rank 2 failed: ZeroDivisionError: division by zero at" in told.text


EXCHANGE = """
import numpy as np
from allranks.grading import expect, ring
matrix, received = np.zeros((100, 100)), np.zeros((100, 100))
column = MPI.DOUBLE.Create_vector(100, 1, 100).Commit()
pair = MPI.DOUBLE.Create_contiguous(2).Commit()

def exchange(buffer):
    with expect(ring(1)) as seen:
        comm.Sendrecv(buffer, (rank + 1) % size, 0, received, (rank - 1) % size, 0)
    return [message.nbytes for message in seen.traffic.sent(rank)]
"""


@pytest.mark.parametrize(
    ("buffer", "nbytes"),
    [
        ("[matrix, 1, column]", 800),
        ("[matrix, (1, 0), column]", 800),
        ("[matrix, 50, pair]", 800),
        ("[matrix, pair]", 80_000),
        ("[matrix, 100, MPI.DOUBLE]", 800),
        ("[matrix, 100, 'd']", 800),
        ("[matrix, MPI.DOUBLE]", 80_000),
        ("(matrix, 100)", 800),
        ("matrix[0]", 800),
    ],
)
def test_the_bytes_of_each_form_of_a_buffer_are_those_that_are_sent(four, buffer, nbytes):
    four.run(EXCHANGE)
    assert four.run(f"exchange({buffer})") == [[nbytes]] * 4


@pytest.mark.parametrize(
    "call", ["comm.Mprobe()", "comm.Send_init(np.zeros(1), 0)", "MPI.Win.Create(None)"]
)
def test_a_call_that_is_not_recorded_is_refused(four, call):
    assert "Use send, recv, sendrecv" in str(failure(four, f"with expect(): {call}"))


@pytest.mark.parametrize(
    "call",
    [
        "MPI.Intracomm.allgather(comm, rank)",
        "saved(comm, rank)",
        "MPI.Intracomm.allgather(MPI.COMM_WORLD, rank)",
        "super(type(comm), comm).allgather(rank)",
        "type(comm).__mro__[2].allgather(comm, rank)",
        "MPI.Intracomm.allgather(own, rank)",
        "copy.allgather(rank)",
        "MPI.Intracomm(comm).allgather(rank)",
        "MPI.Comm.fromhandle(comm.handle)",
        "comm.Allgather_init(received, received)",
        "comm.Dup().Barrier_init()",
    ],
)
def test_a_call_of_a_base_class_is_refused(four, call):
    four.run(
        "received, own = np.zeros(10), comm.Dup()\n"
        "saved, copy = MPI.Intracomm.allgather, MPI.Intracomm(comm)"
    )
    told = str(failure(four, f"with expect(): {call}"))
    assert "MPI_ERR_COMM" in told or "expect() records no comm." in told
    # Afterwards these calls work as before.
    gathered = "MPI.Intracomm.allgather(comm, rank), MPI.Intracomm.allgather(copy, rank)"
    assert four.run(f"copy = MPI.Intracomm(comm)\n{gathered}") == [([*range(4)], [*range(4)])] * 4


def test_a_program_may_ask_its_communicators_for_all_that_sends_nothing(four):
    four.run("grid = comm.Create_cart([2, 2], periods=[True, True])")
    source = """
with expect():
    half = comm.Split(rank % 2)
    no_part = comm.Split(MPI.UNDEFINED)
    found = [
        comm.rank, comm.Get_size(), half.size, half != MPI.COMM_NULL, no_part == MPI.COMM_NULL,
        bool(half), comm == MPI.COMM_WORLD, comm.name, comm.group.size, grid.Shift(0, 1)[1],
        grid.coords, grid.Get_cart_rank([0, 1]), comm.Iprobe(), half.allreduce(1),
        isinstance(comm, MPI.Intracomm), comm.is_intra, int(allreduce(1, op=Sum)),
    ]
    half.Free()
found
"""
    assert four.run(source)[1] == [
        *(1, 4, 2, True, True, True, True, "MPI_COMM_WORLD", 4, 3, [0, 1], 1, False, 2),
        *(True, True, 4),
    ]


@pytest.mark.replaces
def test_a_rank_that_dies_fails_the_cell(four):
    told = failure(four, "import os\nwith expect():\n    if rank == 1: os._exit(0)\n    recv(1)")
    assert isinstance(told, RankDied)
    again = "from allranks.grading import expect\nwith expect(): barrier()\nsize"
    assert four.run(again) == [4] * 4
