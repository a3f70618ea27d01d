"""A submission cannot read the solutions, nor the submissions of others."""

import os
import subprocess
import sys

import pytest

from allranks.grading import without_folders
from tests.missing import skip_missing

READ = "import os, sys; print(*sorted(os.listdir(sys.argv[1])))"
REMOVE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000 | 0x20000)
print(libc.umount2(b"../../../source", 2), os.listdir("../../../source"))
"""


@pytest.fixture
def course(tmp_path):
    for name in ("source/lab", "autograded/ana/lab", "autograded/ben/lab"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "lab.ipynb").write_text("{}")
    (tmp_path / "gradebook.db").write_text("points")
    shown = tmp_path / "autograded" / "ana" / "lab"
    hidden = [tmp_path / name for name in ("source", "autograded", "gradebook.db")]
    if problem := without_folders.problem(shown, hidden):
        skip_missing(f"needs user namespaces: {problem}")

    def run(*command):
        done = subprocess.run(
            [*without_folders.command(shown, hidden), sys.executable, "-c", *command],
            cwd=shown,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        (".", "lab.ipynb"),
        ("../../../source", ""),
        ("../..", "ana"),
        ("../../../autograded/ana/lab", "lab.ipynb"),
    ],
)
def test_only_the_folder_of_the_submission_is_seen(course, folder, found):
    assert course(READ, folder) == found


def test_files_are_empty_and_stay_as_they_are_outside(course, tmp_path):
    assert course("print(repr(open('../../../gradebook.db').read()))") == "''"
    assert (tmp_path / "gradebook.db").read_text() == "points"
    assert os.listdir(tmp_path / "source") == ["lab"]


def test_the_submission_writes_into_its_folder(course, tmp_path):
    course("open('written', 'w').close()")
    assert (tmp_path / "autograded" / "ana" / "lab" / "written").exists()


def test_what_hides_a_folder_cannot_be_removed(course):
    assert course(REMOVE) == "-1 []"


def test_files_of_a_process_outside_cannot_be_reached(course, tmp_path):
    outside = f"/proc/{os.getpid()}/root{tmp_path}/source"
    source = f"import os\ntry: print(os.listdir({outside!r}))\nexcept PermissionError: print('no')"
    assert course(source) == "no"


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert str(tmp_path / "none") in without_folders.problem(tmp_path / "none", [])
