"""A simulated cell in all its orders of messages: wrong programs are found, right ones are not."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.features.course_programs import PROGRAMS

_NONBLOCKING = "[r.wait() for r in [comm.irecv(source=1 - rank), comm.isend(0, 1 - rank)]]"
#: The expected word of the report, the number of ranks, and the program.
WRONG = [
    # Deadlocks in each order.
    ("deadlock", 2, "comm.recv(source=1 - rank); comm.send(0, 1 - rank)"),
    ("deadlock", 2, "comm.ssend(0, 1 - rank); comm.recv(source=1 - rank)"),
    ("deadlock", 3, "comm.recv(source=(rank - 1) % size); comm.send(0, (rank + 1) % size)"),
    ("deadlock", 2, "if rank == 0: comm.recv(source=1, tag=1)\nelse: comm.send(0, 0, tag=2)"),
    ("deadlock", 3, "if rank: comm.barrier()"),
    ("deadlock", 2, "if rank == 0: comm.recv(source=0)"),
    ("deadlock", 3, "if rank: comm.send(0, 0)\nelse: comm.recv(source=1); comm.recv(source=1)"),
    ("deadlock", 2, "if rank: comm.barrier(); comm.send(0, 0)\nelse: comm.recv(); comm.barrier()"),
    # Deadlocks only where sends wait for their receives.
    ("deadlock", 2, "comm.send(0, 1 - rank); comm.recv(source=1 - rank)"),
    ("deadlock", 3, "comm.send(0, (rank + 1) % size); comm.recv(source=(rank - 1) % size)"),
    ("deadlock", 2, "comm.send(0, 1 - rank); comm.barrier(); comm.recv()"),
    ("deadlock", 2, "r = comm.isend(0, 1 - rank); r.wait(); comm.recv()"),
    ("deadlock", 2, "comm.Send(bytes(9), 1 - rank); comm.Recv(bytearray(9), 1 - rank)"),
    ("deadlock", 2, "if rank: comm.send(0, 0, 1); comm.send(0, 0, 2)\n"
                    "else: comm.recv(source=1, tag=2); comm.recv(source=1, tag=1)"),
    ("deadlock", 1, "comm.send(0, 0); comm.recv(source=0)"),
    ("deadlock", 3, "comm.send(0, (rank + 1) % 3) if rank < 2 else None\n"
                    "comm.bcast(0, root=2); comm.recv() if rank else None"),
    # Deadlocks in some orders.
    ("deadlock", 3, "if rank == 0: comm.recv(); comm.recv(source=1)\nelse: comm.send(0, 0)"),
    ("deadlock", 3, "if rank == 0:\n  if comm.recv() == 2: comm.recv(source=2)\n"
                    "  else: comm.recv(source=2)\nelse: comm.send(rank, 0)"),
    ("deadlock", 3, "if rank == 0: comm.probe(); comm.recv(source=2); comm.recv(source=2)\n"
                    "else: comm.send(0, 0)"),
    ("deadlock", 2, "if rank == 0:\n  r = comm.irecv(source=1)\n  if not r.test()[0]: comm.recv()\n"
                    "else: comm.send(0, 0)"),
    # Wrong roots and calls that do not fit.
    ("error", 3, "comm.bcast(rank, root=rank)"),
    ("error", 3, "comm.gather(rank, root=min(rank, 1))"),
    ("error", 3, "broadcast(1.0, root=0) if rank else allreduce(1.0, op=Sum)"),
    ("error", 2, "allreduce([1.0] * (rank + 1), op=Sum)"),
    ("error", 2, "comm.scatter([1, 2, 3] if rank == 0 else None, root=0)"),
    # Lost messages.
    ("lost", 2, "if rank == 0: comm.send(0, 1)"),
    ("lost", 3, "if rank == 0: comm.recv()\nelse: comm.send(0, 0)"),
    ("lost", 2, "if rank: [comm.isend(0, 0, tag=t) for t in (1, 2)]\nelse: comm.recv(tag=1)"),
    ("lost", 2, "comm.irecv(source=1 - rank)"),
    ("lost", 2, "if rank: comm.send(0, 0)\nelif comm.iprobe(source=1): comm.recv()"),
    ("lost", 2, "if rank: comm.isend(0, 0)\nbarrier()\n"),
    # Results that depend on the order.
    ("results", 3, "print([comm.recv() for _ in '12']) if rank == 0 else comm.send(rank, 0)"),
    ("results", 3, "a = 1.0\nif rank == 0:\n  for _ in '12': a = a * 2 + comm.recv()\n"
                   "else: comm.send(rank, 0)\na"),
    ("results", 3, "if rank == 0: print(comm.recv() - comm.recv())\nelse: comm.send(rank, 0)"),
    ("results", 2, "if rank: comm.send(0, 0)\nelse: print(comm.iprobe(source=1)); comm.recv()"),
    ("results", 2, "if rank: comm.send(0, 0)\nelse:\n  r = comm.irecv(source=1)\n"
                   "  print(r.test()[0]); r.wait()"),
    ("results", 3, "if rank == 0:\n  rs = [comm.irecv(source=s) for s in (1, 2)]\n"
                   "  print(MPI.Request.waitany(rs)); MPI.Request.waitall(rs)\n"
                   "else: comm.send(rank, 0)"),
    # Relayed: rank 2's message may be there only after another rank's choice.
    ("results", 4, "if rank == 0: print(comm.recv(), comm.recv())\n"
                   "elif rank == 1: comm.send(1, 0)\n"
                   "elif rank == 2: comm.recv(); comm.send(2, 0)\nelse: comm.send(3, 2)"),
    # Errors in some orders, and a loop without end.
    ("error", 3, "if rank == 0: assert comm.recv() == 1; comm.recv()\nelse: comm.send(rank, 0)"),
    ("never ends", 2, "if rank == 0:\n  while not comm.iprobe(source=1): pass"),
]  # fmt: skip
_TWO_TAGS = """
if rank == 0:
  one, two = comm.irecv(tag=1), comm.irecv(tag=2)
  two.wait(); comm.send(0, 3)
  print(one.wait()); {rest}
