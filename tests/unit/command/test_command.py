"""The command ``allranks``: what is typed wrongly, and what its output goes to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allranks import __version__
from allranks.cluster.cluster import Cluster
from allranks.cluster.launchers import registry
from allranks.cluster.launchers.addresses import LOOPBACK
from allranks.cluster.launchers.command import SshLauncher
from allranks.cluster.launchers.job import CommandJob
from allranks.command import script
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


@pytest.mark.parametrize(
    ("words", "job"),
    [
        ("train.py --timeout 3", (None, ["train.py", "--timeout", "3"], None, False)),
        ("-np 2 python -u train.py -m x", (2, ["train.py", "-m", "x"], None, False)),
        ("-np 2 --timeout 5 -m train -np 3 -m", (2, ["train", "-np", "3", "-m"], 5.0, True)),
        ("-np 2 python -m json.tool --help", (2, ["json.tool", "--help"], None, True)),
        ("python3 -u -m train", (None, ["train"], None, True)),
    ],
)
def test_a_script_or_a_module_may_follow_the_options(words, job, monkeypatch):
    jobs = []
    monkeypatch.setattr(script, "run_script", lambda job: jobs.append(job) or 0)
    with pytest.raises(SystemExit):
        main(["run", *words.split()])
    (found,) = jobs
    assert (found.size, found.arguments, found.timeout, found.is_module) == job


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "expected a script, or -m and a module, found none. Type for example: allranks run"),
        ("-m", "expected a script, or -m and a module, found none"),
        ("python -c 1", "expected a script, or -m and a module, found -c 1"),
        ("-m train.py", "found the file train.py. Type: allranks run train.py"),
        ("-m trian.steps", "after -m, found none named trian.steps in this folder"),
        ("python -m 3", "after -m, found none named 3 in"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_to_type(words, said, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cluster, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        main(["run", *words.split()])
    assert str(ended.value.code).startswith("allranks: ")
    assert said in str(ended.value.code)


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


class Unreachable(SshLauncher):
    """One of another distribution, with a fault."""

    def address(self) -> str:
        return LOOPBACK

    def run(self, *_: object) -> CommandJob:
        raise ValueError("the launcher's own error")


def test_the_doctor_of_hosts_raises_what_a_launcher_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "named", lambda on: Unreachable("h1:2"))
    with pytest.raises(ValueError, match="the launcher's own error"):
        main(["doctor", "--on", "ssh:h1:2"])
