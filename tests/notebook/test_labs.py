"""Every lab runs on its ranks, says what is committed, and has exercises that can be solved.

When cells say something else on purpose:
``python notebooks/run.py --write notebooks/01_ranks.ipynb``
"""

import re

import pytest

from tests import labs
from tests.labs import FAILS, LABS, STILL
from tests.missing import skip_without_replacements

pytestmark = pytest.mark.parametrize("name", LABS)

PATH = re.compile(r"(?<![\w.~])/(?:home|mnt|opt|private|root|tmp|usr|Users|var|work)/\S*")
REPLACES = "01_ranks"
HOST = re.compile(r" on (\S+) \((?=CPU|\d+ GPU)|\((\S+), (?:pid \d+, )?(?=cpu|cuda)")


def test_the_cells_that_fail_are_those_that_should_and_the_ranks_are_stopped(name, executed):
    run = executed(name)
    assert labs.failed(run) == labs.tagged(run, FAILS)
    assert labs.text_of(executed(name).cells[-1]).endswith("ranks are stopped.\n")


def test_the_committed_outputs_are_what_the_cells_say(name, executed):
    if name == REPLACES:
        skip_without_replacements()
    run = {cell.id: cell for cell in executed(name).cells}
    for cell in labs.code_cells(labs.read(name)):
        found = labs.steady_lines(run[cell.id])
        assert (cell.id, labs.steady_lines(cell)) == (cell.id, found)


def test_every_exercise_fails_until_it_is_solved(name, executed):
    run = {cell.id: cell for cell in executed(name).cells}
    exercises = labs.exercises(labs.read(name))
    assert exercises
    for exercise in exercises:
        check = run[f"check-{exercise}"]
        assert check.source.startswith("%%"), "a check runs on the ranks"
        assert "not yet: " in labs.error_of(check).evalue
        assert labs.error_of(run[f"solution-{exercise}"]) is None
        assert "right: " in labs.text_of(run[f"solved-{exercise}"])


def test_the_committed_lab_is_small_has_a_still_picture_and_names_no_path_and_no_host(name):
    assert labs.path_of(name).stat().st_size < 1_000_000
    html = [out.get("data", {}).get("text/html", "") for out in outputs(labs.read(name))]
    assert any(STILL in page and "data:image/svg+xml" in page for page in html)
    for cell in labs.code_cells(labs.read(name)):
        said = labs.text_of(cell)
        assert PATH.findall(said) == []
        assert {one or other for one, other in HOST.findall(said)} <= {"laptop"}


def outputs(notebook):
    return [output for cell in labs.code_cells(notebook) for output in cell.outputs]
