"""What the report of an exception says of the lines and the end of a cell."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from allranks.engine.exceptions import (
    has_succeeded,
    hint_of_mpi,
    interrupted_wait,
    is_outside_of_cell,
    report,
)
from allranks.records import code_names
from allranks.records.ranks import WAITS, Activity

REPLACED = """
try:
    raise ExceptionGroup("a", [ValueError(1), KeyError(2)])
except* ValueError:
    [].pop()
"""
LEFT = """
try:
    raise ExceptionGroup("a", [ValueError(1), KeyError(2)])
except* ValueError:
    pass
"""


def raised(source, file):
    try:
        exec(compile(source, file, "exec"))
    except BaseException as error:
        return error


@pytest.mark.parametrize(("source", "line"), [(REPLACED, 5), (LEFT, 3)], ids=["raises", "leaves"])
def test_a_group_of_except_star_has_a_line_of_the_cell(source, line):
    file = code_names.code_name(source)
    error = raised(source, file)
    assert not is_outside_of_cell(error, file)
    assert report(error, [], 0, "cpu", file).line == line


class Odd:
    def __eq__(self, other):
        raise OSError


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_program_that_exits_without_a_failure_has_succeeded(code):
    assert has_succeeded(SystemExit(code))


@pytest.mark.parametrize("code", [1, True, "0", "", 0.0, np.zeros(2), Odd()])
def test_a_program_that_exits_with_something_else_has_not(code):
    assert not has_succeeded(SystemExit(code))


class OfMpi(Exception):
    def Get_error_class(self):
        return self.args[0]


def test_a_rank_that_a_communicator_lacks_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Exception=OfMpi, ERR_RANK=6))
    assert hint_of_mpi(OfMpi(6)).endswith("Type for example: dest=(rank + 1) % size")
    assert (hint_of_mpi(OfMpi(5)), hint_of_mpi(ValueError(6))) == ("", "")


def test_an_interrupt_of_a_wait_says_for_whom_the_rank_waited():
    interrupt = KeyboardInterrupt()
    assert (report(interrupt, [], 0, "cpu", "").waiting, str(interrupt)) == (False, "")
    interrupt.waited = Activity(WAITS, "barrier", "ranks 0, 2")
    found = report(interrupt, [], 1, "cpu", "")
    assert found.waiting
    assert found.message == "barrier waited for ranks 0, 2 when the cell was interrupted."
    said = interrupted_wait(interrupt, "request")
    assert said == "barrier waited for ranks 0, 2 when the request was interrupted."
    assert interrupted_wait(None, "request") == ""
