"""`make demo` prints what a notebook says, and fails when it fails."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


@pytest.fixture
def run_cells(tmp_path, repository):
    def run_cells(*cells, options=()):
        nbformat.write(new_notebook(cells=list(cells)), tmp_path / "lab.ipynb")
        script = repository / "notebooks" / "run.py"
        command = [sys.executable, script, *options, tmp_path / "lab.ipynb"]
        return subprocess.run(command, capture_output=True, text=True)

    return run_cells


@pytest.fixture
def run(run_cells):
    def run(*sources):
        return run_cells(new_markdown_cell("# A lab\nprose"), *map(new_code_cell, sources))

    return run


def test_each_cell_is_shown_with_what_it_said_and_the_first_that_fails_is_the_last(run):
    answer = run("x = 20\nx + 1", "", "print('two')", "1 / 0", "print('three')")
    assert answer.returncode == 1
    assert answer.stdout.startswith(
        "\n# A lab\n\n>>> x = 20\n... x + 1\n21\n\n>>> print('two')\ntwo\n\n"
    )
    assert "ZeroDivisionError: division by zero" in answer.stdout
    assert "\nthree" not in answer.stdout
    # Not the last line: a kernel on a busy machine may log errors of its sockets as it ends.
    assert "lab.ipynb: the cell above failed\n" in answer.stderr


LAB = (
    new_markdown_cell("# A lab"),
    new_code_cell("20 + 1"),
    new_markdown_cell("## Your turn"),
    new_code_cell("answer = None", id="exercise-1"),
    new_code_cell("print('solved' if answer else 'not yet')", id="check-1"),
    new_code_cell("'end'", id="stop"),
)


def test_exercises_are_left_to_the_reader_and_the_last_line_says_how_to_open_the_lab(run_cells):
    answer = run_cells(*LAB)
    assert answer.returncode == 0
    assert answer.stdout == (
        "\n# A lab\n\n>>> 20 + 1\n21\n\n>>> 'end'\n'end'\n\n"
        "This lab has exercises for you. Open it in JupyterLab: make lab LAB=lab\n"
    )


def test_a_written_lab_has_what_its_exercises_and_checks_say(run_cells, tmp_path):
    answer = run_cells(*LAB, options=["--write"])
    assert answer.stdout.endswith("\nnot yet\n\n>>> 'end'\n'end'\n\n")
    written = {cell.id: cell for cell in nbformat.read(tmp_path / "lab.ipynb", 4).cells}
    assert written["check-1"].outputs[0].text == "not yet\n"


def test_a_kernel_that_dies_is_said(run):
    answer = run("import os; os._exit(3)")
    assert answer.returncode == 1
    assert "Kernel died" in answer.stderr


def test_a_missing_notebook_is_named(repository):
    answer = subprocess.run(
        [sys.executable, repository / "notebooks" / "run.py", "none.ipynb"],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert "there is no notebook none.ipynb" in answer.stderr
