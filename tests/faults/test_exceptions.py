"""A cell that fails says who failed, where and why, once; ranks and variables live on."""

import pytest

pytestmark = pytest.mark.usefixtures("_ranks_live_on")


def test_an_exception_is_shown_once_with_its_ranks_and_line(notebook):
    cell = notebook.on_ranks("share = 4\nif rank == 2:\n    share / 0")
    assert (cell.status, cell.error_name) == ("error", "CellFailed")
    assert cell.error_value == "rank 2 of 4 at line 4: ZeroDivisionError: division by zero"
    assert cell.text.startswith("rank 2 (")
    assert ") raised ZeroDivisionError at line 4: share / 0\n" in cell.text
    assert "----> 4     share / 0" in cell.text
    assert "ranks 0–1, 3 finished the cell" in cell.text
    cell = notebook.on_ranks("def fail():\n    raise ValueError('all alike')\nfail()")
    assert cell.error_value == "ranks 0–3 of 4 at line 3: ValueError: all alike"
    assert cell.text.count("Traceback (most recent call last)") == 1
    assert "----> 4 fail()" in cell.text
    assert "site-packages" not in cell.text
    cell = notebook.on_ranks("[int, 1 / (rank - 1) and {}.pop, list, [].pop][rank]('five')")
    assert cell.error_value.startswith("ranks 0–1, 3 of 4 at line 2: ValueError: invalid literal")
    for rank, name in ((0, "ValueError"), (1, "ZeroDivisionError"), (3, "TypeError")):
        assert f"rank {rank} (" in cell.text
        assert f"raised {name} at line 2" in cell.text
    assert "rank 2 finished the cell" in cell.text
    cell = notebook.on_ranks("def fail():\n    raise ValueError(f'row {rank}')\nfail()")
    assert cell.text.count("Traceback (most recent call last)") == 1
    for rank in range(4):
        assert f"rank {rank}: ValueError: row {rank}" in cell.text


def test_ranks_that_wait_for_one_that_failed_or_exited_are_told(notebook):
    cell = notebook.on_ranks(
        "import numpy as np\nif rank == 3:\n    raise OSError('no such file')\n"
        "allreduce(np.ones(2))"
    )
    assert cell.error_value == "rank 3 of 4 at line 4: OSError: no such file"
    assert cell.text.startswith("rank 3 (")
    assert "ranks 0–2 were waiting at line 5: allreduce(np.ones(2))" in cell.text
    cell = notebook.on_ranks("import sys\nif rank == 1: sys.exit(0)\nbarrier()")
    assert cell.status == "error"
    assert "rank 1 finished In[" in cell.text
    assert "without calling barrier" in cell.text


def test_a_syntax_error_is_shown_once_and_nothing_runs(notebook):
    cell = notebook.on_ranks("kept = 'overwritten'\nkept = (1,\n")
    assert (cell.status, cell.error_name) == ("error", "InvalidCell")
    assert "the cell was not run on any rank" in cell.text
    assert cell.text.count("SyntaxError: '(' was never closed") == 1
    assert "line 3" in cell.text
    cell = notebook.on_ranks("kept = 'overwritten'\nreturn kept")
    assert cell.error_name == "InvalidCell"
    assert "'return' outside function" in cell.text


def test_sys_exit_ends_the_cell_and_not_the_rank(notebook):
    cell = notebook.on_ranks("import sys\nprint('before')\nsys.exit(3)\nprint('after')")
    assert (cell.status, cell.error_name) == ("error", "CellFailed")
    assert cell.error_value == "ranks 0–3 of 4 at line 4: SystemExit: 3"
    assert "the rank keeps running, with its variables" in cell.text
    assert "before" in cell.text
    assert "│ after" not in cell.text


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
    cell = notebook.on_ranks(
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError('inner')\n"
        "raise Odd()"
    )
    assert cell.error_name == "CellFailed"
    assert "Odd: <its text cannot be shown: RuntimeError>" in cell.error_value
    assert "raised Odd at line 5: raise Odd()" in cell.text
    assert "RuntimeError('inner')" in cell.text
    cell = notebook.on_ranks(
        "class Odd:\n    def __repr__(self):\n        raise RuntimeError('no picture')\nOdd()"
    )
    assert cell.status == "ok"
    assert "RuntimeError: no picture" in cell.text


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
    "its own cause": (
        "a = ValueError('a')\na.__cause__ = a\nraise a",
        ["ValueError: a"],
    ),
    "a circle of contexts": (
        "a, b = ValueError('a'), KeyError('b')\na.__context__, b.__context__ = b, a\nraise a",
        ["ValueError: a", "KeyError: 'b'", "During handling"],
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
    "a class that cannot be read": (
        "class Odd(Exception):\n    __class__ = property(lambda self: 1 / 0)\nraise Odd('a')",
        ["Odd: a"],
    ),
    "a traceback that cannot be read": (
        "class Odd(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\nraise Odd('a')",
        ["Odd: a"],
    ),
    "no attribute that can be read": (
        "class Odd(Exception):\n    def __getattribute__(self, name): raise OSError(name)\n"
        "raise Odd('a')",
        ["Odd: a"],
    ),
    "no such magic": ("%no_such_magic", ["UsageError: Line magic function `%no_such_magic`"]),
}


@pytest.mark.parametrize(("source", "parts"), SHOWN.values(), ids=SHOWN.keys())
def test_an_exception_is_shown_also_where_ipython_cannot_show_it(notebook, source, parts):
    cell = notebook.on_ranks(source, timeout=20)
    assert cell.error_name == "CellFailed"
    assert parts[0] in cell.error_value
    assert cell.text.startswith("ranks 0–3 (")
    assert [part for part in parts if part not in cell.text] == [], cell.text
    assert len(cell.text) < 50_000


def test_an_exception_that_something_else_shows_is_told_too(notebook):
    """As by rich, which shows tracebacks itself once it is installed."""
    cell = notebook.on_ranks(
        "shell = get_ipython()\nas_before = shell.showtraceback\n"
        "shell.showtraceback = lambda *args, **options: None\n1 / 0"
    )
    notebook.on_ranks("shell.showtraceback = as_before")
    assert cell.error_name == "CellFailed"
    assert "line 5, in <module>" in cell.text
    assert "ZeroDivisionError: division by zero" in cell.text


def test_what_is_shown_of_an_error_is_bounded(notebook):
    cell = notebook.on_ranks("def again(n):\n    return again(n + 1)\nagain(0)")
    assert "RecursionError" in cell.error_value
    assert len(cell.text.splitlines()) < 300
    cell = notebook.on_ranks("raise ValueError('x' * 5_000_000)")
    assert "ValueError: xxx" in cell.error_value
    assert cell.iopub_nbytes < 1_000_000


def test_a_failed_cell_stops_run_all(notebook):
    failing = notebook.start_on_ranks("import time; time.sleep(0.3); 1 / 0")
    following = notebook.start_on_ranks("kept = 'overwritten'")
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
