"""A training goes on from its last commit where a rank has died in its middle."""

import re

import pytest

COMMITTED = 10
STEPS = 20
TRAINING = """
import os, numpy as np, keras
import allranks.tensorflow as hvd
from allranks.tensorflow.keras import elastic
hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
numbers = np.random.default_rng(rank)
x = numbers.normal(size=(20, 8, 4)).astype(np.float32)
y = x.sum(axis=2, keepdims=True)
state = elastic.KerasState(model, batch=0)
done = []
def die_at(step):
    done.append(step)
    if rank == 1 and step == 13 and not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(6)
"""
LOOP = """
@elastic.run
def train(state):
    while state.batch < 20:
        die_at(state.batch)
        model.train_on_batch(x[state.batch], y[state.batch])
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
"""
FIT = """
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


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    from tests.faults.notebook import Notebook

    with Notebook(tmp_path_factory.mktemp("elastic")) as notebook:
        started = notebook.run("%distributed start -n 2 --preload tensorflow,keras")
        assert started.status == "ok", started.text
        yield notebook
        notebook.shutdown()
        notebook.check_nothing_left()


def train(notebook, loop, marker, made=TRAINING, end=END):
    return notebook.on_ranks(f"marker = {str(marker)!r}{made}{loop}{end}", timeout=200)


def losses(text):
    return sorted(re.findall(r"loss ([\d.]+)", text))


@pytest.mark.parametrize("loop", [LOOP, FIT], ids=["a loop", "fit"])
def test_a_training_goes_on_from_its_last_commit(trainer, tmp_path, loop):
    undisturbed = train(trainer, loop, tmp_path)
    assert undisturbed.status == "ok", undisturbed.text
    assert f"steps 0 {STEPS - 1}" in undisturbed.text
    cell = train(trainer, loop, tmp_path / "died")
    assert cell.status == "ok", cell.text
    assert "rank 1 of 2" in cell.text
    assert "The cell runs again" in cell.text
    assert "train continues from its last commit" in cell.text
    assert f"steps {COMMITTED} {STEPS - 1}" in cell.text
    assert losses(cell.text) == losses(undisturbed.text) != []


def test_fresh_ranks_go_on_when_the_cell_is_run_again(trainer, tmp_path):
    undisturbed = train(trainer, LOOP, tmp_path)
    trainer.run("%distributed heal off")
    assert train(trainer, LOOP, tmp_path / "died").error_name == "ClusterLost"
    again = train(trainer, LOOP, tmp_path / "died")
    assert again.status == "ok", again.text
    assert f"steps {COMMITTED} {STEPS - 1}" in again.text
    assert losses(again.text) == losses(undisturbed.text) != []
    trainer.run("%distributed heal on")
    assert f"steps 0 {STEPS - 1}" in train(trainer, LOOP, tmp_path / "died").text


def test_a_rank_that_dies_each_time_from_the_same_commit_ends_the_cell(trainer, tmp_path):
    ever = TRAINING.replace(" and not os.path.exists(marker)", "")
    cell = train(trainer, LOOP, tmp_path / "died", ever)
    assert cell.error_name == "RankDied", cell.text
    assert cell.text.count("The cell runs again") == 3
    other = "".join(source.replace("train(", "other(") for source in (LOOP, END))
    assert f"steps 0 {STEPS - 1}" in train(trainer, other, tmp_path, end="").text


def test_a_commit_that_does_not_fit_is_said_and_left(trainer, tmp_path):
    trainer.run("%distributed heal ask")
    assert train(trainer, LOOP, tmp_path / "died").error_name == "RankDied"
    assert "rank 1 was replaced" in trainer.run("%distributed heal").text
    trainer.run("%distributed heal on")
    wider = TRAINING.replace("Dense(8)", "Dense(9)")
    cell = train(trainer, LOOP, tmp_path, wider)
    assert cell.status == "ok", cell.text
    assert (
        "train starts from the beginning: its last commit cannot be used: it does not fit"
        in cell.text
    )
    assert f"steps 0 {STEPS - 1}" in cell.text
