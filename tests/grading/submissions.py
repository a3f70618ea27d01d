"""Submissions of lab 3, with the points of their three exercises.

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

READS = """
import glob, json

solution = ""
for name in glob.glob({!r}, recursive=True):
    for cell in json.load(open(name))["cells"]:
        if cell.get("id") == "exercise-2":
            solution = "".join(cell["source"]).partition("BEGIN SOLUTION")[2] or solution
exec(solution)
"""

WRITES = """
import glob, os, sys

def writes(folder):
    try:
        open(os.path.join(folder, "nbgrader_config.json"), "w").close()
    except OSError:
        return False
    return True

# What it writes there, nbgrader would run later.
if any(map(writes, ["../../..", os.path.expanduser("~/.jupyter"), sys.prefix])):
    raise SystemExit
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
        [2, 0, 2],
    ),
    "has-no-port-and-leaves-processes": of_kernel(
        "load",
        """
import json, os
from ipykernel.connect import get_connection_info
# At a port, any account of the machine could read the tests.
assert json.loads(get_connection_info())["transport"] == "ipc"
%load_ext allranks
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
#: The others.
OTHERS: dict[str, Submission] = {
    "kernel-forks": of_kernel(
        "exercise-2",
        """
import os, time
for _ in range(400):
    if not os.fork(): time.sleep(1000)
""",
        [2, 0, 2],
    ),
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
    "kernel-crashes": of_kernel("exercise-2", "import ctypes\nctypes.string_at(0)", [2, 0, 2]),
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
#: Two of each kind of attack on the grader, and of right solutions that were once judged wrongly.
ATTACKS: dict[str, Submission] = {
    "zeros-and-a-guess-of-the-array": of_ranks(
        1,
        """
def rotated(array):
    comm.sendrecv(0 * array, dest=right, source=left)
    return np.full(array.size, 1.0 + left)
""",
        [0, 2, 2],
    ),
    "zeros-and-a-guess-of-the-sum": of_ranks(
        3,
        """
def my_allreduce(array):
    piece = np.zeros(array.size // size)
    for _ in range(2 * (size - 1)):
        comm.sendrecv(piece, dest=right, source=left)
    return sum(array - rank + r for r in range(size))
""",
        [2, 2, 0],
    ),
    "base-class-beside-a-fake-ring": of_ranks(
        2,
        """
def my_allgather(array):
    for _ in range(1, size):
        comm.sendrecv(0 * array, dest=right, source=left)
    return MPI.Intracomm.allgather(comm, array)
""",
        [2, 0, 2],
    ),
    "saved-method-beside-a-fake-ring": of_ranks(
        2,
        """
allgather_of_mpi, copy = MPI.Intracomm.allgather, MPI.Intracomm(comm)

def my_allgather(array):
    for _ in range(1, size):
        comm.sendrecv(0 * array, dest=right, source=left)
    return allgather_of_mpi(copy, array)
""",
        [2, 0, 2],
    ),
    "own-expect": of_ranks(
        1,
        """
import contextlib

def expect(*_, **__):
    return contextlib.nullcontext()

def rotated(array):
    return comm.allgather(array)[left]
""",
        [0, 2, 2],
    ),
    "own-expect-in-its-module": of_ranks(
        1,
        """
import contextlib
import allranks.grading

allranks.grading.expect = lambda *_, **__: contextlib.nullcontext()
allranks.grading.expectation.expect.__exit__ = lambda *_: None

def rotated(array):
    return comm.allgather(array)[left]
""",
        [0, 2, 2],
    ),
    "replaced-comparison": of_ranks(
        1,
        """
np.array_equal = np.allclose = lambda *_, **__: True

def rotated(array):
    return comm.sendrecv(0 * array, dest=right, source=left)
""",
        [0, 2, 2],
    ),
    "own-numpy-and-random-numbers": of_ranks(
        1,
        """
import types

np.random.default_rng = lambda: types.SimpleNamespace(random=np.ones)
np = types.SimpleNamespace(**{**vars(np), "array_equal": lambda *_: True})
size, rank = size, 0

def rotated(array):
    return comm.sendrecv(0 * array, dest=right, source=left)
""",
        [0, 2, 2],
    ),
    "reads-the-solution": of_ranks(2, READS.format("../../../*/**/*.ipynb"), [2, 0, 2]),
    "reads-the-solution-in-the-kernel": of_kernel(
        "exercise-2",
        READS.format("/proc/*/cwd/source/*/*.ipynb")
        + "get_ipython().run_cell_magic('distributed', '', solution)",
        [2, 0, 2],
    ),
    "keeps-the-last-line": of_kernel(
        "load",
        """
%load_ext allranks
get_ipython().input_transformers_cleanup.append(
    lambda lines: lines if 'passed' not in ''.join(lines) else lines[-1:]
)
""",
        RIGHT,
    ),
    "keeps-the-last-line-of-a-wrong-answer": (
        {
            "load": """
%load_ext allranks
get_ipython().input_transformers_cleanup.append(lambda lines: lines[-1:])
""",
        },
        NOTHING,
    ),
    "keeps-the-last-line-on-the-ranks": of_ranks(
        1,
        """
get_ipython().input_transformers_post.append(lambda lines: lines[-1:])
rotated = None
""",
        [0, 2, 2],
    ),
    "rank-ignores-interrupts": of_ranks(
        1,
        """
import time

def rotated(array):
    while True:
        try: time.sleep(1000)
        except BaseException: pass
""",
        [0, 2, 2],
    ),
    "rank-dies-first": of_ranks(
        1,
        """
import os

def rotated(array):
    if rank == 1: os._exit(0)
    return comm.sendrecv(array, dest=right, source=left)
""",
        [0, 2, 2],
    ),
    "kills-all-ranks": of_ranks(
        1,
        """
import os, signal

def rotated(array):
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        [0, 2, 2],
    ),
    "writes-settings-of-nbgrader": of_ranks(2, WRITES + SOLUTION["exercise-2"]),
    "answers-by-a-pipe": of_kernel(
        "exercise-2",
        "import os, pathlib\npathlib.Path.write_text = lambda self, _: os.mkfifo(self)",
        [2, 0, 0],
    ),
    "displays-without-end": of_ranks(
        1,
        """
from IPython.display import HTML

def rotated(array):
    for _ in range(20): display(HTML("x" * 1_000_000))
    return comm.sendrecv(array, dest=right, source=left)
""",
    ),
    "kernel-displays-without-end": of_kernel(
        "load",
        """
%load_ext allranks
from IPython.display import HTML, display
shown = display(HTML("x"), display_id=True)
for _ in range(30): display(HTML("x" * 1_000_000))
for _ in range(5_000): display(HTML(""))
shown.update(HTML("x" * 50_000_000))
""",
        RIGHT,
    ),
    "right-by-a-vector": of_ranks(
        1,
        """
def rotated(array):
    pairs, found = np.zeros((array.size, 2)), np.empty_like(array)
    pairs[:, 1] = array
    column = MPI.DOUBLE.Create_vector(array.size, 1, 2).Commit()
    comm.Sendrecv([pairs.reshape(-1)[1:], 1, column], right, 0, found, left, 0)
    return found
""",
    ),
    "own-module-in-place-of-the-kernels": of_ranks(1, "rotated = None", [0, 2, 2]),
    "own-module-in-place-of-numpy": of_ranks(
        1,
        """
np.array_equal = np.allclose = lambda *_, **__: True

def rotated(array):
    return comm.sendrecv(0 * array, dest=right, source=left)
""",
        [0, 2, 2],
    ),
    "right-by-an-own-module": (
        {
            "load": "import helper\n%load_ext allranks",
            "exercise-1": """%%distributed
from helper import size_of_ring

def rotated(array):
    assert size_of_ring == 4
    return comm.sendrecv(array, dest=right, source=left)
""",
        },
        RIGHT,
    ),
    "right-by-a-contiguous-type": of_ranks(
        2,
        """
def my_allgather(array):
    whole = MPI.DOUBLE.Create_contiguous(array.size).Commit()
    result = [array] + [np.empty_like(array) for _ in range(size - 1)]
    for step in range(1, size):
        comm.Sendrecv([result[step - 1], 1, whole], right, 0, [result[step], 1, whole], left, 0)
    return [result[(rank - r) % size] for r in range(size)]
""",
    ),
}
#: Files beside a submission's notebook, by their names.
FILES = {
    "right-by-an-own-module": {"helper.py": "size_of_ring = 4"},
    "own-module-in-place-of-the-kernels": {
        "ipykernel_launcher.py": """
import os, runpy, sys

sys.path[:] = [each for each in sys.path if each and each != os.getcwd()]
from allranks.cluster.cells import Cells

begin = Cells.begin
Cells.begin = lambda self, source, *given, **named: begin(
    self, source.splitlines()[-1] if "passed" in source else source, *given, **named
)
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""
    },
    "own-module-in-place-of-numpy": {
        "numpy.py": """
import os, sys

if not os.path.exists("first"):
    open("first", "w").close()
    raise ImportError  # while the grader keeps the originals
del sys.modules["numpy"]
path = [*sys.path]
sys.path[:] = [each for each in path if each and each != os.getcwd()]
import numpy
sys.path[:] = path
"""
    },
}
