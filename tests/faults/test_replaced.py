"""A cell may replace or close what the rank itself uses; it ends, and the next one works."""

import re

import pytest

from tests.faults.notebook import KEPT

VALUE = re.compile(r"^(?:rank \d)? +→ (\d+)$", re.MULTILINE)
NEXT = "import numpy as np\nprint('printed')\nfloat(allreduce(np.ones(2), op=Sum)[0])"
#: By what is replaced, and whether that is there again for the next cell.
REPLACED = {
    "json": (
        "import json; json.dumps = lambda x: x\n"
        "json.loads = json.JSONEncoder = json.JSONDecoder = None",
        False,
    ),
    "a clock that fails": ("import time; time.monotonic = lambda x: 0", False),
    "a clock that stands": ("import time; time.monotonic = time.time = lambda: 0.0", False),
    "time.sleep": ("import time; time.sleep = None", False),
    "os.getpid": ("import os; os.getpid = lambda x: 0; os._exit = None", False),
    "signal.signal": ("import signal; signal.signal = signal.pthread_kill = None", False),
    "pickle": ("import pickle; pickle.loads = pickle.dumps = None", False),
    "asyncio": (
        "import asyncio; asyncio.ensure_future = asyncio.create_task = asyncio.wait = None",
        False,
    ),
    "asyncio's tasks": ("import asyncio; asyncio.Task = asyncio.tasks.ensure_future = None", False),
    "zmq": ("import zmq; zmq.Socket = zmq.Poller = None", False),
    "print": ("import builtins; builtins.print = lambda x, y: x", False),
    "all that can be called": (
        "import builtins\nfor name in dir(builtins):\n"
        "    if callable(getattr(builtins, name)): setattr(builtins, name, None)",
        True,
    ),
    "builtins deleted": ("import builtins; del builtins.max, builtins.Exception", True),
}
REMEMBER = """
import asyncio, builtins, json, linecache, os, pickle, signal, sys, time, traceback, zmq
modules = (asyncio, json, linecache, os, pickle, signal, time, traceback, zmq)
replaced = {
    module.__name__: dict(vars(module)) for module in modules
} | {"builtins": dict(vars(builtins))}
"""
RESTORE = """
import sys
for module, names in replaced.items():
    vars(sys.modules[module]).update(names)
"""


@pytest.fixture(scope="module", autouse=True)
def _remember(notebook):
    notebook.on_ranks(REMEMBER)


@pytest.fixture(autouse=True)
def _restore(notebook):
    yield
    notebook.on_ranks(RESTORE)
    check_kept(notebook)


def check_kept(notebook):
    # A rank may say, before any of them, what its own threads could not do meanwhile.
    text = notebook.on_ranks("kept").text
    assert sorted(VALUE.findall(text)) == VALUE.findall(KEPT), text


@pytest.mark.parametrize(("source", "mended"), REPLACED.values(), ids=REPLACED.keys())
def test_a_cell_may_replace_what_the_wire_needs(notebook, source, mended):
    assert ("restored" in notebook.on_ranks(source).text) == mended
    check_kept(notebook)


def test_what_a_cell_gives_away_of_ipython_and_its_streams(notebook):
    # An interrupt may come while IPython restores exit and quit; here it has nothing to restore.
    assert notebook.on_ranks("get_ipython().builtin_trap._orig_builtins.clear()").text == ""
    cell = notebook.on_ranks("sorted(get_ipython().builtin_trap._orig_builtins)")
    assert "→ ['exit', 'get_ipython', 'quit']" in cell.text
    cell = notebook.on_ranks(
        "import sys\nclass Loud:\n    def __init__(self, to): self.to = to\n"
        "    def write(self, text): self.to.write(text.upper())\n"
        "    def flush(self): raise TypeError\n"
        "sys.stdout = Loud(sys.stdout)",
        "-r 1",
    )
    assert (cell.status, cell.text) == ("ok", "")
    assert notebook.on_ranks("print('loud')", "-r 1").text == "rank 1 │ LOUD\n"
    notebook.on_ranks("sys.stdout = sys.stdout.to", "-r 1")


@pytest.mark.parametrize("failing", ["1 / 0", "raise SystemExit(1)"])
def test_an_error_is_told_after_what_tells_it_is_replaced(notebook, failing):
    source = (
        "import json, linecache, time, traceback; json.dumps = time.monotonic = None; "
        "linecache.getlines = traceback.format_exception = traceback.walk_tb = None\n"
    )
    notebook.on_ranks(source + failing).fails("CellFailed", "at line 3")


def test_collectives_of_new_arrays_need_nothing_that_json_holds(notebook):
    notebook.on_ranks(
        "import json\nimport numpy as np\n"
        "json.dumps = json.loads = json.JSONEncoder = json.JSONDecoder = None\n"
        "total = allreduce(np.ones(321), Sum)\n"
        "mine = scatter(np.arange(8.0).reshape(4, 2) if rank == 1 else None, 1)\n"
        "total.sum().item(), mine.tolist()",
    ).says("rank 3 → (1284.0, [[6.0, 7.0]])")
    cell = notebook.on_ranks("allreduce(np.ones(5 + rank))")
    assert "CollectiveMismatch" in cell.error_value
    assert "rank 3 has (8,)" in cell.text


