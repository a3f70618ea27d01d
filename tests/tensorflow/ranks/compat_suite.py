"""Lines that many older scripts contain."""

from __future__ import annotations

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


def test_models_take_what_they_took():
    model = linear(SGD(0.1), experimental_run_tf_function=False)
    batches = ((X, Y) for _ in range(4))
    history = model.fit_generator(batches, steps_per_epoch=2, epochs=2, workers=4, verbose=0)
    assert len(history.history["loss"]) == 2
    pairs = zip([tf.ones((3, 1)), tf.ones(1)], model.trainable_variables, strict=True)
    model.optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


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
