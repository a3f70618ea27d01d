"""``allranks.run`` and ``horovod.run``: a function on ranks, its results, its failures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

from allranks import run
from allranks.errors import UsageError
from tests.kernel import Kernel

DEFINE = """
import allranks

def place(scale, plus=0):
    from allranks import collectives
    return scale * collectives.rank() + plus, collectives.size()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with three ranks; `fresh` is what it got from ranks that a call started."""
    with Kernel(tmp_path_factory.mktemp("notebook")) as kernel:
        kernel.run(DEFINE)
        fresh = kernel.run("allranks.run(place, (10,), {'plus': 1}, np=2)")
        assert fresh.text == "[(1, 2), (11, 2)]\n"
        kernel.wait_for_no_children()
        kernel.run("%load_ext allranks")
        kernel.run("%%distributed -n 3\nmine = 100 * rank")
        yield kernel


def test_results_come_in_order_of_rank(notebook):
    kept = notebook.run(
        "def mine_plus(x):\n    return mine + x\nallranks.run(mine_plus, (7,), np=3)"
    )
    assert kept.text == "[7, 107, 207]\n"
    one = notebook.run("import horovod\nhorovod.run(place, args=(5,))")
    assert one.text == "[(0, 1)]\n"


def test_a_failure_shows_the_ranks_own_traceback(notebook):
    cell = notebook.run(
        "def fail():\n"
        "    from allranks import collectives\n"
        "    if collectives.rank() == 1:\n"
        "        [][3]\n"
        "    collectives.barrier()\n"
        "allranks.run(fail, np=2)"
    )
    assert (cell.error_name, cell.status) == ("CellFailed", "error")
    assert "rank 1 (" in cell.text
    assert ") raised IndexError at line 4" in cell.text
    assert "rank 0 was waiting" in cell.text


def test_a_script_that_fails_ends_with_the_ranks_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import allranks\n\ndef fail():\n    raise ValueError('of the rank')\n\n"
        "if __name__ == '__main__':\n    allranks.run(fail, np=2)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "raised ValueError at line 4" in ended.stderr
    assert "ValueError: of the rank" in ended.stderr


def test_on_the_ranks_it_calls_the_function_where_they_are(notebook):
    cell = notebook.run(
        "%%distributed\n"
        "import horovod\n"
        "def place():\n"
        "    return rank * 10\n"
        "horovod.run(place, np=3)"
    )
    assert cell.text.endswith("ranks 0–2 → [0, 10, 20]\n")
    other = notebook.run("%%distributed\nhorovod.run(place, np=4)")
    assert "calls the function on all 3 that are there, found num_proc=4" in other.text


def test_horovods_tensorflow_says_that_it_needs_a_rank(notebook):
    cell = notebook.run("import horovod.tensorflow as hvd")
    assert "Begin the cell with: %%distributed" in cell.text


def test_the_name_horovod_can_be_switched_off(notebook):
    for line in ("%env ALLRANKS_HOROVOD=off", "%distributed restart"):
        assert notebook.run(line).status == "ok"
    cell = notebook.run("%%distributed\nimport horovod.tensorflow as hvd")
    assert "ModuleNotFoundError: No module named 'horovod'" in cell.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_proc": 2, "np": 3}, "found num_proc=2 and np=3"),
        ({"hosts": "h1:2,h2:2", "np": 4}, "Type: hosts='localhost:4'"),
        ({"hosts": "localhost:2", "np": 4}, "expected hosts with room for 4 ranks"),
        ({"min_num_proc": 2, "np": 4}, "the number of ranks is fixed"),
        ({"ssh_port": 22}, "the ranks run on this machine"),
        ({"lr": 0.1}, "run(train, args=(0.01,), np=4)"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(UsageError) as raised:
        run(print, **arguments)
    assert said in str(raised.value)


OLDER = """
import tensorflow.keras.backend as K1
from tensorflow.keras import backend as K2
from keras import backend as K3
import keras.backend as K4
import tensorflow as tf
from tensorflow import train
from tensorflow.keras import optimizers
from tensorflow.keras.models import Model, Sequential
from tensorflow.keras.optimizers import SGD
from keras import Variable
from keras.preprocessing.image import ImageDataGenerator, img_to_array
from keras.preprocessing.sequence import pad_sequences

K5 = tf.keras.backend
import horovod.tensorflow.keras as hvd

for K in (K1, K2, K3, K4, K5, tf.keras.backend):
    K.set_session(tf.Session(config=tf.ConfigProto()))
    optimizer = SGD(lr=0.5, decay=0.0)
    K.set_value(optimizer.lr, 0.25)
    assert float(K.get_value(optimizer.lr)) == 0.25
    assert K.constant(1.0).shape == ()
    with K.name_scope("x"):
        pass
assert train.AdamOptimizer is tf.compat.v1.train.AdamOptimizer
assert optimizers.Adam(0.1).variables()
assert Model.fit_generator and Sequential.evaluate_generator
assert Variable(1.0).ref()
assert ImageDataGenerator is tf.keras.preprocessing.image.ImageDataGenerator
assert pad_sequences([[1], [1, 2]]).shape == (2, 2)
assert K3.mean is K5.mean
try:
    tf.no_such_name
except AttributeError as error:
    assert "no attribute 'no_such_name'" in str(error)


def main(rate):
    hvd.init()
    return hvd.rank(), float(hvd.DistributedOptimizer(SGD(lr=rate)).lr)


if __name__ == "__main__":
    import horovod

    print(horovod.run(main, args=(0.5,), np=1))
"""


def test_a_script_and_the_function_that_it_sends_find_older_lines(tmp_path):
    """Scripts import TensorFlow, Keras and Horovod in any order, and keep the modules."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    script = tmp_path / "train.py"
    script.write_text(OLDER)
    ended = subprocess.run(
        [sys.executable, "-m", "allranks.horovod", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.stdout.endswith("[(0, 0.5)]\n"), ended.stderr
