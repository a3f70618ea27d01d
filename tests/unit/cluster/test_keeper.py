"""What is to be tidied up is, however the notebook's process ends, and whatever it has forked."""

import os
import subprocess
import sys
import time

import pytest

from allranks.cluster.folders import CleanupProcess
from allranks.cluster.launchers.batch import BatchJob

SECONDS = 20
NOTEBOOK = """
import os, sys, time
from allranks.cluster.folders import CleanupProcess
keeper = CleanupProcess('touch "$1"', sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def held(monkeypatch):
    """Every pipe to a process has a second end, as in a process that was forked."""
    copies = []
    start = subprocess.Popen.__init__

    def begin(process, *words, **options):
        start(process, *words, **options)
        copies.append(os.dup(process.stdin.fileno()))

    monkeypatch.setattr(subprocess.Popen, "__init__", begin)
    yield
    for copy in copies:
        os.close(copy)


@pytest.mark.usefixtures("held")
def test_a_keeper_does_what_it_is_told_to_though_another_process_holds_its_pipe(tmp_path):
    keeper = CleanupProcess('rm "$1"; touch "$2"', *map(str, (tmp_path / "old", tmp_path / "new")))
    (tmp_path / "old").touch()
    keeper.close(SECONDS)
    keeper.close(SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.usefixtures("held")
def test_a_job_is_cancelled_though_another_process_holds_the_pipe(tmp_path):
    invitation = tmp_path / "invitation"
    invitation.touch()
    job = BatchJob("Slurm", "7", 2, ["touch", str(tmp_path / "cancelled")], str(invitation))
    job.close()
    assert [path.name for path in tmp_path.iterdir()] == ["cancelled"]


def test_a_keeper_tidies_up_after_a_killed_notebook_while_what_it_has_forked_lives(tmp_path):
    done = tmp_path / "done"
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(done)], stdout=subprocess.PIPE, text=True
    )
    assert notebook.stdout is not None
    child = int(notebook.stdout.readline())
    try:
        notebook.kill()
        notebook.wait()
        deadline = time.monotonic() + SECONDS
        while not done.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, 9)
        notebook.stdout.close()
