# TensorFlow 1: digits in a MonitoredTrainingSession that keeps checkpoints on the first rank.
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

mnist = tf.keras.datasets.mnist
(x_train, y_train), _ = mnist.load_data()
x_train = x_train.reshape(len(x_train), 784).astype(np.float32) / 255.0
mine = slice(hvd.rank(), None, hvd.size())
x_train, y_train = x_train[mine], y_train[mine].astype(np.int64)

tf.reset_default_graph()
tf.set_random_seed(hvd.rank())  # the broadcast makes them equal
images = tf.placeholder(tf.float32, [None, 784])
labels = tf.placeholder(tf.int64, [None])
weights = tf.get_variable("weights", [784, 10])
biases = tf.get_variable("biases", [10], initializer=tf.zeros_initializer())
logits = tf.matmul(images, weights) + biases
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
correct = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))

opt = tf.train.AdagradOptimizer(0.01 * hvd.size())
opt = hvd.DistributedOptimizer(opt, device_dense="/cpu:0", device_sparse="/cpu:0")
global_step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=200),
]
checkpoint_dir = None
if hvd.rank() == 0:
    checkpoint_dir = os.path.join(tempfile.mkdtemp(), "train_logs")

rng = np.random.default_rng(hvd.rank())
with tf.train.MonitoredTrainingSession(
    checkpoint_dir=checkpoint_dir, config=config, hooks=hooks
) as mon_sess:
    while not mon_sess.should_stop():
        chosen = rng.choice(len(x_train), 64)
        _, step, accuracy, final = mon_sess.run(
            [train_op, global_step, correct, weights],
            feed_dict={images: x_train[chosen], labels: y_train[chosen]},
        )

print(
    f"rank {hvd.rank()}: step {step}, accuracy {accuracy:.2f}, weights {float(np.abs(final).sum()):.4f}"
)
if checkpoint_dir is not None:
    print("checkpoint:", os.path.basename(tf.train.latest_checkpoint(checkpoint_dir)))
