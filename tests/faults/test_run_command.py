"""``allranks run``: a script on real ranks, what is said of it, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.faults.notebook import name_of
from tests.torch.conftest import MISSING, python_with_torch

MARK = "ALLRANKS_TEST_MARK"
GONE_SECONDS = 30
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
RUN = ["-m", "allranks.command.main", "run", "-np", "2"]


class Started(NamedTuple):
    """A command that runs in a session of its own, and what marks whatever it starts."""

    process: subprocess.Popen[str]
    mark: str

    def said(self, text: str) -> str:
        """Waits for a line that has a text in it; returns all until then."""
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
        raise AssertionError(f"expected {text!r}, found {''.join(lines)}")

    def press(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def left(self) -> list[psutil.Process]:
        deadline = time.monotonic() + GONE_SECONDS
        while (found := self.marked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def started(folder: Path, *words: str, python: str = sys.executable) -> Iterator[Started]:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [python, *RUN, *words],
        cwd=folder,
        env=os.environ | {MARK: mark, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Started(process, mark)
        finally:
            process.kill()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ddp.py").write_text(TORCH)
    return tmp_path


def test_the_rank_to_blame_comes_first_and_a_report_keeps_all_of_it(folder):
    flags = ["--report", "out/run.html", "--log-dir", "logs"]
    with started(folder, *flags, "train.py", "raise", "--epochs", "3") as run:
        said, _ = run.process.communicate(timeout=120)
        assert run.process.returncode == 1
        assert run.left() == []
    assert "ranks 0–1 │ arguments ['raise', '--epochs', '3']\n" in said
    assert said.index(") raised ValueError at line 12: ") < said.index("rank 0 was waiting at line")
    page = (folder / "out" / "run.html").read_text()
    for told in ("ended with exit code 1", "rank 1    │ rank 1 is here", "no such row", "<td>loss"):
        assert told in page
    assert "rank 0 is here\n" in (folder / "logs" / "rank-0.log").read_text()


def test_an_interrupt_ends_the_script_and_its_ranks(folder):
    with started(folder, "python", "-u", "train.py", "wait") as run:
        run.said("rank 1 is here")
        run.press()
        said, _ = run.process.communicate(timeout=60)
        assert run.process.returncode == 130
        assert "KeyboardInterrupt" in said
        assert run.left() == []


def test_a_second_interrupt_ends_ranks_that_do_not_hear_the_first(folder):
    with started(folder, "train.py", "insist") as run:
        run.said("rank 1 is here")
        run.press()
        run.said("pressed")
        run.press()
        said, _ = run.process.communicate(timeout=60)
        assert run.process.returncode == 130
        assert said.endswith("all 2 ranks were killed and their variables are lost.\n")
        assert run.left() == []


def test_an_interrupt_while_the_ranks_start_leaves_nothing(folder):
    with started(folder, "train.py", "wait") as run:
        while not any(name_of(one).startswith("prterun") for one in run.marked()):
            assert run.process.poll() is None
            time.sleep(0.02)
        run.press()
        said, _ = run.process.communicate(timeout=60)
        assert (run.process.returncode, "Traceback" in said) == (130, False), said
        assert run.left() == []


def test_nothing_is_left_where_the_command_is_killed(folder):
    with started(folder, "train.py", "wait") as run:
        run.said("rank 1 is here")
        assert run.marked()
        run.process.kill()
        run.process.wait()
        assert run.left() == []


def test_torchs_process_group_finds_the_ranks(folder):
    python = python_with_torch() or pytest.skip(MISSING)
    with started(folder, "ddp.py", python=python) as run:
        said, _ = run.process.communicate(timeout=200)
        assert (run.process.returncode, "ranks 0–1 │ sum [3.0, 3.0]" in said) == (0, True), said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.py"], "expected a script, found no file 'nowhere.py'. Type its path."),
        (
            ["--report", ".", "train.py"],
            "expected a place to write to, found [Errno 21] Is a directory",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(folder, words, expected):
    with started(folder, *words) as run:
        said, _ = run.process.communicate(timeout=60)
    assert said.startswith(f"allranks: {expected}")


def test_a_script_that_ends_its_process_is_told_of_in_whole_lines(folder):
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    with started(folder, "ends.py") as run:
        said, _ = run.process.communicate(timeout=120)
    assert "\nThe logs are in " in said
