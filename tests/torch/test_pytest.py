"""``pytest --nranks`` on tests of torch.distributed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = """
import pytest
import torch
import torch.distributed as dist

@pytest.fixture
def group():
    dist.init_process_group()
    yield
    dist.destroy_process_group()

def test_all_reduce(group, rank, size):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == size * (size - 1) / 2

def test_missing_call(group, rank):
    if rank == 0:
        dist.barrier()

def test_after_it(group, rank, size):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
"""


@pytest.mark.timeout(300)
def test_process_groups_need_no_line_of_set_up(python: str, tmp_path: Path) -> None:
    (tmp_path / "test_groups.py").write_text(TESTS)
    ended = subprocess.run(
        [python, "-m", "pytest", "--nranks", "2", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "RankLeft: rank 1 finished test_missing_call" in ended.stdout
