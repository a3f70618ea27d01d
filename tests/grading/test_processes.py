"""No process of a submission outlives its grading."""

import os
import subprocess
import sys

import pytest

from allranks.grading.processes import Processes, read_ids

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def test_all_processes_are_killed_if_there_are_too_many():
    with Processes(most=5) as processes:
        started = [subprocess.Popen(SLEEP) for _ in range(8)]
        for each in started:
            each.wait()  # for ever, if it were not killed
    assert processes.killed == "the notebook had more than 5 processes"


def test_processes_are_killed_at_once_where_a_kernel_begins_again():
    with Processes(most=50) as processes:
        first = subprocess.Popen(SLEEP)
        processes.kill()
        first.wait()
        second = subprocess.Popen(["/bin/true"])
        assert second.wait() == 0
    assert processes.killed == ""


def test_only_numbers_of_processes_are_read_from_what_a_submission_may_have_changed(tmp_path):
    file = tmp_path / "ids"
    for text in ("", "{}", "[1e999]", "[-1]", '["1"]', f"[{2**31}]", "[true]", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ValueError, match="expected ids"):
            read_ids(file)
    file.write_text("[7, 8]")
    assert read_ids(file) == [7, 8]


def test_neither_a_pipe_nor_a_device_makes_the_grader_hang(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    for path in (pipe, link, tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="expected ids"):
            read_ids(path)
