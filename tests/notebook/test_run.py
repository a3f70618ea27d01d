"""`make demo` prints what a notebook says, and fails when it fails."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


@pytest.fixture
def run(tmp_path, repository):
    def run(*sources):
        cells = [new_markdown_cell("# A lab\nprose"), *map(new_code_cell, sources)]
        nbformat.write(new_notebook(cells=cells), tmp_path / "lab.ipynb")
        script = repository / "notebooks" / "run.py"
        return subprocess.run(
            [sys.executable, script, tmp_path / "lab.ipynb"], capture_output=True, text=True
        )

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
