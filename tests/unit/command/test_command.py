"""The command ``allranks`` in a process of its own: what is typed wrongly, and where it is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks import __version__


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", *words]
    return subprocess.run(command, text=True, timeout=60, **{"capture_output": True} | options)


def test_the_package_is_the_command() -> None:
    ended = run("--version")
    assert (ended.returncode, ended.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export -np 0 a.ipynb", "expected a number of ranks from 1, found '0'"),
        (f"export -np {5000 * '9'} a.ipynb", "expected a number of ranks from 1, found '9999"),
        ("run -np two a.py", "expected a number of ranks from 1, found 'two'"),
        ("install-kernel --prefix {tmp} --gpus banana", "expected --gpus with numbers of GPUs"),
    ],
)
def test_a_wrong_option_is_refused(words: str, said: str, tmp_path: Path) -> None:
    ended = run(*words.format(tmp=tmp_path).split())
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = run("doctor", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    said = "allranks: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_output_that_nobody_reads_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m allranks doctor | true"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
