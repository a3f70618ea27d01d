"""A cell that fails says who failed, where and why, once; ranks and variables live on."""

import pytest

pytestmark = pytest.mark.usefixtures("_ranks_live_on")


def test_exceptions_that_differ_are_shown_with_their_ranks_and_one_traceback(notebook):
    """Other reports of exceptions, whole: docs/failures.md and docs/errors.md."""
    cell = notebook.on_ranks("[int, 1 / (rank - 1) and {}.pop, list, [].pop][rank]('five')")
    assert cell.error_value.startswith("ranks 0–1, 3 of 4 at line 2: ValueError: invalid literal")
    for rank, name in ((0, "ValueError"), (1, "ZeroDivisionError"), (3, "TypeError")):
        cell.says(f"rank {rank} (", f"raised {name} at line 2")
    assert "rank 2 finished the cell" in cell.text
    cell = notebook.on_ranks("def fail():\n    raise ValueError(f'row {rank}')\nfail()")
    assert cell.text.count("Traceback (most recent call last)") == 1
    cell.says(*(f"rank {rank}: ValueError: row {rank}" for rank in range(4)))


def test_a_return_and_an_exit_are_shown_and_ranks_that_wait_are_told(notebook):
    notebook.on_ranks("kept = 'overwritten'\nreturn kept").fails("InvalidCell").says(
        "'return' outside function"
    )
    cell = notebook.on_ranks("import sys\nprint('before')\nsys.exit(3)\nprint('after')")
    assert cell.fails("CellFailed").error_value == "ranks 0–3 of 4 at line 4: SystemExit: 3"
    cell.says("the rank keeps running, with its variables", "before").lacks("│ after")
    cell = notebook.on_ranks("why = f'no data for {rank}'\nif rank > 1: sys.exit(why)")
    cell.fails("CellFailed").says("SystemExit: no data for 2", "SystemExit: no data for 3")
    notebook.on_ranks("import sys\nif rank == 1: sys.exit(0)\nbarrier()").fails("CellFailed").says(
        "rank 1 finished In[", "without calling barrier"
    )


@pytest.mark.parametrize(
    "end", ["sys.exit()", "sys.exit(0)", "raise SystemExit(False)", "quit()", "await leave()"]
)
def test_a_cell_that_exits_without_an_error_has_succeeded(notebook, end):
    cell = notebook.on_ranks(
        f"import sys\nasync def leave(): sys.exit(0)\nleft = rank\nprint('before')\n{end}\nleft = 9"
    )
    assert (cell.status, cell.text) == ("ok", "ranks 0–3 │ before\n")
    assert "rank 3 → 3" in notebook.on_ranks("left").text


def test_what_cannot_be_shown_says_why(notebook):
    notebook.on_ranks(
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError('inner')\n"
        "raise Odd()"
    ).fails("CellFailed", "Odd: <its text cannot be shown: RuntimeError>").says(
        "raised Odd at line 5: raise Odd()", "RuntimeError('inner')"
    )
    notebook.on_ranks(
        "class Odd:\n    def __repr__(self):\n        raise RuntimeError('no picture')\nOdd()"
    ).ok().says("RuntimeError: no picture")


SHOWN = {
    "a chain": (
        "try:\n    {}['inner']\nexcept KeyError as error:\n"
        "    raise ValueError('outer') from error",
        ["ValueError: outer", "KeyError: 'inner'", "direct cause"],
    ),
    "a cause of its cause": (
        "a, b = ValueError('a'), KeyError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        ["ValueError: a", "KeyError: 'b'", "direct cause"],
    ),
    "thousands of contexts": (
        "a = None\nfor i in range(5000):\n    b = ValueError(i)\n"
        "    b.__context__, a = a, b\nraise a",
        ["ValueError: 4999", "ValueError: 4998"],
    ),
    "a cause that cannot be read": (
        "class Odd(Exception):\n    __cause__ = property(lambda self: 1 / 0)\nraise Odd('a')",
        ["Odd: a"],
    ),
    "a group": (
        "raise ExceptionGroup('a', [ValueError('b'), ExceptionGroup('c', [OSError('d')])])",
        ["ExceptionGroup: a (2 sub-exceptions)", "| ValueError: b", "    | OSError: d"],
    ),
    "a group that is the cause of its part": (
        "a = ExceptionGroup('a', [ValueError('b')])\na.exceptions[0].__cause__ = a\nraise a",
        ["ExceptionGroup: a (1 sub-exception)", "| ValueError: b"],
    ),
    "no attribute that can be read": (
        "class Odd(Exception):\n    def __getattribute__(self, name): raise OSError(name)\n"
        "raise Odd('a')",
        ["Odd: a"],
    ),
    "a magic of the notebook": (
        "%distributed status",
        ["UsageError: expected code for the ranks, found %distributed", "in a cell of its own"],
    ),
    "an extension of the notebook": (
        "%load_ext allranks.px",
        ["UsageError: expected code for the ranks, found %load_ext allranks.px, which is a magic"],
    ),
    "no such magic": ("%no_such_magic", ["UsageError: Line magic function `%no_such_magic`"]),
}


@pytest.mark.parametrize(("source", "parts"), SHOWN.values(), ids=SHOWN.keys())
def test_an_exception_is_shown_also_where_ipython_cannot_show_it(notebook, source, parts):
    cell = notebook.on_ranks(source).fails("CellFailed", parts[0])
    assert cell.text.startswith("ranks 0–3 (")
    assert [part for part in parts if part not in cell.text] == [], cell.text
    assert len(cell.text) < 50_000


