"""A submission cannot read the solutions, nor the submissions of others."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from allranks.grading import without_folders
from tests.missing import skip_missing

READ = "import os, sys; print(*sorted(os.listdir(sys.argv[1])))"
REMOVE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
found = [libc.umount2(b"../../../source", 2)]
libc.unshare(0x10000000 | 0x20000)  # user and mount namespaces of its own
found.append(libc.umount2(b"../../../source", 2))
print(found, os.listdir("../../../source"))
"""


WRITE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(None, b"../../..", None, 0x20 | 0x1000, None))  # again, and no longer read-only
libc.unshare(0x10000000 | 0x20000)  # user and mount namespaces of its own
print(libc.mount(None, b"../../..", None, 0x20 | 0x1000, None))
for name in ("../../../nbgrader_config.json", "../../../release/lab.ipynb", "of_the_submission"):
    try:
        open(name, "w").close()
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture
def place():
    # Not pytest's own, which other accounts cannot read.
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture(params=["this user", "another user"])
def course(place, request):
    """Runs Python in the folder of a submission, without the rest of its course."""
    account = []
    if request.param == "another user":
        if os.geteuid() != 0:
            skip_missing("needs root")
        account = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = sys.executable if not account else "/usr/bin/python3"
    for name in ("source/lab", "release", "autograded/ana/lab", "autograded/ben/lab"):
        (place / name).mkdir(parents=True)
        (place / name / "lab.ipynb").write_text("{}")
    (place / "gradebook.db").write_text("points")
    program = place / "program.py"  # which the other account can read
    shutil.copy(without_folders.__file__, program)
    if account:
        for path in (place, *place.rglob("*")):
            os.chown(path, 65534, 65534)
    shown = place / "autograded" / "ana" / "lab"
    hidden = [place / name for name in ("source", "autograded", "gradebook.db")]
    begin = [*account, python, "-I", "-S", str(program), str(shown), *map(str, hidden)]
    begin += ["--", str(place), "--"]

    def run(*command):
        done = subprocess.run(
            [*begin, python, "-c", *command], cwd=shown, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        run("")
    except AssertionError as error:
        if "Operation not permitted" not in str(error) and "setpriv" not in str(error):
            raise
        skip_missing(f"needs mount namespaces, or user namespaces: {error}")
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


def test_files_are_empty_and_stay_as_they_are_outside(course, place):
    assert course("print(repr(open('../../../gradebook.db').read()))") == "''"
    assert (place / "gradebook.db").read_text() == "points"
    assert os.listdir(place / "source") == ["lab"]


def test_the_submission_writes_into_its_folder(course, place):
    course("open('written', 'w').close()")
    assert (place / "autograded" / "ana" / "lab" / "written").exists()


def test_what_hides_a_folder_cannot_be_removed(course):
    assert course(REMOVE) == "[-1, -1] []"


def test_the_submission_writes_into_no_other_folder_of_the_course(course, place):
    assert course(WRITE).splitlines() == ["-1", "-1"] + ["Read-only file system"] * 2
    assert not (place / "nbgrader_config.json").exists()


def test_the_temporary_folder_can_be_written_to_also_below_a_fixed_one(course, place, monkeypatch):
    temporary = place / "temporary"
    temporary.mkdir()
    os.chown(temporary, place.stat().st_uid, -1)
    monkeypatch.setenv("TMPDIR", str(temporary))
    course("import tempfile; tempfile.mkstemp()")
    assert len(list(temporary.iterdir())) == 1


def test_files_of_a_process_outside_cannot_be_reached(course, place):
    outside = f"/proc/{os.getpid()}/root{place}/source"
    source = f"import os\ntry: print(os.listdir({outside!r}))\nexcept PermissionError: print('no')"
    assert course(source) == "no"


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert str(tmp_path / "none") in without_folders.problem(tmp_path / "none", [], [])
