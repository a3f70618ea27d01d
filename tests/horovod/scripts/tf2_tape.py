# TensorFlow 2: a training loop of one's own, and checkpoints by the first rank only.
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

(images, labels), _ = tf.keras.datasets.mnist.load_data()
dataset = (
    tf.data.Dataset.from_tensor_slices(
        (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
    )
    .repeat()
    .shuffle(2000, seed=hvd.rank())
    .batch(64)
)

tf.random.set_seed(hvd.rank())  # the broadcast makes the models equal
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], strides=2, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.002 * hvd.size())

checkpoint_dir = os.path.join(tempfile.mkdtemp(), "checkpoints")
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(200 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)

total = sum(float(np.abs(v.numpy()).sum()) for v in model.trainable_variables)
print(f"rank {hvd.rank()}: loss {float(loss_value):.2f}, weights {total:.4f}")
if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir)
    print(
        "checkpoint:", os.path.basename(tf.train.latest_checkpoint(os.path.dirname(checkpoint_dir)))
    )
