"""nbgrader grades submissions of lab 3: right, wrong, hanging, dying, flooding, forking, forging.

ALLRANKS_TEST_SUBMISSIONS=all grades all of them, as ``make grade`` does.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from notebooks import assignments
from tests.grading.course import LAB, NBGRADER, Course
from tests.grading.submissions import ATTACKS, CHOSEN, FILES, OTHERS
from tests.labs import LABS
from tests.missing import skip_missing

pytestmark = pytest.mark.timeout(1500)
ALL = CHOSEN | OTHERS | ATTACKS
SUBMISSIONS = ALL if os.environ.get("ALLRANKS_TEST_SUBMISSIONS") == "all" else CHOSEN
CELL_SECONDS = 40


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": NBGRADER}
    if subprocess.run([sys.executable, "-c", "import nbgrader"], env=environment).returncode:
        skip_missing("needs nbgrader. Type: make .nbgrader/.made")
    return Course(tmp_path_factory.mktemp("course"), CELL_SECONDS)


@pytest.fixture(scope="module")
def scores(course):
    released = course.release()
    for student, (answers, _) in SUBMISSIONS.items():
        course.submit(student, released, answers, FILES.get(student, {}))
    course.grade(timeout=1200)
    return course.scores()


def test_the_page_has_the_configuration_of_a_course():
    page = (Path(__file__).parents[2] / "docs" / "teaching.md").read_text()
    (lines,) = re.findall(r"test_nbgrader.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert {*lines.split("\n")} <= {*assignments.CONFIG.split("\n")}


def test_there_are_as_many_submissions_as_the_page_says():
    assert len(ALL) == 55


def test_each_submission_has_the_points_of_what_it_solves_and_stops_no_other(scores):
    assert scores == {student: points for student, (_, points) in SUBMISSIONS.items()}


def test_a_test_that_did_not_run_says_why(scores, course):
    last = {cell.id: cell for cell in course.graded("kernel-dies").cells}["check-3"]
    assert last.outputs[0].evalue == (
        "expected a test that runs to its end; found that it did not: the kernel died."
    )


def test_no_process_of_a_submission_is_left(scores):
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "86399.5"] not in commands


def test_students_see_neither_solutions_nor_hidden_tests_of_any_lab(course, tmp_path):
    every = Course(tmp_path, CELL_SECONDS)
    assignments.write(tmp_path, LABS)
    every.run("-m", "nbgrader", "generate_assignment", "--assignment=*")
    for lab in LABS:
        released = nbformat.read(tmp_path / "release" / lab / f"{lab}.ipynb", as_version=4)
        cells = {cell.id: cell for cell in released.cells}
        for exercise, solution in assignments.solutions(lab).items():
            if f"check-{exercise}" not in cells:
                continue
            assert solution not in cells[f"exercise-{exercise}"].source
            assert "# YOUR CODE HERE" in cells[f"exercise-{exercise}"].source
            test = cells[f"check-{exercise}"]
            assert test.metadata.nbgrader.points == 2
            assert "not yet: " in test.source
            assert 'print("right:' not in test.source
    assert LAB in LABS


def test_a_submission_with_a_link_to_the_solution_is_not_graded(tmp_path):
    if not Path(NBGRADER).exists():
        skip_missing("needs nbgrader. Type: make .nbgrader/.made")
    course = Course(tmp_path, CELL_SECONDS)
    released = course.release()
    course.submit("eve", released, {}, {})
    (tmp_path / "submitted" / "eve" / LAB / "data.txt").symlink_to(
        f"../../../source/{LAB}/{LAB}.ipynb"
    )
    with pytest.raises(AssertionError, match=r"data.txt leads to .*/source/"):
        course.grade(timeout=300)
    assert not (tmp_path / "autograded" / "eve" / LAB / "data.txt").exists()
