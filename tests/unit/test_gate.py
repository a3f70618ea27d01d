"""Which tests run before each change, which CI runs afterwards, and what it forgives."""

import ast
from pathlib import Path

import pytest

from tests import gate
from tests.rest import outcomes, quarter_of, repeat, repetitions

ALL = list(gate.AREAS)
pytest.importorskip("grimp", reason="needs import-linter, which is in the extra dev")


@pytest.mark.parametrize("chosen", gate.CORE)
def test_what_always_runs_exists(repository: Path, chosen: str) -> None:
    file, _, name = chosen.partition("::")
    assert (repository / file).exists()
    if name:
        tree = ast.parse((repository / file).read_text())
        assert name.partition("[")[0] in {
            found.name for found in tree.body if isinstance(found, ast.FunctionDef)
        }


@pytest.mark.parametrize(
    ("path", "areas"),
    [
        ("allranks/torch.py", ["torch"]),
        ("allranks/features/torch_jax/rank.py", ["torch"]),
        ("allranks/keras/optimizer.py", ["TensorFlow and Keras"]),
        ("tests/torch/test_waits.py", ["torch"]),
        ("docs/mpi.md", ["pages of the docs"]),
        ("allranks/features/toolbar/labextension/ranks.js", []),
        ("README.md", []),
    ],
)
def test_a_change_reaches_what_it_belongs_to(path: str, areas: list[str]) -> None:
    assert gate.reached([path]) == areas


@pytest.mark.parametrize(
    "path", ["allranks/cluster/cells.py", "tests/kernel.py", "pyproject.toml", ".ci/run"]
)
def test_a_change_of_the_core_or_of_what_all_tests_share_reaches_everything(path: str) -> None:
    assert gate.reached([path]) == ALL


def test_an_unknown_change_reaches_everything() -> None:
    assert gate.reached(None) == ALL


def test_what_a_package_imports_reaches_its_tests() -> None:
    # `allranks.keras` imports it; the core does not.
    assert "TensorFlow and Keras" in gate.reached(["allranks/horovod/common.py"])


TORCH = [f"tests/torch/test_a.py::test_{number}" for number in range(7)]
HUB = ["tests/hub/test_class.py::test_it"]
FAULT = "tests/faults/test_it.py::test_it"


def test_a_third_of_each_file_runs_where_everything_is_reached() -> None:
    left = gate.choose([*TORCH, *HUB], ALL)
    assert list(left) == TORCH[3:]


def test_only_what_is_reached_runs_and_all_of_it() -> None:
    assert list(gate.choose([*TORCH, *HUB], ["torch"])) == HUB


def test_a_test_outside_of_the_core_runs_if_its_file_has_changed() -> None:
    assert list(gate.choose([FAULT], ALL)) == [FAULT]
    assert gate.choose([FAULT], [], ["tests/faults/test_it.py"]) == {}


def test_afterwards_the_rest_runs_with_what_its_files_begin_with() -> None:
    launch = "tests/mpi/test_under_mpiexec.py::test_it"
    tests = [*TORCH, *HUB, launch, f"{launch}[2]"]
    assert gate.rest(tests, [TORCH[3], launch]) == [*TORCH, launch]


def test_what_is_left_out_is_counted_by_reason_and_suite() -> None:
    left = gate.choose([*TORCH, *HUB, FAULT], ["torch"])
    assert gate.summary(left) == [
        "1, because the change cannot reach them: tests/hub 1",
        "1, because they are not of the core: tests/faults 1",
    ]


def test_each_hour_and_each_day_begins_with_another_quarter() -> None:
    day = 86400
    assert [quarter_of(3600 * hour) for hour in range(5)] == [0, 1, 2, 3, 0]
    assert [quarter_of(day * number) for number in range(5)] == [0, 1, 2, 3, 0]


def test_outcomes_are_read_with_their_names_and_texts(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase file="tests/a/test_a.py" name="test_one[x-1]"><failure>E 1</failure></testcase>'
        '<testcase file="tests/a/test_a.py" name="test_two"/>'
        '<testcase file="tests/a/test_a.py" name="test_left"><skipped>no</skipped></testcase>'
        '<testcase file="tests/a/test_a.py" name="test_end"><error>E 2</error></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes(report) == {
        "tests/a/test_a.py::test_one[x-1]": "E 1",
        "tests/a/test_a.py::test_two": None,
        "tests/a/test_a.py::test_end": "E 2",
    }


def test_what_failed_is_repeated_after_what_ran_before_it_in_its_file() -> None:
    launches = [f"tests/mpi/test_under_mpiexec.py::test_{number}" for number in range(3)]
    ran = [launches[0], HUB[0], *TORCH[:2], FAULT, *TORCH[2:], *launches[1:]]
    failed = [launches[1], TORCH[1], TORCH[3], FAULT]
    assert list(repetitions(ran, failed)) == [[launches[1]], TORCH[:4], [FAULT]]


NEEDS_ANOTHER = """
import pathlib
made = []
def test_makes(): made.append(1)
def test_needs_what_another_made(): assert made
def test_fails(): assert not made
def test_fails_the_first_time():
    marker = pathlib.Path("ran")
    first = not marker.exists()
    marker.touch()
    assert not first
"""


def test_a_repeated_test_has_what_earlier_ones_made_and_one_that_fails_twice_has_failed(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_a.py").write_text(NEEDS_ANOTHER)
    names = ("makes", "needs_what_another_made", "fails", "fails_the_first_time")
    tests = [f"test_a.py::test_{name}" for name in names]
    first = repeat(tests, tmp_path / "junit.xml", tmp_path)
    assert [test for test in tests if first[test] is not None] == tests[2:]
    (tests_again,) = repetitions(first, tests[2:])
    second = repeat(tests_again, tmp_path / "junit.xml", tmp_path)
    assert [test for test in tests if second[test] is not None] == [tests[2]]
