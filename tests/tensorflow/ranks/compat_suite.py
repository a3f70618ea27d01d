"""Lines that many older scripts contain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")
import keras  # noqa: E402

import allranks.horovod  # noqa: E402, F401  from here on `horovod` is found

SGD = keras.optimizers.SGD
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


@pytest.fixture(autouse=True)
def _by_its_own_name():
    import horovod.tensorflow.keras  # noqa: F401


def linear(optimizer, **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def test_a_learning_rate_is_given_read_and_set_as_lr():
    optimizer = SGD(lr=0.5)
    assert float(optimizer.lr) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == 0.25
    scaled = keras.optimizers.LossScaleOptimizer(SGD(lr=0.125))
    assert float(scaled.lr) == 0.125


def test_optimizers_and_layers_take_the_names_and_options_of_keras_2():
    assert float(tf.keras.optimizers.legacy.Adam(0.5).learning_rate) == 0.5
    assert isinstance(keras.optimizers.legacy.SGD(lr=0.5, decay=0.1), SGD)
    assert tf.keras.losses.mean_squared_error is keras.losses.mean_squared_error
    keras.layers.BatchNormalization(axis=1, fused=False)(np.ones((2, 3), "float32"))


def test_decay_makes_the_rate_fall_with_the_steps():
    optimizer = SGD(lr=0.5, decay=1.0)
    model = linear(optimizer)
    model.set_weights([np.zeros((3, 1)), np.zeros(1)])
    model.fit(X, 8 * Y, batch_size=8, epochs=2, verbose=0)
    # Slope of (3w + b - 8)^2: the first step has the rate 0.5, the second 0.25.
    bias = 0.5 * 16
    bias -= 0.25 * 2 * (4 * bias - 8)
    assert float(model.weights[1].numpy()[0]) == pytest.approx(bias)
    assert float(optimizer.lr) == 0.5


def test_decay_is_in_the_config():
    again = SGD.from_config(SGD(lr=0.5, decay=1.0).get_config())
    again.iterations.assign(1)
    assert float(again._get_current_learning_rate()) == 0.25
    assert "decay" not in SGD(lr=0.5).get_config()


def test_models_take_what_they_took():
    model = linear(SGD(0.1), experimental_run_tf_function=False)
    batches = ((X, Y) for _ in range(4))
    history = model.fit_generator(batches, steps_per_epoch=2, epochs=2, workers=4, verbose=0)
    assert len(history.history["loss"]) == 2
    pairs = zip([tf.ones((3, 1)), tf.ones(1)], model.trainable_variables, strict=True)
    model.optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


def test_metrics_and_optimizers_have_their_methods_of_keras_2():
    mean = keras.metrics.Mean()
    mean.update_state(4.0)
    mean.reset_states()
    assert float(mean.result()) == 0
    model = linear(SGD(0.5, momentum=0.9))
    model.fit(X, Y, verbose=0)
    saved = model.optimizer.get_weights()
    assert int(saved[0]) == 1
    again = linear(SGD(0.5, momentum=0.9))
    again.optimizer.build(again.trainable_variables)
    again.optimizer.set_weights(saved)
    for one, other in zip(again.optimizer.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("name", ["w.ckpt", "w", "w.h5", "w.weights.h5"])
def test_weights_are_saved_and_loaded_in_the_formats_of_keras_2(tmp_path, name):
    model, again = linear(SGD(0.5)), linear(SGD(0.5))
    model.save_weights(str(tmp_path / name))
    if "h5" not in name:
        assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / name)
    again.load_weights(str(tmp_path / name))
    for one, other in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(2), keras.layers.Dense(1)]

    def call(self, inputs):
        return self.parts[1](self.parts[0](inputs))


def test_weights_of_an_own_model_need_a_model_with_the_same_weights(tmp_path):
    model, again = Own(), Own()
    with pytest.raises(ValueError, match="is not built"):
        model.save_weights(tmp_path / "w.ckpt")
    model(X)
    model.save_weights(tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match=r"the same weights, found another one .* call it once"):
        again.load_weights(tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match="the same weights, found another one"):
        linear(SGD(0.5)).load_weights(tmp_path / "w.ckpt")
    again(X)
    again.load_weights(tmp_path / "w.ckpt")
    for one, saved in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, saved)


def test_a_checkpoint_that_does_not_fit_changes_no_weight(tmp_path):
    dense = keras.layers.Dense
    models = [keras.Sequential([keras.Input((3,)), *map(dense, s)]) for s in ([3], [3, 3], [3, 2])]
    for saved, other in itertools.permutations(models, 2):
        saved.save_weights(tmp_path / "w.ckpt")
        before = other.get_weights()
        with pytest.raises(ValueError, match="the same weights, found another one"):
            other.load_weights(tmp_path / "w.ckpt")
        for one, kept in zip(other.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, kept)


def test_checkpoints_of_weights_are_written_once_in_a_period(tmp_path):
    path = str(tmp_path / "w{epoch}.ckpt")
    saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, period=2)
    model = linear(SGD(0.5))
    model.fit(X, Y, epochs=5, verbose=0, callbacks=[saves])
    assert sorted(one.name for one in tmp_path.glob("*.index")) == [
        "w2.ckpt.index",
        "w4.ckpt.index",
    ]
    linear(SGD(0.5)).load_weights(tmp_path / "w4.ckpt")


def test_a_model_in_a_folder_names_the_line_to_type(tmp_path):
    wanted = [
        (lambda: linear(SGD(0.5)).save("served"), r"Type model.save\('served.keras'\)"),
        (
            lambda: keras.callbacks.ModelCheckpoint("x.ckpt"),
            r"Type ModelCheckpoint\('x.ckpt.keras'\), or add save_weights_only=True",
        ),
    ]
    for line, said in wanted:
        with pytest.raises(ValueError, match=f"{said}. .* TF_USE_LEGACY_KERAS=1"):
            line()


@pytest.mark.filterwarnings("ignore:Please import:DeprecationWarning")  # of Keras, about scipy
def test_images_are_made_by_the_generator_of_keras_2(tmp_path):
    from keras.preprocessing.image import ImageDataGenerator

    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for number in range(3):
            image = np.full((8, 8, 3), 40 * number + 10, "uint8")
            keras.utils.save_img(tmp_path / name / f"{number}.png", image, scale=False)
    changed = ImageDataGenerator(rescale=1 / 255, width_shift_range=0.3, horizontal_flip=True)
    batches = changed.flow_from_directory(tmp_path, target_size=(8, 8), batch_size=4)
    assert (batches.n, batches.class_indices) == (6, {"cats": 0, "dogs": 1})
    images, labels = next(batches)
    assert (images.shape, labels.shape) == ((4, 8, 8, 3), (4, 2))
    assert images.max() <= 1
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    model.compile(SGD(0.01), "mse")
    seen = []
    counted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(b))
    arrays = changed.flow(np.ones((6, 8, 8, 3)), np.ones((6, 2)), batch_size=4)
    for source in (batches, arrays):
        # Five steps of two batches: the batches start again, as in Keras 2.
        model.fit_generator(
            source, steps_per_epoch=5, epochs=1, verbose=0, callbacks=[counted],
            validation_data=source, validation_steps=3,
        )  # fmt: skip
    assert len(seen) == 10
    assert model.evaluate_generator(arrays, steps=4) > 0
