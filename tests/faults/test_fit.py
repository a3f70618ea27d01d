"""``model.fit`` on all ranks ends as every cell does, whatever happens in it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

import pytest

from tests.faults.notebook import Notebook

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow: pip install 'allranks[tensorflow]'",
)
BEGIN = """
import keras, numpy as np, time
import allranks.tensorflow.keras as hvd
kept = 10 * rank
keras.utils.set_random_seed(rank)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
x, y = np.random.normal(size=(64, 3)), np.ones((64, 1))
begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)

def at_batch(number, act):
    def look(batch, logs):
        if batch == number:
            act()
    return keras.callbacks.LambdaCallback(on_train_batch_end=look)
"""
TRAIN = "history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[begin])\n"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as shared:
        begun = shared.on_ranks(BEGIN, "-n 2 --preload tensorflow", timeout=120)
        assert begun.status == "ok", begun.text
        shared.note_files()
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


@pytest.fixture(autouse=True)
def _training_goes_on(training: Notebook) -> Iterator[None]:
    yield
    again = training.on_ranks(
        "begin.broadcast_done = False\n" + TRAIN + "flat = float(sum(np.abs(w).sum() for w in "
        "model.get_weights()))\nkept // 10, len(set(allgather_object(flat)))",
        timeout=120,
    )
    assert again.status == "ok", again.text
    assert re.findall(r"→ \((\d), 1\)$", again.text, re.MULTILINE) == ["0", "1"]


def test_a_rank_that_raises_in_fit_is_the_one_that_is_shown(training):
    cell = training.on_ranks(
        "def fail():\n"
        "    if rank == 1:\n"
        "        [][7]\n"
        "model.fit(x, y, batch_size=8, verbose=0, callbacks=[begin, at_batch(2, fail)])"
    )
    assert cell.error_value == "rank 1 of 2 at line 4: IndexError: list index out of range"
    assert "rank 0 was waiting at line 5: model.fit(" in cell.text
    assert re.search(r"rank 1 has left [^\n]*raised IndexError", cell.text)


def test_an_interrupt_ends_fit_on_every_rank(training):
    cell = training.start_on_ranks(
        "model.fit(x, y, batch_size=8, epochs=100_000, verbose=0, "
        "callbacks=[begin, at_batch(3, lambda: print('training', flush=True))])"
    )
    cell.wait_for("training")
    training.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted"
    assert "ranks 0–1" in cell.error_value


def test_an_interrupt_reaches_a_rank_that_waits_in_fit_for_another(training):
    cell = training.start_on_ranks(
        "def sleep():\n"
        "    if rank == 1:\n"
        "        print('asleep', flush=True)\n"
        "        time.sleep(600)\n"
        "model.fit(x, y, batch_size=8, verbose=0, callbacks=[begin, at_batch(2, sleep)])"
    )
    cell.wait_for("asleep")
    training.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted"


def test_a_mistake_is_shown_without_frames_that_are_not_the_users(training):
    cell = training.on_ranks("import allranks.tensorflow as plain\nplain.broadcast([1.0], 7)")
    assert "UsageError: broadcast needs a root that is in the process set" in cell.text
    assert "File " not in cell.text
    cell = training.on_ranks(
        "average = hvd.callbacks.MetricAverageCallback()\n"
        "def own_code():\n"
        "    average.on_epoch_end(0, {'mae' if rank else 'mape': 1.0})\n"
        "own_code()"
    )
    assert "CollectiveMismatch: MetricAverageCallback needs the same metrics" in cell.text
    assert "line 4, in own_code()" in cell.text
    assert "File " not in cell.text


def test_source_that_tensorflow_writes_lies_where_it_is_removed_with_the_ranks(training):
    traced = "import tensorflow as tf\ntf.function(lambda x: x + 1)(1).numpy()"
    assert training.on_ranks(traced).text == "ranks 0–1 → np.int32(2)\n"
    assert list(training.temporary.rglob("__autograph*")) != []
    assert list(training.temporary.glob("__autograph*")) == []


def test_different_numbers_of_batches_end_with_who_has_left(training):
    cell = training.on_ranks(
        "rows = 64 if rank == 0 else 40\nmodel.fit(x[:rows], y[:rows], batch_size=8, verbose=0)"
    )
    assert cell.error_name == "CellFailed"
    assert ") raised RankLeft at line 3: model.fit(" in cell.text
    assert re.search(
        r"rank 1 finished In\[\d+\] without calling [^\n]*; rank 0 waits for it", cell.text
    )
    assert "rank 1 finished the cell" in cell.text


def test_different_numbers_of_batches_are_told_before_training(training):
    cell = training.on_ranks(
        "rows = 64 if rank == 0 else 40\n"
        "model.fit(x[:rows], y[:rows], batch_size=8, verbose=0, callbacks=[begin])"
    )
    assert "found 1 epochs of 8 steps on rank 0, 1 epochs of 5 steps on rank 1" in cell.text
    assert "ranks 0–1" in cell.error_value


def test_the_summary_of_a_model_is_one_block(training):
    cell = training.on_ranks("model.summary()")
    labels, blocks = cell.displays
    assert labels["text/plain"] == "ranks 0–1:"
    assert "Model: " in blocks["text/html"]
    assert "Total params" in blocks["text/html"]


def test_what_tensorflow_writes_at_its_start_is_in_the_log_only(training):
    said = "absl::InitializeLog() is called"
    before = training.logs()["rank-0.log"].read_text().count(said)
    cell = training.on_ranks(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import tensorflow'])\n1",
        "-r 0",
    )
    assert cell.text == "rank 0 → 1\n"
    assert training.logs()["rank-0.log"].read_text().count(said) > before
