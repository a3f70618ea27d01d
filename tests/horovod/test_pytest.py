"""``pytest --nranks`` on tests of Horovod's API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
def test_allreduce(rank, size):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert float(hvd.allreduce(tf.constant(float(rank)), op=hvd.Sum)) == 1
"""


@pytest.mark.timeout(300)
def test_horovod_needs_no_line_of_set_up(tmp_path: Path) -> None:
    (tmp_path / "test_horovod.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--nranks", "2", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
