"""Errors of the notebook's functions on ranks, which have the code of a function and no source."""

import os

import pytest
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster import function_sources
from allranks.cluster.failures import describe, plain
from allranks.cluster.function_sources import with_sources
from allranks.errors import Report

SOURCE = """def g(x):
    if rank() == 0:
        allreduce(x)
    else:
        allreduce(x[1:])
"""
#: A frame as IPython shows it on a rank. Of a later line of the cell it has no line at all.
FRAME = "\x1b[32mFile \x1b[39m\x1b[32m{}:{}\x1b[39m, in \x1b[36mg\x1b[39m\x1b[34m(x)\x1b[39m"
NO_SOURCE = "\n      1 'Could not get source, probably due dynamically evaluated source code.'"


@pytest.fixture
def file(monkeypatch):
    """The file name of the code of In[3]."""
    shell = InteractiveShell()
    monkeypatch.setattr(function_sources, "get_ipython", lambda: shell)
    return shell.compile.cache(SOURCE, 3)


def report(file, line, message, more=NO_SOURCE):
    lines = f"Error\n{FRAME.format(file, line)}{more}\n\nError: {message}"
    return Report(0, "vm", "cpu", "Error", message, (lines,), line, "", waiting=False)


@pytest.mark.parametrize("more", [NO_SOURCE, ""], ids=["first line", "no line"])
def test_the_report_has_the_cell_and_the_line(file, more):
    (title, *lines) = plain(describe([with_sources(report(file, 3, "no", more))], [0])).splitlines()
    assert title == "rank 0 (vm, cpu) raised Error at line 3: allreduce(x)"
    assert lines == [
        "Error",
        "Cell In[3], line 3, in g(x)",
        "      1 def g(x):",
        "      2     if rank() == 0:",
        "----> 3         allreduce(x)",
        "      4     else:",
        "      5         allreduce(x[1:])",
        "",
        "Error: no",
    ]


def test_lines_in_the_message_have_their_source(file):
    message = f"two lines:\n  rank 0 at {file}:3\n  rank 1 at {file}:5\nseen in {file}:3, and /x:1"
    found = with_sources(report(file, 3, message))
    assert found.message == (
        "two lines:\n  rank 0 at In[3]:3: allreduce(x)\n  rank 1 at In[3]:5: allreduce(x[1:])\n"
        "seen in In[3]:3, and /x:1"
    )
    assert found.traceback[0].endswith(found.message)


def test_a_traceback_of_python_names_the_cell(file):
    (shown,) = with_sources(report(file, 3, f'File "{file}", line 3, in g')).traceback
    assert shown.endswith('File "In[3]", line 3, in g')


@pytest.mark.usefixtures("file")
def test_a_report_of_another_file_is_not_changed_and_no_file_is_opened(tmp_path):
    os.mkfifo(pipe := tmp_path / "module.py")
    assert with_sources(plain_report := report(str(pipe), 3, "no")) == plain_report
    assert with_sources(plain_report := report("/no/file.py", 3, "no")) == plain_report