def test_an_interrupt_is_heard_where_the_clock_is_replaced(notebook):
    cell = notebook.start_on_ranks(
        "import signal, time\nsleep = time.sleep\n"
        "time.monotonic = time.sleep = signal.pthread_kill = None\nprint('here')\nsleep(600)"
    ).wait_for("here")
    notebook.drain(0.3)
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"


def test_an_interrupt_ends_the_flush_of_a_stream_of_a_cell(notebook):
    cell = notebook.start_on_ranks(
        "import sys, time\nclass Slow:\n"
        "    def write(self, text): pass\n"
        "    def flush(self):\n"
        "        sys.__stdout__.write('flushes\\n')\n"
        "        time.sleep(600)\n"
        "sys.stdout = Slow()",
        "-r 1",
    ).wait_for("flushes")
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"
    notebook.on_ranks("sys.stdout = sys.__stdout__", "-r 1").ok()


def test_a_cell_may_end_the_zmq_context_that_programs_share(notebook):
    # It waits for ipyparallel's sockets, which are in it: what matters is that it hears.
    cell = notebook.start_on_ranks("import zmq\nprint('here')\nzmq.Context.instance().term()")
    cell.wait_for("here")
    notebook.drain(0.3)
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"
    assert notebook.on_ranks(NEXT).text.endswith("→ 4.0\n")


CLOSED = {
    "os.dup2(devnull, 1)": "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
    "os.closerange(0, 3)": "os.closerange(0, 3)",
    "a file in its place": "os.close(1); file = open(os.devnull, 'w')",
    "sys.stdout.close()": "sys.stdout.close()",
    "sys.stderr.close()": "sys.stderr.close()",
    "sys.stdout.detach()": "buffer = sys.stdout.detach()",
    "sys.stdout = None": "sys.stdout = None",
    "del sys.stdout": "del sys.stdout",
    "sys.stdout is closed": "sys.stdout = open(os.devnull, 'w'); sys.stdout.close()",
}
WRITES = (
    "import os, subprocess, sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    "os.system('echo child; echo too >&2; cat')\nos.write(1, b'descriptor\\n')"
)


@pytest.mark.parametrize("source", CLOSED.values(), ids=CLOSED.keys())
def test_the_next_cell_has_the_streams_that_one_has_closed(notebook, source):
    notebook.on_ranks(f"import os, sys\n{source}", "-r 1").says("this cell closed or redirected")
    cell = notebook.on_ranks(f"{WRITES};", "-r 1")
    assert cell.text == (
        "rank 1 │ out\n       ! err\n       │ child\n       │ too\n       │ descriptor\n"
    )


def test_a_file_with_the_number_of_a_closed_stream_may_be_closed_between_two_cells(notebook):
    notebook.on_ranks("import os\nos.close(1); file = open(os.devnull, 'w')", "-r 1").ok()
    notebook.run("file = None\n%distributed push file -r 1").ok()
    assert notebook.on_ranks("print('out')", "-r 1").text == "rank 1 │ out\n"


#: How one rank loses what it needs to go on, and what is said of that.
LOST = {
    "its log": (
        "import os, time\nif rank == 1:\n"
        "    names = [int(name) for name in os.listdir('/proc/self/fd') if int(name) > 2]\n"
        "    for number in names:\n"
        "        try:\n"
        "            if os.readlink(f'/proc/self/fd/{number}').endswith('rank-1.log'):\n"
        "                os.close(number)\n"
        "        except OSError:\n            pass\n"
        "    time.sleep(600)",
        [
            "rank 1 of 4: ended with exit code 70",
            "needs its own file descriptors (",
            "which a cell has closed, so it ends",
            "instead of all that is open",
        ],
    ),
    "all descriptors": (
        "import os\nimport numpy as np\nif rank == 1:\n    os.closerange(3, 100_000)\n"
        "while True: allreduce(np.ones(3))",
        ["rank 1 of 4"],
    ),
    "its words": (
        "if rank == 1:\n    from allranks.engine import wire\n    wire.encode = None",
        [
            "rank 1 of 4",
            "ended with exit code 70",
            "rank 1 cannot report the end of its cell to the notebook, so it ends",
        ],
    ),
}


@pytest.mark.replaces
@pytest.mark.parametrize(("source", "said"), LOST.values(), ids=LOST.keys())
def test_a_rank_that_cannot_go_on_ends_and_says_why(notebook, source, said):
    cell = notebook.on_ranks(source)
    notebook.on_ranks(f"{REMEMBER}kept = 10 * rank", "-r 1")
    assert cell.error_name == "RankDied"
    assert [part for part in said if part not in cell.text + cell.error_value] == [], cell.text
    assert "no space left" not in cell.text


def test_a_cell_that_replaces_a_name_of_the_rank_is_named_until_it_is_restored(notebook):
    replaced = notebook.on_ranks("from math import *")
    again = "which each rank has. To have it again: from allranks.batch import log"
    assert replaced.text == f"ranks 0–3 · this cell replaced log, {again}\n"
    failed = notebook.on_ranks("log(loss=1)")
    assert f"\nIn[{replaced.execution_count}] has replaced log, {again}" in failed.text
    assert notebook.on_ranks("from allranks.batch import log\nlog(loss=1)").status == "ok"
