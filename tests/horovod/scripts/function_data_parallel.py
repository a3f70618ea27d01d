# TensorFlow 1: y = sin(2 pi x) + sin(4 pi x), one half of [-1, 1] a rank, one model for both.
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())


def target(x):
    return np.sin(2 * np.pi * x) + np.sin(4 * np.pi * x)


N = 16
if hvd.rank() == 0:
    x_train = np.linspace(-1, 0, N)[:, None]
else:
    x_train = np.linspace(0, 1, N)[:, None]
y_train = target(x_train)

tf.reset_default_graph()
tf.set_random_seed(1234)
x = tf.placeholder(tf.float32, [None, 1])
y = tf.placeholder(tf.float32, [None, 1])
h, width = x, 1
for layer, units in enumerate((16, 16, 1)):
    W = tf.get_variable(
        f"W{layer}", [width, units], initializer=tf.glorot_normal_initializer(layer)
    )
    b = tf.get_variable(f"b{layer}", [units], initializer=tf.zeros_initializer())
    h = tf.matmul(h, W) + b
    h, width = (tf.tanh(h) if units > 1 else h), units
loss = tf.reduce_mean(tf.square(h - y))

learning_rate = 1e-3
opt = tf.train.AdamOptimizer(learning_rate * hvd.size())
opt = hvd.DistributedOptimizer(opt)
train = opt.minimize(loss)
whole_loss = hvd.allreduce(loss)

x_pred = np.linspace(-1, 1, 201)[:, None]
step_max = 30001
with tf.Session(config=config) as sess:
    init = tf.global_variables_initializer()
    sess.run(init)
    bcast = hvd.broadcast_global_variables(0)
    sess.run(bcast)
    train_step = 0
    while train_step < step_max:
        sess.run([train, loss], feed_dict={x: x_train, y: y_train})
        train_step += 1
        if train_step % 1000 == 0:
            if sess.run(whole_loss, feed_dict={x: x_train, y: y_train}) < 5e-5:
                break
    y_pred = sess.run(h, feed_dict={x: x_pred})
error = np.linalg.norm(y_pred - target(x_pred)) / np.linalg.norm(target(x_pred))
print(f"rank {hvd.rank()}: relative L2 error {error:.2e} after {train_step} steps")
