"""A machine on which something is missing or forbidden is told so, or is good enough."""

import pytest


def test_a_missing_mpiexec_is_named_with_what_to_type(new_notebook):
    notebook = new_notebook(env={"ALLRANKS_MPIEXEC": "/nowhere/mpiexec"})
    cell = notebook.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "MissingDependency")
    assert "found '/nowhere/mpiexec', which cannot be run" in cell.error_value
    assert "unset ALLRANKS_MPIEXEC" in cell.error_value
    assert "Traceback" not in cell.text
    assert notebook.children() == []
    assert notebook.files_left() == []
    notebook.run("import os; del os.environ['ALLRANKS_MPIEXEC']")
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text


def test_an_mpiexec_that_fails_is_quoted_and_nothing_is_left(new_notebook):
    notebook = new_notebook(env={"ALLRANKS_MPIEXEC": "/bin/false"})
    cell = notebook.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "StartFailed")
    assert "expected 2 ranks, found 0" in cell.error_value
    assert "The launcher ended with exit code 1" in cell.error_value
    notebook.wait_for_no_children()
    assert notebook.files_left() == []


@pytest.mark.parametrize("home", ["/proc/home", "/dev/null/home"])
def test_a_home_that_cannot_be_written_keeps_the_logs_elsewhere(new_notebook, home):
    notebook = new_notebook(env={"HOME": home, "XDG_STATE_HOME": None})
    cell = notebook.on_ranks("rank", "-n 2")
    assert cell.status == "ok"
    assert cell.text.endswith("rank 0 → 0\nrank 1 → 1\n")
    status = notebook.run("%distributed status").text
    assert f"logs in {notebook.temporary}/allranks-logs-" in status
    notebook.shutdown()
    notebook.wait_for_no_children()
    assert {path.suffix for path in notebook.temporary.rglob("*.*")} == {".log"}


def test_a_temporary_folder_with_a_long_name_is_good_enough(new_notebook, tmp_path):
    long = tmp_path / ("a" * 60) / ("b b" * 20)
    long.mkdir(parents=True)
    notebook = new_notebook(env={"TMPDIR": str(long)})
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text
    notebook.shutdown()
    notebook.wait_for_no_children()
    assert list(long.iterdir()) == []


def test_files_of_the_notebook_do_not_shadow_the_standard_library(new_notebook):
    notebook = new_notebook()
    for name in ("json", "socket", "random", "numpy"):
        (notebook.cwd / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    (notebook.cwd / "mine.py").write_text("value = 42\n")
    cell = notebook.on_ranks("import mine\nmine.value", "-n 2")
    assert "ranks 0–1 → 42\n" in cell.text


def test_a_folder_that_is_gone_is_named(new_notebook):
    notebook = new_notebook()
    notebook.run("import os; os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone')")
    cell = notebook.on_ranks("rank", "-n 2")
    assert cell.status == "error"
    assert "No such file or directory" in cell.error_value
    notebook.run(f"os.chdir({str(notebook.cwd)!r})")
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text


@pytest.mark.parametrize(
    "env",
    [
        {"HOME": None, "XDG_STATE_HOME": None},
        {"MPI4PY_RC_INITIALIZE": "0", "MPI4PY_RC_FINALIZE": "0", "MPI4PY_RC_ERRORS": "abort"},
        {"MPI4PY_RC_THREADS": "0", "MPI4PY_RC_RECV_MPROBE": "0", "MPI4PY_RC_FAST_REDUCE": "0"},
    ],
    ids=["no home", "mpi4py without initialising", "mpi4py without threads"],
)
def test_an_environment_that_others_stumble_over_is_good_enough(new_notebook, env):
    notebook = new_notebook(env=env)
    cell = notebook.on_ranks("allreduce(1, op=Sum), comm.allreduce(1)", "-n 2")
    assert cell.status == "ok", cell.text
    assert "ranks 0–1 → (2, 2)\n" in cell.text


def test_warnings_are_errors_in_cells_and_not_in_what_ranks_run_on(new_notebook):
    notebook = new_notebook(env={"PYTHONWARNINGS": "error"})
    cell = notebook.on_ranks("import warnings\nwarnings.warn('mine')", "-n 2")
    assert cell.error_value == "ranks 0–1 of 2 at line 3: UserWarning: mine"
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("comm.allreduce(1)").text


def test_a_deprecation_in_a_cell_is_shown(new_notebook):
    cell = new_notebook().on_ranks(
        "import warnings\nwarnings.warn('old', DeprecationWarning)", "-n 2"
    )
    assert "DeprecationWarning: old" in cell.text


def test_a_python_that_the_user_may_not_run_is_named(new_notebook):
    notebook = new_notebook()
    (notebook.cwd / "python").write_text("#!/bin/sh\n")  # without the right to execute it
    notebook.run(
        f"import sys; mine = sys.executable; sys.executable = {str(notebook.cwd)!r} + '/python'"
    )
    cell = notebook.on_ranks("rank", "-n 2")
    assert (cell.status, cell.error_name) == ("error", "StartFailed")
    assert f"expected to start {notebook.cwd}/python for the ranks" in cell.error_value
    assert "a Python that this user may run" in cell.error_value
    notebook.run("sys.executable = mine")
    assert "ranks 0–1 → 2\n" in notebook.on_ranks("size", "-n 2").text
