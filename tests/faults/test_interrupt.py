"""An interrupt ends the cell on every rank and keeps ranks and variables; a second ends ranks that
are still in it.

How both are told, and a timeout: docs/failures.md and docs/cells.md.
"""

import pytest

from tests.faults.notebook import KEPT, name_of
from tests.kernel import wait_until

SETTLED_SECONDS = 60  # less than what the cells sleep
CELLS = {
    "sleeping": "import time\nprint('here')\ntime.sleep(600)",
    # A comparison that sleeps: the interrupt comes in the first one, and the second one blocks.
    "just before a call blocks": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nminutes = ctypes.c_void_p(600_000_000)\n"
        "n, nbytes = ctypes.c_size_t(3), ctypes.c_size_t(0)\nprint('here')\n"
        "libc.bsearch(minutes, None, n, nbytes, libc.usleep)"
    ),
    "computing": "print('here')\nwhile True:\n    pass",
    "in a finalizer": (
        "import time\nclass Held:\n    def __del__(self):\n        print('here')\n"
        "        time.sleep(2)\nheld = Held()\ndel held\nwhile True: time.sleep(0.01)"
    ),
    "in one finalizer after the other": (
        "import time\nclass Held:\n    def __del__(self):\n        print('here')\n"
        "        time.sleep(0.05)\nwhile True: Held()"
    ),
    "awaiting": "import asyncio\nprint('here')\nawait asyncio.sleep(600)",
    "in a call after it has awaited": (
        "import asyncio, time\nawait asyncio.sleep(0)\nprint('here')\ntime.sleep(600)"
    ),
    "in a coroutine's loop": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print('here')\n"
        "    while True: pass\nawait f()"
    ),
    "in a collective after it has awaited": (
        "import asyncio, time\nimport numpy as np\nawait asyncio.sleep(0)\nprint('here')\n"
        "time.sleep(600) if rank == 0 else allreduce(np.ones(3))"
    ),
    "in a shell command": "print('here')\n!sleep 600",
    "as a shell command begins": (
        "import pexpect, time\nbegin = pexpect.spawn.__init__\n"
        "def slow(*args, **options):\n    begin(*args, **options)\n    print('here')\n"
        "    time.sleep(600)\npexpect.spawn.__init__ = slow\n"
        "try:\n    get_ipython().system('sleep 600')\nfinally:\n    pexpect.spawn.__init__ = begin"
    ),
    "in captured output": "print('here')\nlines = !sleep 600",
    "in a script": "print('here')\nget_ipython().run_cell_magic('bash', '', 'sleep 600')",
    "waiting for a thread": "import threading\nprint('here')\nthreading.Event().wait()",
    "waiting in a collective": (
        "import time\nimport numpy as np\nprint('here')\n"
        "time.sleep(600) if rank == 0 else allreduce(np.ones(3))"
    ),
}


def sleepers(notebook):
    return [child.pid for child in notebook.children() if name_of(child) == "sleep"]


@pytest.mark.parametrize("source", CELLS.values(), ids=CELLS.keys())
def test_an_interrupt_ends_the_cell_and_nothing_else(notebook, source):
    cell = notebook.start_on_ranks(f"{source}\nprint('after')").wait_for("ranks 0–3 │ here")
    notebook.drain(0.3)
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS)
    # Ranks that wait are not those that the interrupt is about.
    whose = "ranks 0–3 of 4" if "allreduce" not in source else "of 4 at line"
    cell.fails("CellInterrupted", whose, "KeyboardInterrupt").lacks("│ after", "allranks/engine")
    assert notebook.on_ranks("kept").text == KEPT
    following = notebook.on_ranks("import numpy as np\nfloat(allreduce(np.ones(2), op=Sum)[0])")
    assert following.text == "ranks 0–3 → 4.0\n"
    wait_until(lambda: not sleepers(notebook), lambda: f"the end of {sleepers(notebook)}")


def test_an_interrupt_shows_one_traceback_and_for_whom_the_others_waited(notebook):
    cell = notebook.start_on_ranks(
        "import time\nfrom allranks.collectives import world\n"
        "from allranks.collectives.calls.rank_state import TICKET\n"
        "if rank == 0:\n"
        "    board = world.current().board\n"
        "    while not all(board.get(other, TICKET) for other in (1, 2, 3)): pass\n"
        "    print('they wait')\n"
        "    time.sleep(600)\n"
        "barrier()"
    ).wait_for("they wait")
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS).fails("CellInterrupted", "rank 0 of 4", "KeyboardInterrupt")
    assert cell.text.count("Traceback") == 1
    assert (
        "ranks 1–3 were waiting at line 10: barrier()\n"
        "  barrier waited for rank 0 when the cell was interrupted."
    ) in cell.text


