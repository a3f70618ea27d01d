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
