"""``allranks run``: a script on real ranks, what is said of it, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.faults.notebook import name_of
from tests.fuzz.ranks import unfold
from tests.kernel import MARK, marked, wait_until
from tests.torch.conftest import MISSING, python_with_torch

SCRIPT = """
import sys, time
import allranks.batch
from allranks.batch import *

what = sys.argv[1]
print("arguments", sys.argv[1:])
print("rank", rank, "is here", flush=True)
log(loss=0.5 * rank)
allranks.batch.cell()
if what == "raise" and rank == 1:
    raise ValueError("no such row")
while what in ("wait", "insist"):
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("pressed", flush=True)
        if what == "wait":
            raise
barrier()
"""
TORCH = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", x.tolist())
dist.destroy_process_group()
"""
BEGINS_AND_ENDS = """
import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI

MPI.Init()
print("sum", MPI.COMM_WORLD.allreduce(1))
MPI.Finalize()
"""
RUN = ["-m", "allranks.command.main", "run", "-np", "2"]


class Command(subprocess.Popen):
    """A command in a session of its own; a mark is on whatever it starts."""

    def __init__(self, folder, words, python):
        self.mark = uuid.uuid4().hex
        super().__init__(
            [python, *RUN, *words],
            cwd=folder,
            env=os.environ | {MARK: self.mark, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text):
        assert any(text in line for line in self.stdout), f"expected {text!r}"

    def press(self):
        os.killpg(self.pid, signal.SIGINT)

    def end(self):
        """Returns its exit code and what it says from now on, once nothing of it is left."""
        said, _ = self.communicate(timeout=200)
        wait_until(lambda: not marked(self.mark), lambda: f"the end of {marked(self.mark)}")
        return self.returncode, said


@pytest.fixture
def run(tmp_path):
    scripts = {
        "train.py": SCRIPT,
        "ddp.py": TORCH,
        "ends.py": "import os\nos._exit(3)\n",
        "mpi.py": BEGINS_AND_ENDS,
        "exit.py": "import atexit\natexit.register(print, 'written at the exit')\n",
    }
    for name, source in scripts.items():
        (tmp_path / name).write_text(source)
    started = []

    def start(*words, python=sys.executable):
        started.append(Command(tmp_path, words, python))
        return started[-1]

    yield start
    for command in started:
        with command:
            command.kill()


def test_the_rank_to_blame_comes_first_and_a_report_keeps_all_of_it(run, tmp_path):
    flags = ["--report", "out/run.html", "--log-dir", "logs"]
    code, said = run(*flags, "train.py", "raise", "--epochs", "3").end()
    assert code == 1
    first = "arguments ['raise', '--epochs', '3']"
    assert [unfold(said)[rank][0] for rank in range(2)] == [first, first]
    assert said.index(") raised ValueError at line 12: ") < said.index("rank 0 was waiting at line")
    page = (tmp_path / "out" / "run.html").read_text()
    for told in ("ended with exit code 1", "no such row", "<td>loss"):
        assert told in page
    assert "rank 1 is here" in unfold(page.replace("</pre>", "\n"))[1]
    assert "rank 0 is here\n" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("what", ["wait", "insist"])
def test_an_interrupt_ends_the_script_and_a_second_one_ranks_that_ignore_the_first(run, what):
    command = run("python", "-u", "train.py", what)
    command.wait_for("rank 1 is here")
    command.press()
    if what == "insist":
        command.wait_for("all ranks will be killed by the next interrupt")
        command.press()
    code, said = command.end()
    assert code == 130
    lost = "all 2 ranks were killed and their variables are lost.\n"
    assert said.endswith(lost) == (what == "insist")
    assert "KeyboardInterrupt" in said or what == "insist"


def test_an_interrupt_while_the_ranks_start_leaves_nothing(run):
    command = run("train.py", "wait")
    wait_until(lambda: any(name_of(one).startswith("prterun") for one in marked(command.mark)))
    command.press()
    code, said = command.end()
    assert (code, "Traceback" in said) == (130, False), said


def test_nothing_is_left_where_the_command_is_killed(run):
    command = run("train.py", "wait")
    command.wait_for("rank 1 is here")
    assert marked(command.mark)
    command.kill()
    command.end()


def test_a_script_may_begin_and_end_mpi(run):
    assert run("mpi.py").end() == (0, "ranks 0–1 │ sum 2\n")


def test_what_a_script_writes_at_its_exit_is_shown_and_logged(run, tmp_path):
    said = run("--log-dir", "logs", "exit.py").end()
    assert said == (0, "ranks 0–1 │ written at the exit\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "written at the exit\n"


def test_torchs_process_group_finds_the_ranks(run):
    code, said = run("ddp.py", python=python_with_torch() or pytest.skip(MISSING)).end()
    summed = [rank for rank, lines in unfold(said).items() if "sum [3.0, 3.0]" in lines]
    assert (code, sorted(summed)) == (0, [0, 1]), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "allranks: expected a script, found no file 'nowhere.py'. Type its path."),
        (
            ["--report", ".", "train.py"],
            "allranks: expected a place to write to, found [Errno 21] Is a directory",
        ),
        (["ends.py"], "\nThe logs are in "),
    ],
)
def test_what_cannot_be_run_and_a_script_that_ends_its_process_are_told_of(run, words, said):
    found = run(*words).end()[1]
    assert said in found
    assert not said.startswith("allranks: ") or found.startswith(said)
