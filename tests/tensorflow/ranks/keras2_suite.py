"""Both kinds of optimizers of Keras 2, with TF_USE_LEGACY_KERAS=1."""

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tf_keras", reason="no Keras 2: pip install 'allranks[legacy-keras]'")
import allranks.tensorflow.keras as hvd
from allranks.errors import CollectiveMismatch, RankLeft
from allranks.keras.versions import keras
from tests.tensorflow.ranks.conftest import in_a_cell, next_cell_works, odd
from tests.tensorflow.ranks.keras_suite import RANK, SIZE, data, mlp, same_everywhere, share

OPTIMIZERS = {"legacy": keras.optimizers.legacy, "current": keras.optimizers}
KINDS = list(OPTIMIZERS)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_joined_batch(kind):
    x, y = data()
    make = OPTIMIZERS[kind].Adam
    mine = mlp(hvd.DistributedOptimizer(make(0.1, clipnorm=1.0)), seed=2)
    alone = mlp(make(0.1, clipnorm=1.0), seed=2)
    mine.fit(share(x), share(y), batch_size=8, epochs=3, shuffle=False, verbose=0)
    alone.fit(x, y, batch_size=8 * SIZE, epochs=3, shuffle=False, verbose=0)
    assert same_everywhere(mine.weights)
    for one, other in zip(mine.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("averaged", [True, False])
def test_gradients_of_several_steps_are_applied_once(kind, averaged):
    x, y = data(16)
    passed = {"backward_passes_per_step": 2, "average_aggregated_gradients": averaged}
    made = hvd.DistributedOptimizer(OPTIMIZERS[kind].SGD(0.1), **passed)
    mine = mlp(made, seed=2)
    factor = 1 if averaged else 2
    alone = mlp(keras.optimizers.SGD(0.1 * factor), seed=2)
    mine.fit(share(x, 16), share(y, 16), batch_size=8, epochs=2, shuffle=False, verbose=0)
    alone.fit(x, y, batch_size=16 * SIZE, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(mine.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def two_variables():
    return [tf.Variable([0.0, 0.0], name=name) for name in ("first", "second")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_different_variables_are_a_mismatch(kind, passes):
    made = hvd.DistributedOptimizer(OPTIMIZERS[kind].SGD(1.0), backward_passes_per_step=passes)
    variables = two_variables()
    ones = tf.ones(2)
    pairs = [(ones if at == odd() else None, v) for at, v in enumerate(variables)]
    error = in_a_cell(lambda: [made.apply_gradients(pairs) for _ in range(passes)])
    assert isinstance(error, CollectiveMismatch), error
    assert "gradient 0" in str(error)
    next_cell_works()
    assert [one.numpy().tolist() for one in variables] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_steps_are_added_to_their_own_variable(kind):
    made = hvd.DistributedOptimizer(OPTIMIZERS[kind].SGD(1.0), backward_passes_per_step=2)
    variables = first, second = two_variables()
    made.apply_gradients([(tf.constant([2.0, 2.0]), first), (None, second)])
    made.apply_gradients([(None, first), (tf.constant([4.0, 4.0]), second)])
    assert [one.numpy().tolist() for one in variables] == [[-2.0, -2.0], [-4.0, -4.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_that_fails_is_not_counted(kind, passes):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1 and RANK == SIZE - 1:
                raise ValueError("no more data")

    made = hvd.DistributedOptimizer(OPTIMIZERS[kind].Adam(0.1), backward_passes_per_step=passes)
    mine = mlp(made, seed=2)
    x, y = map(share, data())
    error = in_a_cell(lambda: mine.fit(x, y, batch_size=2, verbose=0, callbacks=[Raises()]))
    assert isinstance(error, ValueError if RANK == SIZE - 1 else RankLeft), error
    next_cell_works()
    assert int(mine.optimizer.iterations) == 1


def test_a_loss_that_is_scaled_overflows_on_all_ranks_or_on_none():
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    made = hvd.DistributedOptimizer(scaled)
    model = mlp(made, seed=2)
    x, y = data()
    before = model.get_weights()
    y[0] = np.inf  # on the first rank
    model.fit(share(x), share(y), batch_size=8, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_some_layers_stay_on_their_rank(kind):
    model = mlp(seed=2)
    first = model.layers[0]
    made = OPTIMIZERS[kind].SGD(0.1)
    model.compile(hvd.PartialDistributedOptimizer(made, local_layers=[first]), "mse")
    model.fit(*map(share, data()), batch_size=8, verbose=0)
    assert same_everywhere(model.layers[-1].weights)
    assert not same_everywhere(first.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_its_optimizer_is_committed_and_restored(kind):
    model = mlp(OPTIMIZERS[kind].Adam(0.1), seed=RANK)
    state = hvd.elastic.KerasState(model, epoch=0)
    state.sync()
    kept = [np.copy(v) for v in (*model.get_weights(), *map(np.asarray, state.variables))]
    assert same_everywhere(kept)
    model.fit(*map(share, data()), batch_size=8, verbose=0)
    state.restore()
    again = [*model.get_weights(), *map(np.asarray, state.variables)]
    for now, then in zip(again, kept, strict=True):
        np.testing.assert_array_equal(now, then)
