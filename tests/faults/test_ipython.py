"""A cell on ranks may use all of IPython, and the notebook's own variables are never touched."""

import pytest


def test_the_variables_of_the_notebook_are_never_touched(notebook):
    notebook.run("kept, rank, mine = 'the notebook’s', -1, [1, 2]")
    before = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    cell = notebook.on_ranks("mine = rank\nmine += 1\nfresh = mine\ndel fresh")
    assert cell.status == "ok"
    assert notebook.value("kept, rank, mine") == "('the notebook’s', -1, [1, 2])"
    after = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    assert after == before
    notebook.run("del kept, rank, mine")


def test_values_cross_only_as_they_are_asked_for(notebook):
    notebook.on_ranks("secret = rank * 2\nsecret", "-o wanted -r 1,3")
    assert notebook.value("wanted") == "[2, 6]"
    assert notebook.run("secret").error_name == "NameError"
    notebook.run("import numpy as np\npushed = np.arange(3)\n%distributed push pushed")
    assert (
        notebook.on_ranks("int(pushed.sum()) + rank", "-r 0-1").text == "rank 0 → 3\nrank 1 → 4\n"
    )
    cell = notebook.run("got = %distributed pull kept\ngot")
    assert cell.displays[-1]["text/plain"] == "{0: 0, 1: 10, 2: 20, 3: 30}"
    shown = notebook.run("class Shy:\n    def __repr__(self): raise ValueError\nShy()")
    assert shown.status == "error"
    assert notebook.on_ranks("rank", "-r 1").status == "ok"


CELLS = {
    "an await": ("import asyncio\nawait asyncio.sleep(0.1)\nrank", "rank 2 → 2\n"),
    "a command": ("!echo hello from $rank", "rank 2 │ hello from 2\n"),
    "its output": ("lines = !echo one; echo two\nlines", "rank 2 → ['one', 'two']\n"),
    # Lightning refuses to use several processes from an interactive Python, which has ps1.
    "no prompt": ("import sys\nhasattr(sys, 'ps1')", "rank 2 → False\n"),
    "a comment": ("# nothing\n", ""),
    "nothing": ("\n\n", ""),
    "a semicolon": ("rank;", ""),
}


@pytest.mark.parametrize(("source", "shown"), CELLS.values(), ids=CELLS.keys())
def test_a_cell_is_what_it_is_in_ipython(notebook, source, shown):
    cell = notebook.on_ranks(source, "-r 2")
    assert (cell.status, cell.text) == ("ok", shown)


def test_commands_that_fail_and_deprecations_are_shown(notebook):
    cell = notebook.on_ranks("!ls /nowhere/at/all\n_exit_code != 0", "-r 0")
    assert cell.status == "ok"
    assert "No such file or directory" in cell.text
    assert cell.text.endswith("→ True\n")
    cell = notebook.on_ranks("import warnings\nwarnings.warn('old', DeprecationWarning)")
    assert "DeprecationWarning: old" in cell.text
