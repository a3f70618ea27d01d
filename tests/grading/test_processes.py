"""No process of a submission outlives its grading."""

import subprocess
import sys

from allranks.grading.processes import Processes

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