elif rank == 3: comm.recv(source=0); comm.send(3, 0, tag=1)
else: comm.send(rank, 0, tag=rank)
"""
_TEST_FIRST = """
if rank == 0: comm.iprobe(source=2); comm.send(0, 2); comm.recv(source=2)
elif rank == 1: comm.send(1, 2)
else: first = comm.recv(); comm.send(first, 0); {rest}
"""
#: As `WRONG`: found only if a later receive is matched first, or a test ends before a match.
WRONG_LATE = [
    ("results", 4, _TWO_TAGS.format(rest="comm.recv(tag=1)")),
    ("deadlock", 4, _TWO_TAGS.format(rest="comm.recv(source=3, tag=1)")),
    ("results", 3, _TEST_FIRST.format(rest="comm.recv(); print(first)")),
    ("deadlock", 3, _TEST_FIRST.format(rest="comm.recv(source=0)")),
]
#: The number of ranks, and a program whose results do not depend on the order.
RIGHT = [
    (4, "print(allreduce(rank, op=Sum), comm.bcast(rank, root=1), comm.scan(rank))"),
    (3, "comm.gather(rank, root=1); comm.scatter([1, 2, 3] if rank == 0 else None, root=0)"),
    (4, "sub = comm.Split(rank % 2, rank)\nprint(sub.allreduce(rank)); sub.Free()"),
    (3, "print(comm.sendrecv(rank, (rank + 1) % size, source=(rank - 1) % size))"),
    (3, "right, left = (rank + 1) % size, (rank - 1) % size\n"
        "if rank == 0: comm.send(0, right); print(comm.recv(source=left))\n"
        "else: comm.send(comm.recv(source=left) + rank, right)"),
    (2, "for _ in range(5):\n  if rank == 0: comm.send(1, 1); comm.recv(source=1)\n"
        "  else: comm.send(comm.recv(source=0), 0)"),
    (2, _NONBLOCKING),
    (3, "print(sum(comm.recv() for _ in '12')) if rank == 0 else comm.send(rank, 0)"),
    (3, "if rank == 0:\n  print(sorted(comm.recv() for _ in '12'))\nelse: comm.ssend(rank, 0)"),
    (3, """
        tasks = list(range(3))
        if rank == 0:
            total, status, active = 0, MPI.Status(), 0
            for worker in range(1, size):
                comm.send(tasks.pop(), worker); active += 1
            while active:
                total += comm.recv(source=MPI.ANY_SOURCE, status=status); active -= 1
                if tasks:
                    comm.send(tasks.pop(), status.Get_source()); active += 1
            for worker in range(1, size): comm.send(None, worker)
            print(total)
        else:
            while (task := comm.recv(source=0)) is not None: comm.send(task ** 2, 0)
     """),
    (2, "if rank == 0:\n  r = comm.irecv(source=1)\n  while not (a := r.test())[0]: pass\n"
        "  print(a[1])\nelse: comm.send(7, 0)"),
    (3, "if rank == 0:\n  rs = [comm.irecv(source=s) for s in (1, 2)]\n"
        "  print(sum(MPI.Request.waitany(rs)[1] for _ in rs))\nelse: comm.send(rank, 0)"),
    (3, "if rank == 0:\n  total, rs = 0, [comm.irecv(source=s) for s in (1, 2)]\n"
        "  while (some := MPI.Request.waitsome(rs))[0]: total += sum(some[1])\n"
        "  print(total, MPI.Request.testsome(rs), MPI.Request.Testany(rs)[1])\n"
        "else: comm.send(rank, 0)"),
    (3, "if rank == 0:\n  total, rs = 0, [comm.irecv(source=s) for s in (1, 2)]\n"
        "  while (some := MPI.Request.testsome(rs))[0] is not None: total += sum(some[1])\n"
        "  print(total)\nelse: comm.send(rank, 0)"),
    (2, "import time\nbegan = time.time(); speed = 1 / (time.time() - began)\n"
        "while time.time() < began + 0.001: pass"),
]  # fmt: skip


@pytest.fixture
def on_ranks(notebook):
    def run(source, n, options="--explore"):
        return notebook.on_ranks(textwrap.dedent(source).strip(), f"-n {n} {options}", timeout=120)

    return run


def test_forty_wrong_programs_and_four_of_late_matches_are_found(on_ranks):
    assert len(WRONG) == 40
    missed = []
    for word, size, source in WRONG + WRONG_LATE:
        text = on_ranks(source, size).text
        if not re.search(rf"^\d\. .*{word}", text, re.MULTILINE):
            missed.append((word, source, text))
    assert not missed


def test_right_programs_have_no_finding(on_ranks):
    for size, source in RIGHT:
        text = on_ranks(source, size).text
        assert "; no finding" in text, (source, text)
        assert "not all" not in text


def test_right_programs_of_courses_have_no_finding(on_ranks):
    for name, (size, source) in PROGRAMS.items():
        text = on_ranks("import numpy as np\n" + textwrap.dedent(source).strip(), size).text
        assert "; no finding" in text, (name, text)
        assert "tried " in text, (name, text)


def test_a_schedule_is_replayed_exactly(on_ranks):
    source = "got = [comm.recv() for _ in '123'] if rank == 0 else comm.send(rank, 0)\ngot"
    explored = on_ranks(source, 4)
    assert "tried all 12 schedules" in explored.text
    found = re.findall(r"rank 0: (\[.*\])\n.*--replay (\S+)", explored.text)
    assert len(found) == 3
    (shown,) = [one for one in explored.displays if "replay" in one["text/plain"]]
    assert all(token in shown["text/plain"] for _, token in found)
    assert shown["text/html"].count("<svg") == 3
    result, token = found[-1]
    for _ in range(10):
        assert f"rank 0 → {result}" in on_ranks(source, 4, f"--replay {token}").text
    assert "print(got)" not in on_ranks("print(got)", 4, "--simulate").text
    other = on_ranks("print(rank)", 4, f"--replay {token}").text
    assert "recorded for another cell" in other


def test_each_schedule_begins_with_the_variables_before(on_ranks):
    on_ranks("kept = [rank]", 2, "--simulate")
    source = (
        "kept.append(9); new = 1\nif rank == 0: comm.send(0, 1)\nelse: comm.recv()\nprint(kept)"
    )
    assert "rank 0 │ [0, 9]\nrank 1 │ [1, 9]" in on_ranks(source, 2).text
    after = on_ranks("print(kept, 'new' in globals())", 2, "--simulate").text
    assert after == "rank 0 │ [0] False\nrank 1 │ [1] False\n"


def test_output_that_differs_in_the_same_schedule_is_not_compared(on_ranks):
    source = """
    import os
    comm.send(1, 0) if rank else comm.recv() + comm.recv()
    print(os.urandom(8) if rank else "received")
    """
    text = on_ranks(textwrap.dedent(source).strip(), 3).text
    assert "tried all 4 schedules" in text
    assert "no finding" in text
    assert "not compared: the output of ranks 1–2" in text


def test_a_posted_collective_that_a_rank_does_not_call_is_reported(on_ranks):
    text = on_ranks("request = comm.Ibarrier() if rank else None", 3).text
    assert "lost: comm.Ibarrier" in text
    assert "was not called by rank 0" in text


def test_a_limit_is_named(on_ranks):
    source = (
        "print(sum(comm.recv() for _ in range(6))) if not rank else [comm.send(1, 0) for _ in '12']"
    )
    text = on_ranks(source, 4, "--explore 20").text
    assert "stopped after 20 schedules" in text
    assert "not all, more with --explore 200" in text


def test_messages_are_drawn_over_time_or_as_a_map(on_ranks):
    source = "comm.send(1, (rank + 1) % size); comm.recv(source=(rank - 1) % size)"
    few = on_ranks(source, 4, "--simulate --picture").displays[-1]["text/html"]
    assert few.count("<polygon") == 4
    assert "rank 3</text>" in few
    many = on_ranks(source, 100, "--simulate --picture").displays[-1]["text/html"]
    assert "ranks 0–1 to ranks 0–1" in many
    lost = on_ranks("if rank == 0: comm.send(1, 1)", 2, "--simulate --picture").displays[-1]
    assert "never received" in lost["text/html"]


def test_the_picture_of_a_finding_marks_the_receive_that_races_and_says_what_was_sent(on_ranks):
    source = "print(comm.recv(), comm.recv()) if not rank else comm.send({'from': rank}, 0)"
    picture = on_ranks(source, 3, "--explore").displays[-1]["text/html"]
    # In each of the two schedules the first receive, and once more in the legend.
    assert picture.count("<circle") == 4
    assert picture.count("could get another message</text>") == 2
    assert "{&#x27;from&#x27;: 1} (could also get another message)" in picture
    only = "print(comm.recv()) if not rank else comm.send(print, 0)"
    picture = on_ranks(only, 2, "--simulate --picture").displays[-1]["text/html"]
    # The code of a class or a function that was sent is not run for a picture.
    assert ("<circle" in picture, re.findall(r" B[:<]", picture)[-1]) == (False, " B<")


def test_other_options_are_refused(on_ranks):
    for line, found in {
        "--explore --replay e0--00000000": "found both",
        "--replay x": "found --replay x",
        "--explore 0": "found '0'",
        "--picture": "--picture needs --simulate",
    }.items():
        assert found in on_ranks("pass", 2, line).text
