"""The command ``allranks``: what is typed wrongly, and what its output goes to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allranks import __version__
from allranks.command.main import main

COMMAND = [sys.executable, "-m", "allranks"]


def test_the_package_is_the_command_which_ends_quietly_where_nobody_reads():
    ended = subprocess.run([*COMMAND, "--version"], text=True, timeout=60, capture_output=True)
    assert (ended.returncode, ended.stdout) == (0, f"{__version__}\n")
    command = f"{sys.executable} -m allranks doctor | true"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export -np 0 a.ipynb", "expected a number of ranks from 1, found '0'"),
        (f"export -np {5000 * '9'} a.ipynb", "expected a number of ranks from 1, found '9999"),
        ("run -np two a.py", "expected a number of ranks from 1, found 'two'"),
        ("install-kernel --prefix {tmp} --gpus banana", "expected --gpus with numbers of GPUs"),
    ],
)
def test_a_wrong_option_is_refused(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.format(tmp=tmp_path).split())
    # A text as the code is printed by the interpreter, with exit code 1.
    assert ended.value.code not in (None, 0)
    assert said in capsys.readouterr().err + str(ended.value.code)
    assert not list(tmp_path.iterdir())


def test_the_kernel_has_the_options_of_features_and_its_own_logo(tmp_path, repository):
    command = [*COMMAND, "install-kernel", "--prefix", str(tmp_path), "--torch", "gloo"]
    ended = subprocess.run([*command, "--on", "local", "--log-to", "mlflow"], capture_output=True)
    assert ended.returncode == 0, ended.stderr
    (spec,) = tmp_path.rglob("kernel.json")
    start = json.loads(spec.read_text())["env"]["ALLRANKS_START"]
    assert start == "--on local --torch gloo --log-to mlflow"
    # Not Python's logo: the launcher shows both kernels.
    logos = repository / "allranks" / "command" / "kernel_logo"
    for logo in logos.iterdir():
        assert (spec.parent / logo.name).read_bytes() == logo.read_bytes()
    assert {one.name for one in spec.parent.glob("logo*")} == {one.name for one in logos.iterdir()}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, "doctor"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    said = "allranks: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)