@pytest.mark.parametrize(
    "source",
    [
        "allreduce(np.array([None]))",
        "try:\n    allreduce(np.ones(2 + rank))\nfinally:\n    1 / 0",
        "comm.Bcast(np.ones(2, '>i4'))",
    ],
)
def test_a_traceback_ends_at_the_line_that_has_called_allranks_or_mpi4py(notebook, source):
    cell = notebook.on_ranks(f"import numpy as np\n{source}").fails("CellFailed")
    cell.says("Cell In[", "----> ").lacks("allranks/", "src/mpi4py")


def test_an_exception_that_something_else_shows_is_told_too(notebook):
    """As by rich, which shows tracebacks itself once it is installed."""
    cell = notebook.on_ranks(
        "shell = get_ipython()\nas_before = shell.showtraceback\n"
        "shell.showtraceback = lambda *args, **options: None\n1 / 0"
    )
    notebook.on_ranks("shell.showtraceback = as_before")
    cell.fails("CellFailed").says("line 5, in <module>", "ZeroDivisionError: division by zero")


def test_an_error_outside_of_the_cell_says_how_to_go_on(notebook):
    notebook.on_ranks("get_ipython().run_cell = None", "-r 1")
    cell = notebook.on_ranks("rank").fails("CellFailed")
    cell.says("rank 1 (", "not raised by a line of the cell", "type: %distributed restart")
    # IPython runs a cell that awaits by another method.
    notebook.on_ranks("import asyncio\nawait asyncio.sleep(0)\ndel get_ipython().run_cell", "-r 1")
    notebook.on_ranks("1 / 0").fails("CellFailed").lacks("%distributed restart")
    low = (
        "import sys\nlimit = sys.getrecursionlimit()\nsys.setrecursionlimit(60)\ndef f(): f()\nf()"
    )
    notebook.on_ranks(low).says("limit of this rank to 60. Type: %distributed restart")
    notebook.on_ranks("sys.setrecursionlimit(limit)").ok()


def test_what_is_shown_of_an_error_is_bounded_and_stops_run_all(notebook, tmp_path):
    cell = notebook.on_ranks("def again(n):\n    return again(n + 1)\nagain(0)")
    assert "RecursionError" in cell.error_value
    assert len(cell.text.splitlines()) < 300
    cell = notebook.on_ranks("raise ValueError('x' * 5_000_000)")
    assert "ValueError: xxx" in cell.error_value
    assert cell.iopub_nbytes < 1_000_000
    go = tmp_path / "go"
    failing = notebook.start_on_ranks(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n1 / 0"
    )
    following = notebook.start_on_ranks("kept = 'overwritten'")
    go.touch()
    assert failing.wait().status == "error"
    assert following.wait().status == "aborted"


def test_an_interrupt_while_an_error_is_shown_changes_nothing_for_the_next(notebook):
    """IPython forgets who formats an error where the formatting itself is interrupted."""
    differ = "import numpy as np\nallreduce(np.ones(3 + rank))"
    notebook.on_ranks(
        "import signal\nfrom allranks.engine import exceptions\n"
        "whole = exceptions.without_middle\n"
        "def interrupted(tb):\n    exceptions.without_middle = whole\n"
        "    signal.raise_signal(signal.SIGINT)\nexceptions.without_middle = interrupted"
    )
    notebook.on_ranks(differ)
    assert notebook.on_ranks("exceptions.without_middle is whole").text == "ranks 0–3 → True\n"
    cell = notebook.on_ranks(differ)
    assert "CollectiveMismatch" in cell.error_value
    assert "allranks/collectives" not in cell.text


NAMED = """
import joblib, logging, threading, traceback, warnings
memory = joblib.Memory("memory-of-rank-0", verbose=0)
@memory.cache
def squared(x):
    print("computed")
    return x * x
def warns():
    warnings.warn("odd", stacklevel=1)
    try: raise ValueError("shown")
    except ValueError: traceback.print_exc()
    one = threading.Thread(target=lambda: {}["of a thread"])
    one.start(); one.join()
"""


def test_libraries_recognise_cells_whose_numbers_are_shown(notebook):
    """As joblib.Memory, numba and line_profiler take ipykernel's file names for cells."""
    notebook.on_ranks(f"{NAMED}squared(3)", "-r 0").says("computed")
    cell = notebook.on_ranks(f"{NAMED}squared(3)", "-r 0")
    assert cell.text == "rank 0 → 9\n"  # it takes the result of the same text
    at = f"In[{cell.execution_count}]"
    shown = notebook.on_ranks("squared(3) or warns()\nwarns()\nraise KeyError", "-r 0")
    shown.says(
        f"{at}:10: UserWarning: odd\n",
        f'File "{at}", line 11, in warns',
        "Exception in thread Thread-",
        f'File "{at}", line 13, in <lambda>',
        f"Cell In[{shown.execution_count}], line 4",
    )
    shown.lacks("ipykernel_ranks")
    notebook.on_ranks(
        "import inspect, os, pathlib, shutil, tempfile\nshutil.rmtree('memory-of-rank-0')\n"
        "file = pathlib.Path(inspect.getsourcefile(warns))\n"
        "file.parent.parent == pathlib.Path(tempfile.gettempdir()), "
        "len(file.parent.name) > len('ipykernel_ranks_'), inspect.getsource(warns)[:9]",
        "-r 0",
    ).says("rank 0 → (True, True, 'def warns')")
