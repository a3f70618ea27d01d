"""`allranks.keras` trains alike with each backend of Keras: one suite, run under mpiexec.

With TensorFlow tests/tensorflow/test_under_mpiexec.py runs it, beside its own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, mpiexec

RUN = str(ROOT / "tests" / "mpi" / "run.py")
SUITE = str(Path(__file__).with_name("ranks") / "training_suite.py")
SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow beside this Python: pip install 'allranks[tensorflow]'",
)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_training_with_jax_and_with_torch(backend: str, python: str) -> None:
    ended = mpiexec(
        2, RUN, SUITE, python=python, timeout=250, KERAS_BACKEND=backend, OMP_NUM_THREADS="1",
        **SETTINGS,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert "rank 0 of 2\n" in ended.stdout
    assert f"the backend {backend}" in ended.stdout


def imports(python: str, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True).stderr


def test_horovods_api_points_to_allranks_keras_where_tensorflow_is_not_the_backend(
    python: str,
) -> None:
    said = imports(python, "import allranks.horovod, horovod.keras")
    assert "needs TensorFlow" in said
    assert "type: import allranks.keras as hvd" in said


@needs_tensorflow
def test_horovods_api_refuses_another_backend() -> None:
    asked = "import keras; keras.backend.backend = lambda: 'torch'; "
    said = imports(sys.executable, f"{asked}import allranks.horovod, horovod.keras")
    assert "needs the backend tensorflow, found torch" in said
    assert "import allranks.keras as hvd" in said
