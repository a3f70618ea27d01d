# Four models of one architecture, each trained on its own share of MNIST, and compared.
from math import ceil

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
rank = hvd.rank()
size = hvd.size()

mnist = tf.keras.datasets.mnist
(x_train, y_train), (x_test, y_test) = mnist.load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0

model = tf.keras.models.Sequential(
    [
        tf.keras.layers.Flatten(input_shape=(28, 28)),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dropout(0.2),
        tf.keras.layers.Dense(10),
    ]
)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss_fn, metrics=["accuracy"])

dataset_size = len(x_train)
spm = ceil(dataset_size / size)  # samples per model
model.fit(
    x_train[rank * spm : (rank + 1) * spm],
    y_train[rank * spm : (rank + 1) * spm],
    epochs=15,
    verbose=0,
)
print(model.evaluate(x_test, y_test, verbose=2))
