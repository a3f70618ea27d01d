# Two PINNs for -u'' = f on [-1, 1]: u = sin(pi x) on the first rank, sin(2 pi x) on the second.
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

k = np.pi if hvd.rank() == 0 else 2 * np.pi
x = tf.constant(np.linspace(-1, 1, 101)[:, None], tf.float32)
f = k**2 * tf.sin(k * x)
ends = tf.constant([[-1.0], [1.0]])

tf.random.set_seed(1234)
init = tf.keras.initializers.GlorotNormal
model = tf.keras.Sequential(
    [
        tf.keras.Input((1,)),
        tf.keras.layers.Dense(16, "tanh", kernel_initializer=init(1)),
        tf.keras.layers.Dense(16, "tanh", kernel_initializer=init(2)),
        tf.keras.layers.Dense(1, kernel_initializer=init(3)),
    ]
)
opt = tf.optimizers.Adam(1e-3)
# opt = hvd.DistributedOptimizer(opt)


@tf.function
def train(steps):
    loss = tf.constant(0.0)
    for _ in tf.range(steps):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    u = model(x)
                u_x = first.gradient(u, x)
            u_xx = second.gradient(u_x, x)
            loss = tf.reduce_mean(tf.square(u_xx + f)) + tf.reduce_mean(tf.square(model(ends)))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


steps = 0
while steps < 30000:
    loss = train(tf.constant(1000))
    steps += 1000
    if float(loss) < 2e-3:
        break

x_pred = np.linspace(-1, 1, 201)[:, None]
u = np.sin(k * x_pred)
error = np.linalg.norm(model(x_pred).numpy() - u) / np.linalg.norm(u)
print(f"rank {hvd.rank()}: relative L2 error {error:.2e} after {steps} steps")
