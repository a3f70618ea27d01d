"""Horovod's own scripts run unchanged, in cells and by themselves.

They import ``horovod``, and ``tf`` is the version of TensorFlow that they need. One notebook runs
all: first scripts for version 2 on ranks with TensorFlow, then scripts for version 1, for which
`version1` restarts the ranks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Cell, Kernel
from tests.mpi import launch

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).parents[2]
SHOW_DIGITS = (
    f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    "from tests.horovod import digits\ndigits.use()\ndel sys.path[0]\n"
)
pytestmark = pytest.mark.timeout(600)
ARGUMENTS = SCRIPTS / "tf1_arguments.py"
DONE = r"rank \d of 2: step 5, weights (\[.+\])"


def on_ranks(kernel: Kernel, text: str, options: str = "") -> Cell:
    """Runs a cell on all ranks."""
    return kernel.run(f"%%distributed {options}\n{text}", 200)


def run_script(kernel: Kernel, name: str) -> Cell:
    """Runs a script unchanged in a cell, without folding of equal output."""
    return on_ranks(kernel, (SCRIPTS / f"{name}.py").read_text(), "--no-fold")


def said(cell: Cell, pattern: str) -> list[str]:
    """Returns the group of a pattern in the output of each rank, in the order of the labels."""
    assert cell.status == "ok", cell.text
    return re.findall(pattern, cell.text)


def need_packages() -> None:
    """Skips a test if a package of its script is missing, without importing it."""
    for package, extra in (("tensorflow", "tensorflow"), ("sklearn", "lab")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install 'allranks[{extra}]'")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    need_packages()
    with Kernel(tmp_path_factory.mktemp("scripts"), {"TF_CPP_MIN_LOG_LEVEL": "3"}) as kernel:
        loaded = kernel.run("%load_ext allranks")
        assert loaded.status == "ok", loaded.text
        begin = "import sys\nprint('tensorflow' in sys.modules)\n" + SHOW_DIGITS
        start = on_ranks(kernel, begin, "-n 2 --preload tensorflow")
        assert "ranks 0–1 │ True\n" in start.text
        yield kernel
        kernel.shutdown()
        kernel.wait_for_no_children()


def without_gpu(kernel: Kernel) -> bool:
    cell = on_ranks(kernel, "import tensorflow as tf\nlen(tf.config.list_physical_devices('GPU'))")
    return "ranks 0–1 → 0" in cell.text


def test_ranks_and_their_gpus_are_listed(two):
    cell = run_script(two, "list_gpus")
    for rank in range(2):
        assert f"INFO:root:This is process with rank {rank} and local rank {rank}\n" in cell.text
    assert cell.text.count("gpus available are: [") == 1
    if without_gpu(two):
        # The error of the script itself on a machine without GPUs.
        assert cell.error_value == "ranks 0–1 of 2 at line 24: Exception: Not enough gpus."
    else:
        assert cell.status == "ok", cell.text


def test_a_loop_with_a_tape_makes_one_model_and_one_checkpoint(two):
    weights = said(cell := run_script(two, "tf2_tape"), r"loss 0\.\d+, weights (\S+)")
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert cell.text.count("checkpoint: checkpoints-1") == 1


def test_kerass_eight_changes_train_one_model(two):
    # The script draws its weights and batches without a seed; the broadcast makes the models equal.
    on_ranks(two, "import keras\nkeras.utils.set_random_seed(rank)").ok()
    cell = run_script(two, "keras_cifar")
    accuracies = [float(a) for a in said(cell, r"accuracy (\S+), learning rate 0\.020")]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.75
    assert sorted(said(cell, r"checkpoints: (\d+)")) == ["0", "6"]
    same = on_ranks(
        two,
        "import numpy as np\n"
        "norm = sum(float(np.abs(w.numpy()).sum()) for w in model.trainable_weights)\n"
        "len(set(allgather_object(norm)))",
    )
    assert "ranks 0–1 → 1\n" in same.text


def test_what_needs_version_1_says_what_to_type(two):
    advice = (
        "A script for TensorFlow 1 runs after %env ALLRANKS_TENSORFLOW=1 and %distributed restart "
        "in the notebook, or with ALLRANKS_TENSORFLOW=1 before the command in a shell."
    )
    first = on_ranks(two, f"{VERSION_1}opt.minimize(w**2)")
    needs = "RuntimeError: DistributedAdagradOptimizer needs a graph of TensorFlow 1, or"
    assert needs in first.text
    assert first.text.rstrip("\n").endswith(advice)
    second = on_ranks(two, "hvd.broadcast_global_variables(0)")
    assert "RuntimeError: broadcast_global_variables() needs a graph" in second.text
    assert second.text.rstrip("\n").endswith(advice)
    as_function = on_ranks(two, "opt.minimize(lambda: w**2)\nw.numpy()[0] < 3.0")
    assert "True" in as_function.text


VERSION_1 = """
import tensorflow as tf
import horovod.tensorflow as hvd
w = tf.Variable([3.0])
opt = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.1))
"""


@pytest.fixture(scope="module")
def version1(two: Kernel) -> Kernel:
    """The same notebook after the lines that the error message recommends."""
    for typed in ("%env ALLRANKS_TENSORFLOW=1", "%distributed restart"):
        cell = two.run(typed, 200)
        assert cell.status == "ok", cell.text
    on_ranks(two, SHOW_DIGITS)
    return two


def test_a_graph_is_built_after_the_advised_lines(version1):
    made = "made = opt.minimize(w**2), hvd.broadcast_global_variables(0)\n"
    cell = on_ranks(version1, f"{VERSION_1}{made}[type(one).__name__ for one in made]")
    assert cell.text.endswith("→ ['Operation', 'Operation']\n")


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


def test_a_script_with_arguments_runs_in_a_cell_and_its_graph_is_served_without_ranks(
    version1, tmp_path
):
    cell = on_ranks(version1, f"%run {ARGUMENTS} --steps 5 --train-dir {tmp_path}", "--no-fold")
    weights = said(cell, DONE)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    served = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        env={name: value for name, value in os.environ.items() if name != "ALLRANKS_TENSORFLOW"},
        text=True,
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert f"served {weights[0]}\nFalse ['MapDataset']\n" in served.stdout, served.stderr


def test_without_preload_the_first_import_in_a_cell_is_version_1(version1):
    version1.run("%distributed stop")
    cell = on_ranks(
        version1,
        "import sys\nbefore = 'tensorflow' in sys.modules\n"
        "import tensorflow as tf\nbefore, tf.__name__, tf.executing_eagerly()",
        "-n 2",
    )
    assert "ranks 0–1 → (False, 'tensorflow.compat.v1', False)" in cell.text
    assert "deprecated" not in cell.text


def test_a_script_with_arguments_runs_in_a_process_of_its_own():
    """Under mpiexec each of its ranks is one: see test_horovodrun.py."""
    need_packages()
    env = {"ALLRANKS_TENSORFLOW": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "allranks.horovod", str(ARGUMENTS), "--steps", "5"]
    ended = launch.run(command, timeout=250, **env)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"rank 0 of 1: step 5, weights \[.+\]", ended.stdout)


def test_no_script_says_allranks():
    for path in sorted(SCRIPTS.glob("*.py")):
        assert "allranks" not in path.read_text(), path
