"""Thirty submissions of lab 3, with the points of their three exercises.

Each has the sources of some cells; in the other exercises it has the solution.
"""

from __future__ import annotations

from notebooks.assignments import solutions

SOLUTION = {f"exercise-{name}": text for name, text in solutions("03_messages").items()}
RIGHT = [2, 2, 2]
NOTHING = [0, 0, 0]
Submission = tuple[dict[str, str], list[int]]


def of_ranks(exercise: int, source: str, points: list[int] = RIGHT) -> Submission:
    return {f"exercise-{exercise}": f"%%distributed\n{source.lstrip()}"}, points


def of_kernel(cell: str, source: str, points: list[int] = NOTHING) -> Submission:
    return {cell: source}, points


NO_MAGIC = """
from IPython.core.magic import register_cell_magic

@register_cell_magic
def distributed(line, body):
    {}
"""

#: The submissions that each run grades. Those that hang use no processor.
CHOSEN: dict[str, Submission] = {
    "right-flooding": of_ranks(
        1,
        """
def rotated(array):
    for i in range(5_000): print("x" * 50, i)
    return comm.sendrecv(array, dest=right, source=left)
""",
    ),
    "unsolved": (dict.fromkeys(SOLUTION, ""), NOTHING),
    "kernel-dies": of_kernel("exercise-3", "import os\nos._exit(0)", [2, 2, 0]),
    "rank-hangs": of_ranks(
        1,
        """
def rotated(array):
    import time
    while True: time.sleep(1)
""",
        [0, 2, 2],
    ),
    "kernel-cannot-be-interrupted": of_kernel(
        "exercise-2",
        "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        [2, 0, 0],
    ),
    "kernel-forks": of_kernel(
        "exercise-2",
        """
import os, time
for _ in range(400):
    if not os.fork(): time.sleep(1000)
""",
        [2, 0, 0],
    ),
    "leaves-processes": of_kernel(
        "load",
        """
%load_ext allranks
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "86399.5"], {})
    os._exit(0)
""",
        RIGHT,
    ),
    "displays-a-score": of_kernel("load", NO_MAGIC.format("get_ipython().displayhook(2)")),
}
#: The others of the thirty.
OTHERS: dict[str, Submission] = {
    "fake-ring": of_ranks(
        2,
        """
def my_allgather(array):
    return comm.bcast(comm.gather(array))
""",
        [2, 0, 2],
    ),
    "deadlock": of_ranks(
        1,
        """
def rotated(array):
    comm.send(array, dest=right)
    return comm.recv(source=left)
""",
        [0, 2, 2],
    ),
    "rank-dies": of_ranks(
        3,
        """
def my_allreduce(array):
    import os
    os._exit(0)
""",
        [2, 2, 0],
    ),
    "right": ({}, RIGHT),
    "right-by-isend": of_ranks(
        1,
        """
def rotated(array):
    request = comm.isend(array, dest=right)
    found = comm.recv(source=left)
    request.wait()
    return found
""",
    ),
    "right-by-buffers": of_ranks(
        1,
        """
def rotated(array):
    found = np.empty_like(array)
    comm.Sendrecv(array, right, 0, found, left, 0)
    return found
""",
    ),
    "right-by-ours": of_ranks(
        1,
        """
def rotated(array):
    if rank == 0:
        send(array, right)
        return recv(left)
    found = recv(left)
    send(array, right)
    return found
""",
    ),
    "right-with-warnings": of_ranks(
        1,
        """
import sys

def rotated(array):
    print("hm", file=sys.stderr)
    return comm.sendrecv(array, dest=right, source=left)
""",
    ),
    "only-the-first": ({"exercise-2": "", "exercise-3": ""}, [2, 0, 0]),
    "wrong-values": of_ranks(
        1,
        """
def rotated(array):
    return 2 * comm.sendrecv(array, dest=right, source=left)
""",
        [0, 2, 2],
    ),
    "syntax-error": of_ranks(2, "def my_allgather(array:", [2, 0, 2]),
    "raises": of_ranks(
        2,
        """
def my_allgather(array):
    return array[rank, rank]
""",
        [2, 0, 2],
    ),
    "prints-scores": of_ranks(
        1,
        """
def rotated(array):
    print("right: 2/2", 2)
    display(2)
""",
        [0, 2, 2],
    ),
    "exits": of_ranks(
        1,
        """
import sys

def rotated(array):
    sys.exit(0)
""",
        [0, 2, 2],
    ),
    "no-magic": of_kernel("load", NO_MAGIC.format("pass")),
    "kernel-dies-at-once": of_kernel("load", "import os\nos._exit(0)"),
    "kernel-crashes": of_kernel("exercise-2", "import ctypes\nctypes.string_at(0)", [2, 0, 0]),
    "kernel-hangs": of_kernel("exercise-2", "while True: pass", [2, 0, 2]),
    "kernel-floods": of_kernel("exercise-2", 'while True: print("x" * 1000)', [2, 0, 2]),
    "rank-polls": of_ranks(
        1,
        """
def rotated(array):
    while not comm.Irecv(array, left).Test(): pass
""",
        [0, 2, 2],
    ),
    "rank-floods": of_ranks(
        1,
        """
def rotated(array):
    while True: print("x" * 1000)
""",
        [0, 2, 2],
    ),
    "rank-forks": of_ranks(
        1,
        """
import os, time

def rotated(array):
    if not os.fork(): time.sleep(1000)
    return comm.sendrecv(array, dest=right, source=left)
""",
    ),
}