SLOW_TEXT = (
    "import time\nclass Slow({}):\n    def __str__(self):\n"
    "        print('here'); time.sleep(600)\n{}"
)
SLOW_TEXTS = {
    "an exception": ("Exception", "raise Slow()", "Slow: <str() of it was interrupted>"),
    "an interrupt": ("KeyboardInterrupt", "raise Slow()", "Slow: <str() of it was interrupted>"),
    "a cause": ("Exception", "raise KeyError('outer') from Slow()", "KeyError: 'outer'"),
    "in a group": ("Exception", "raise ExceptionGroup('several', [Slow()])", "several (1 sub-"),
    "awaiting": (
        "Exception",
        "import asyncio\nawait asyncio.sleep(0)\nraise Slow()",
        "Slow: <str() of it was interrupted>",
    ),
}


@pytest.mark.parametrize(("kind", "line", "said"), SLOW_TEXTS.values(), ids=SLOW_TEXTS.keys())
def test_an_interrupt_ends_what_an_exception_says(notebook, kind, line, said):
    cell = notebook.start_on_ranks(SLOW_TEXT.format(kind, line)).wait_for("ranks 0–3 │ here")
    notebook.drain(0.3)
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS)
    assert cell.status == "error"
    assert said in cell.error_value
    assert "raise " in cell.text
    assert notebook.on_ranks("kept").text == KEPT


def test_an_interrupt_ends_the_text_of_a_variable_in_a_long_traceback(notebook):
    notebook.on_ranks("%xmode Verbose", "-r 1").ok()
    cell = notebook.start_on_ranks(
        "import time\nclass Slow:\n"
        "    def __repr__(self):\n"
        "        print('asked', flush=True)\n"
        "        time.sleep(600)\n"
        "def divide(x): 1 / 0\n"
        "divide(Slow())",
        "-r 1",
    ).wait_for("asked")
    notebook.interrupt()
    cell.wait().fails("CellFailed", "ZeroDivisionError")
    notebook.on_ranks("%xmode Context", "-r 1").ok()


def test_an_interrupt_ends_the_pickling_of_a_value(notebook):
    cell = notebook.start_on_ranks(
        "import time\nclass Slow:\n    def __reduce__(self):\n        print('here')\n"
        "        time.sleep(600)\nSlow()",
        "-o values",
    ).wait_for("ranks 0–3 │ here")
    notebook.drain(0.3)
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS).fails("CellInterrupted", "at line 6: KeyboardInterrupt")
    assert notebook.on_ranks("kept").text == KEPT


def test_an_interrupt_ends_the_unpickling_of_a_value(notebook):
    cell = notebook.start_on_ranks(
        "class Slow:\n    def __reduce__(self):\n"
        "        return exec, ('import time; print(\"reads\"); time.sleep(600)',)\nSlow()",
        "-o values",
    ).wait_for("reads")
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS).fails("KeyboardInterrupt")
    cell.says("the cell has run, and reading its values was interrupted. The ranks keep running.")
    assert notebook.on_ranks("kept").text == KEPT


def test_what_an_exception_says_last_is_shown(notebook):
    cell = notebook.on_ranks(
        "error = ValueError('first')\ntry:\n    raise error\nexcept ValueError:\n"
        "    get_ipython().showtraceback()\nerror.args = ('last',)\nraise error"
    )
    assert cell.error_value.endswith(": ValueError: last")


def test_an_interrupt_of_nothing_or_of_a_cell_of_the_notebook_leaves_the_ranks_alone(notebook):
    notebook.interrupt()
    notebook.drain(0.5)
    assert notebook.on_ranks("kept").text == KEPT
    cell = notebook.start("import time\nprint('here')\ntime.sleep(600)").wait_for("here")
    notebook.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_name == "KeyboardInterrupt"
    assert notebook.on_ranks("kept").text == KEPT


@pytest.mark.parametrize(
    ("step", "status"), [("init_metadata", "error"), ("finish_metadata", "ok")]
)
def test_an_interrupt_just_before_or_after_a_cell_is_answered(notebook, step, status):
    """ipykernel takes these steps of a request before and after the cell's own code."""
    # The last step of this cell itself comes first.
    notebook.run(
        f"import signal\nkernel = get_ipython().kernel\nstep = kernel.{step}\n"
        f"own = [{step == 'finish_metadata'}]\n"
        "def interrupted(*arguments):\n"
        "    if own.pop():\n        own.append(False)\n        return step(*arguments)\n"
        f"    kernel.{step} = step\n    signal.raise_signal(signal.SIGINT)\n"
        "    return step(*arguments)\n"
        f"kernel.{step} = interrupted"
    )
    cell = notebook.on_ranks("kept")
    assert cell.status == status
    assert cell.error_name == ("KeyboardInterrupt" if status == "error" else "")
    assert notebook.on_ranks("kept").text == KEPT


#: The next cell begins once an interrupt of it has come.
BEGINS_LATE = (
    "import gc, time\nfrom allranks.engine.interrupts import Interrupts\n"
    "(interrupts,) = [found for found in gc.get_objects() if type(found) is Interrupts]\n"
    "transformers = get_ipython().input_transformers_cleanup\n"
    "def late(lines):\n    transformers.clear()\n    print('here')\n"
    "    while not interrupts._early: time.sleep(0.02)\n"
    "    return lines\ntransformers.append(late)"
)


