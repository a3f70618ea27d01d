"""``model.fit`` in a cell: errors, interrupts, and training after the death of a rank."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook
from tests.features.test_verdict import had_cores
from tests.kernel import patched

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow: pip install 'allranks[tensorflow]'",
)
FIT = """
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
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as shared:
        started = shared.run("%distributed start -n 2 --preload tensorflow,keras", 120)
        assert started.status == "ok", started.text
        shared.note_files()
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


@pytest.fixture(scope="module")
def with_model(two: Notebook) -> Notebook:
    begun = two.on_ranks(FIT, timeout=120)
    assert begun.status == "ok", begun.text
    return two


@pytest.fixture
def training(with_model: Notebook) -> Iterator[Notebook]:
    """Ranks with a model whose training continues after the test."""
    yield with_model
    again = with_model.on_ranks(
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


TRAINS = "print('reached', flush=True)"
SLEEPS = f"{TRAINS} or time.sleep(600) if rank == 1 else None"


@pytest.mark.parametrize("act", [TRAINS, SLEEPS], ids=["all train", "one waits for the other"])
def test_an_interrupt_ends_fit_on_every_rank(training, act):
    cell = training.start_on_ranks(
        f"model.fit(x, y, batch_size=8, epochs=100_000, verbose=0, "
        f"callbacks=[begin, at_batch(3, lambda: {act})])"
    )
    cell.wait_for("reached")
    training.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted"
    assert "ranks 0–1" in cell.error_value


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
    line = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    written = f"{line}\n".encode()
    cell = training.on_ranks(f"import os\nos.write(2, {written}) == {len(written)}", "-r 0")
    assert cell.text == "rank 0 → True\n"
    assert line in training.logs()["rank-0.log"].read_text()


@pytest.mark.replaces
def test_a_death_in_fit_leaves_the_others_their_model_and_the_new_rank_what_was_preloaded(
    with_model,
):
    assert with_model.on_ranks(TRAIN + "trained = model.count_params()", timeout=120).status == "ok"
    cell = with_model.on_ranks(
        "import os\ndies = [at_batch(3, lambda: os._exit(6))] * rank\n"
        "model.fit(x, y, batch_size=8, verbose=0, callbacks=[begin, *dies])"
    )
    assert cell.error_name == "RankDied", cell.text
    assert "rank 1 of 2" in cell.error_value
    kept = with_model.on_ranks("kept, trained == model.count_params() > 0", "-r 0")
    assert kept.text == "rank 0 → (0, True)\n"
    there = with_model.on_ranks("import sys; 'tensorflow' in sys.modules", "-r 1")
    assert "rank 1 → True" in there.text
    again = with_model.on_ranks(FIT + TRAIN, timeout=120)
    assert again.status == "ok", again.text


COMMITTED = 10
STEPS = 20
PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
(SOURCE,) = re.findall(r"test_in_a_notebook.py -->\n```python\n%%[^\n]*\n(.*?)```", PAGE, re.DOTALL)
#: The example of the page with 20 batches, and what a test needs before and after.
MADE, _, LOOP = SOURCE.replace("(1000, 8,", "(20, 8,").replace("% 100", "% 5").partition("\n@")
TRAINING = f"""
import os, keras
import allranks.tensorflow as hvd
hvd.init()
last = hvd.add_process_set([1])
keras.utils.set_random_seed(1)
{MADE}
y = x.sum(axis=2, keepdims=True)
done = []
def die_at(step):
    done.append(step)
    if rank == 1 and step == 13 and not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(6)
"""
LOOP = "@" + LOOP.replace("model.train_on", "die_at(state.batch)\n        model.train_on")
LOOP = LOOP.removesuffix("train(state)\n")
IN_FIT = """
class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        die_at(state.batch)
class Counts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
@elastic.run
def train(state):
    rest = x[state.batch:].reshape(-1, 4), y[state.batch:].reshape(-1, 1)
    model.fit(*rest, batch_size=8, shuffle=False, verbose=0, callbacks=[Dies(), Counts()])
"""
END = """
train(state)
print("steps", done[0], done[-1], "loss %.6f" % model.evaluate(x[0], y[0], verbose=0))
"""


def train(notebook, loop, marker, made=TRAINING, end=END):
    return notebook.on_ranks(f"marker = {str(marker)!r}{made}{loop}{end}", timeout=200)


def losses(text):
    return sorted(re.findall(r"loss ([\d.]+)", text))


@pytest.fixture(scope="module")
def undisturbed(two, tmp_path_factory):
    """Returns the losses of a training without a death; each training runs once."""

    @functools.cache
    def run(loop):
        cell = train(two, loop, tmp_path_factory.mktemp("undisturbed"))
        assert cell.status == "ok", cell.text
        assert f"steps 0 {STEPS - 1}" in cell.text
        return losses(cell.text)

    return run


@pytest.mark.replaces
@pytest.mark.parametrize("loop", [LOOP, IN_FIT], ids=["a loop", "fit"])
def test_a_training_goes_on_from_its_last_commit(two, undisturbed, tmp_path, loop):
    expected = undisturbed(loop)
    cell = train(two, loop, tmp_path / "died")
    assert cell.status == "ok", cell.text
    assert "rank 1 of 2" in cell.text
    assert "The cell runs again" in cell.text
    assert "train continues from its last commit" in cell.text
    assert f"steps {COMMITTED} {STEPS - 1}" in cell.text
    assert losses(cell.text) == expected != []


def test_fresh_ranks_go_on_when_the_cell_is_run_again(two, undisturbed, tmp_path):
    expected = undisturbed(LOOP)
    two.run("%distributed heal off")
    assert train(two, LOOP, tmp_path / "died").error_name == "ClusterLost"
    again = train(two, LOOP, tmp_path / "died")
    assert again.status == "ok", again.text
    assert f"steps {COMMITTED} {STEPS - 1}" in again.text
    assert losses(again.text) == expected != []
    two.run("%distributed heal on")


@pytest.mark.replaces
def test_a_rank_that_dies_each_time_from_the_same_commit_ends_the_cell(two, tmp_path):
    ever = TRAINING.replace(" and not os.path.exists(marker)", "")
    cell = train(two, LOOP, tmp_path / "died", ever)
    assert cell.error_name == "RankDied", cell.text
    assert cell.text.count("The cell runs again") == 3
    other = "".join(source.replace("train(", "other(") for source in (LOOP, END))
    assert f"steps 0 {STEPS - 1}" in train(two, other, tmp_path, end="").text


@pytest.mark.replaces
def test_a_commit_that_does_not_fit_is_said_and_left(two, tmp_path):
    two.run("%distributed heal ask")
    assert train(two, LOOP, tmp_path / "died").error_name == "RankDied"
    assert "rank 1 was replaced" in two.run("%distributed heal", 200).text
    two.run("%distributed heal on")
    wider = TRAINING.replace("Dense(1)", "Dense(9), keras.layers.Dense(1)")
    cell = train(two, LOOP, tmp_path, wider)
    assert cell.status == "ok", cell.text
    assert (
        "train starts from the beginning: its last commit cannot be used: it does not fit"
        in cell.text
    )
    assert f"steps 0 {STEPS - 1}" in cell.text


RETRACED = """
import numpy as np, tensorflow as tf
weights = tf.Variable(tf.ones((50, 50)))

@tf.function
def train(x, step):
    for _ in range(40):
        x = tf.tanh(x @ weights) * (step + 1)
    return tf.reduce_sum(x)

for step in range(200):
    allreduce(train(tf.ones((8, 50)), {step}).numpy(), name="gradients")
"""


def test_a_function_that_is_traced_in_every_step_is_named(two):
    # Also where the ranks answer late.
    with patched(two.run, "allranks.features.verdict.notebook._ASK_SECONDS", 60):
        cell = two.on_ranks(RETRACED.format(step="step"), timeout=200)
        causes = two.run("%distributed why").text
        healthy = two.on_ranks(RETRACED.format(step="tf.constant(step)"), timeout=200)
    assert cell.status == "ok", cell.text
    said = re.findall(r"all ranks trace or compile for .*", causes)
    # Ranks that had no core may have looked too rarely.
    assert len(said) == 1 or not had_cores(causes, ranks=2), causes
    for line in said:
        assert "`allreduce(train(tf.ones((8, 50)), step).numpy()" in line
        # Below the cell stands the costliest cause.
        assert line.rstrip(".") in cell.text or not causes.partition("]: ")[2].startswith(line)
    assert "trace or compile" not in healthy.text
