"""A cell on ranks may use all of IPython, and the notebook's own variables are never touched."""


def test_the_variables_of_the_notebook_are_never_touched(notebook):
    notebook.run("kept, rank, mine = 'the notebook’s', -1, [1, 2]")
    before = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    cell = notebook.on_ranks("mine = rank\nmine += 1\nfresh = mine\ndel fresh")
    assert cell.status == "ok"
    assert notebook.value("kept, rank, mine") == "('the notebook’s', -1, [1, 2])"
    after = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    assert after == before


def test_the_value_of_a_cell_comes_to_the_notebook_only_under_the_name_asked_for(notebook):
    notebook.on_ranks("secret = rank * 2\nsecret", "-o wanted -r 1,3")
    assert notebook.value("wanted") == "[2, 6]"
    assert notebook.run("secret").error_name == "NameError"


def test_push_and_pull_carry_values(notebook):
    notebook.run("import numpy as np\npushed = np.arange(3)\n%distributed push pushed")
    assert (
        notebook.on_ranks("int(pushed.sum()) + rank", "-r 0-1").text == "rank 0 → 3\nrank 1 → 4\n"
    )
    cell = notebook.run("got = %distributed pull kept\ngot")
    assert cell.displays[-1]["text/plain"] == "{0: 0, 1: 10, 2: 20, 3: 30}"


def test_a_value_that_could_not_be_shown_fails_its_own_cell_only(notebook):
    shown = notebook.run("class Shy:\n    def __repr__(self): raise ValueError\nShy()")
    assert shown.status == "error"
    assert notebook.on_ranks("rank", "-r 1").status == "ok"


def test_a_cell_may_await_at_its_top_level(notebook):
    cell = notebook.on_ranks("import asyncio\nawait asyncio.sleep(0.1)\nrank", "-r 0-1")
    assert cell.text == "rank 0 → 0\nrank 1 → 1\n"


def test_a_magic_and_a_command_run_on_the_ranks(notebook):
    cell = notebook.on_ranks("%time twice = 2 * rank\n!echo hello from $rank", "-r 2")
    assert "Wall time" in cell.text
    assert "│ hello from 2" in cell.text
    lines = notebook.on_ranks("lines = !echo one; echo two\nlines", "-r 2")
    assert lines.text == "rank 2 → ['one', 'two']\n"


def test_a_command_that_fails_does_not_fail_the_cell(notebook):
    cell = notebook.on_ranks("!ls /nowhere/at/all\n_exit_code != 0", "-r 0")
    assert cell.status == "ok"
    assert "No such file or directory" in cell.text
    assert cell.text.endswith("→ True\n")


def test_a_rank_does_not_pass_for_a_prompt(notebook):
    """Lightning refuses to use several processes from an interactive Python, which has ``ps1``."""
    assert notebook.on_ranks("import sys\nhasattr(sys, 'ps1')").text.endswith(" → False\n")


def test_a_cell_without_statements_does_nothing(notebook):
    for source in ("# nothing\n", "\n\n"):
        cell = notebook.on_ranks(source)
        assert (cell.status, cell.text) == ("ok", "")


def test_the_last_value_is_hidden_by_a_semicolon(notebook):
    assert notebook.on_ranks("rank;").text == ""