def test_an_interrupt_before_the_first_statement_shows_no_own_frames(notebook):
    assert notebook.on_ranks(BEGINS_LATE).status == "ok"
    cell = notebook.start_on_ranks("kept").wait_for("ranks 0–3 │ here")
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS)
    cell.says("KeyboardInterrupt: it came before the cell's first statement").lacks(".py")
    assert notebook.on_ranks("kept").text == KEPT


def test_a_cell_may_answer_an_interrupt_itself_and_only_ranks_that_run_are_interrupted(notebook):
    cell = notebook.start_on_ranks(
        "import time\ntry:\n    print('here')\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('stopped early')"
    ).wait_for("ranks 0–3 │ here")
    notebook.drain(0.3)
    notebook.interrupt()
    assert cell.wait(SETTLED_SECONDS).status == "ok"
    assert "ranks 0–3 │ here\n          │ stopped early" in cell.text
    # The others have ended before: their values are there.
    cell = notebook.start_on_ranks(
        "import time\nif rank == 2: print('here'); time.sleep(600)\n10 * rank"
    )
    cell.wait_for("here")
    for other in (0, 1, 3):
        cell.wait_for(f"rank {other} → {10 * other}")
    notebook.drain(0.5)
    notebook.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_value == "rank 2 of 4 at line 3: KeyboardInterrupt"
    assert notebook.on_ranks("kept").text == KEPT


@pytest.mark.replaces
def test_ranks_that_do_not_hear_an_interrupt_are_replaced_and_the_others_keep_their_variables(
    notebook, tmp_path
):
    """Two wait in C: one of them lets its other threads run Python."""
    notebook.on_ranks("saved = rank\nkeep('saved')").ok()
    cell = notebook.start_on_ranks(
        "import ctypes, os, signal\nif rank == 0: raise ValueError('no data')\n"
        "if rank < 3:\n    library = ctypes.PyDLL(None) if rank == 1 else ctypes.CDLL(None)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        f"    os.mkdir(os.path.join({str(tmp_path)!r}, str(rank)))\n    library.pause()"
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    notebook.interrupt()
    cell.wait_for("; ranks 1–2 will be killed by the next interrupt and replaced: ")
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS).fails(
        "CellInterrupted", "rank 0 of 4 at line 3: ValueError: no data"
    )
    cell.says(
        "interrupted twice: ranks 1–2 did not stop, so ranks 1–2 were killed",
        "ranks 1–2 were replaced, with saved kept",
        "; ranks 0, 3 kept theirs",
    )
    found = notebook.on_ranks("comm.allreduce(rank), saved, globals().get('kept')").text
    has = "rank 0 → (6, 0, 0)\nrank 1 → (6, 1, None)\nrank 2 → (6, 2, None)\nrank 3 → (6, 3, 30)\n"
    assert found == has


def test_all_ranks_end_if_one_does_not_hear_an_interrupt_and_dead_ones_are_not_replaced(
    notebook, tmp_path
):
    notebook.run("%distributed heal off")
    go, gone = tmp_path / "go", tmp_path / "gone"
    cell = notebook.start_on_ranks(
        "import os, signal, time\nif rank == 1:\n    print('here')\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        # Else it would hear an interrupt between the two.
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"    os.mkdir({str(gone)!r}); sum(range(10**13))\n10 * rank"
    )
    cell.wait_for("here")
    for other in (0, 2, 3):
        cell.wait_for(f"rank {other} → {10 * other}")
    go.touch()
    wait_until(gone.exists)  # from here on the rank lets none of its threads send anything
    notebook.interrupt()
    cell.wait_for("still in the cell 2 s after the interrupt: rank 1", SETTLED_SECONDS)
    assert "; all ranks will be killed by the next interrupt, because " in cell.text
    notebook.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_name == "CellInterrupted"
    assert "interrupted twice: rank 1 did not stop, so all 4 ranks were killed" in cell.error_value
    notebook.run("%distributed heal on")


def test_an_interrupt_that_ipython_would_drop_ends_the_cell(notebook):
    """IPython catches what the callbacks of its events raise, KeyboardInterrupt too."""
    notebook.on_ranks(
        "import time\n"
        "def slowly(info):\n"
        "    if 'after slowly' in info.raw_cell:\n"
        "        print('in a callback')\n"
        "        time.sleep(600)\n"
        "get_ipython().events.register('pre_run_cell', slowly)"
    )
    cell = notebook.start_on_ranks("# after slowly\nimport time\ntime.sleep(600)")
    cell.wait_for("in a callback")
    notebook.interrupt()
    cell.wait(SETTLED_SECONDS)
    assert cell.error_name == "CellInterrupted"
    notebook.on_ranks("get_ipython().events.unregister('pre_run_cell', slowly)")
