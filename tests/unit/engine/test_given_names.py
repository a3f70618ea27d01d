"""Names of a rank that cells replace: the line below the cell, and the part of a later error."""

import linecache
import math

import pytest

from allranks.collectives import allreduce
from allranks.engine.given_names import GivenNames, hint, notice

AGAIN = "To have it again: from allranks.batch import log"


class Cells:
    """A rank's cells: each returns the names that it has replaced, and the part of its error."""

    def __init__(self):
        self.comm = object()
        self.names = {"rank": 1, "size": 4, "comm": self.comm, "log": print, "allreduce": allreduce}
        self.given = GivenNames(self.names)
        self.count = 0

    def run(self, source):
        self.count += 1
        file, error = f"<given {self.count}>", None
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        self.given.begin()
        try:
            exec(compile(source, file, "exec"), self.names)
        except Exception as raised:
            error = raised
        replaced = self.given.end(f"In[{self.count}]")
        found = self.given.names_in(error.__traceback__) if error else {}
        return replaced, hint(found) if found else ""


@pytest.fixture
def cells():
    return Cells()


def test_a_star_import_that_replaces_log_is_named_below_its_cell_and_in_the_error(cells):
    replaced, _ = cells.run("from math import *")
    assert notice(replaced) == f"this cell replaced log, which each rank has. {AGAIN}"
    assert cells.run("log(loss=1)") == ([], f"In[1] has replaced log, which each rank has. {AGAIN}")


def test_the_error_names_the_cell_also_from_a_function_of_another_cell(cells):
    cells.run("def report(values):\n    for value in values:\n        log(loss=value)")
    cells.run("log = 5")
    assert cells.run("report([1])")[1].startswith("In[2] has replaced log,")


def test_a_cell_that_has_replaced_what_it_then_uses_is_named(cells):
    assert cells.run("size = 7\n[0][size]") == (
        ["size"],
        "In[1] has replaced size, which each rank has. "
        "To have it again: from allranks.batch import size",
    )


def test_two_cells_that_have_replaced_names_are_both_named(cells):
    cells.run("rank, size = 8, 9")
    cells.run("log = 3")
    assert cells.run("log(rank, size)")[1] == (
        "In[1] has replaced rank, size and In[2] has replaced log, which each rank has. "
        "To have them again: from allranks.batch import rank, size, log"
    )


@pytest.mark.parametrize(
    "source",
    [
        "1 / 0; log",
        "log and 1 / 0",
        "(lambda log: log.missing)(0)",
        "print('log'.missing)",
        "sorted([3, 'a'], key=lambda value: log if 0 else value)",
        "[log.missing for log in [1]]",
        "import missing_log",
        "def own(log):\n    log.missing\nown(1)",
    ],
)
def test_an_error_of_an_expression_without_the_name_says_nothing_of_it(cells, source):
    cells.run("log = 5")
    assert cells.run(source) == ([], "")


@pytest.mark.parametrize(
    "source",
    [
        "rank = 0 + 1; size = 4",
        "log = log; comm = comm",
        "from allranks.collectives import allgather as allreduce",
        "del log",
        "other = 5",
    ],
)
def test_a_name_that_means_the_same_or_is_gone_is_not_replaced(cells, source):
    assert cells.run(source) == ([], "")


def test_another_value_from_outside_is_no_doing_of_a_cell(cells):
    cells.names["log"] = math.log  # as %distributed push does
    assert cells.run("log(loss=1)") == ([], "")


def test_a_name_that_is_restored_is_replaced_no_longer(cells):
    cells.run("log = 5")
    cells.names["log"] = print
    assert cells.run("log(missing)") == ([], "")


def test_a_rank_function_or_another_communicator_is_a_replacement(cells):
    assert cells.run("from allranks.collectives import rank; comm = 5")[0] == ["rank", "comm"]


def test_many_names_are_shortened():
    names = ["log", "join", "send", "recv", "poll", "Sum"]
    assert notice(names) == (
        "this cell replaced log, join, send, recv, poll …, which each rank has. "
        "To have them again: from allranks.batch import *"
    )
