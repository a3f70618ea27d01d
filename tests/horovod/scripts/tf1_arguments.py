# TensorFlow 1: a line through points, with its steps and its folder on the command line.
import argparse

import tensorflow as tf
import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--train-dir")
args = parser.parse_args()

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

tf.reset_default_graph()
x = tf.placeholder_with_default([[1.0, 2.0]], [None, 2], name="x")
w = tf.get_variable("w", [2, 1])
logits = tf.matmul(x, w, name="logits")
loss = tf.reduce_mean(tf.square(logits - hvd.rank()))

opt = tf.train.AdagradOptimizer(args.learning_rate * hvd.size())
opt = hvd.DistributedOptimizer(opt)
step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=step)

hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=args.steps)]
checkpoint_dir = args.train_dir if hvd.rank() == 0 else None
with tf.train.MonitoredTrainingSession(
    checkpoint_dir=checkpoint_dir, config=config, hooks=hooks
) as session:
    while not session.should_stop():
        _, done, weights = session.run([train_op, step, w])
print(f"rank {hvd.rank()} of {hvd.size()}: step {done}, weights {weights.ravel().tolist()}")
