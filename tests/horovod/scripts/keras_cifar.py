# Keras on TensorFlow 1.x's last days: CIFAR-10 with the eight changes that make it distributed.
import argparse
import os
import tempfile

# Change 1: Horovod and the backend of Keras
import horovod.tensorflow.keras as hvd
import tensorflow as tf
import tensorflow.keras.backend as K
from tensorflow.keras.datasets import cifar10
from tensorflow.keras.layers import Activation, BatchNormalization, Conv2D, Dense, Flatten
from tensorflow.keras.models import Sequential
from tensorflow.keras.optimizers import SGD
from tensorflow.keras.utils import to_categorical

# Change 8: hyperparameters from the command line
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--learning-rate", type=float, default=0.01)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--weight-decay", type=float, default=2e-4)
parser.add_argument("--momentum", type=float, default=0.9)
args = parser.parse_args()

# Change 2: who is there
hvd.init()
size = hvd.size()

# Change 3: one GPU for each process
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

(x_train, y_train), (x_test, y_test) = cifar10.load_data()
x_train, x_test = x_train.astype("float32") / 255, x_test.astype("float32") / 255
y_train, y_test = to_categorical(y_train, 10), to_categorical(y_test, 10)
train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).repeat().shuffle(1500)

model = Sequential()
model.add(Conv2D(8, (3, 3), strides=2, padding="same", input_shape=(32, 32, 3)))
model.add(BatchNormalization())
model.add(Activation("relu"))
model.add(Flatten())
model.add(Dense(10))
model.add(Activation("softmax"))

# Change 4: the learning rate grows with the number of processes
opt = SGD(lr=args.learning_rate * size, decay=args.weight_decay, momentum=args.momentum)

# Change 5: the optimizer averages gradients
opt = hvd.DistributedOptimizer(opt)

model.compile(
    loss="categorical_crossentropy",
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

# Change 6: the same state to begin with, and checkpoints on the first process only
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=args.learning_rate * size, warmup_epochs=2, verbose=1
    ),
]
folder = tempfile.mkdtemp()
if hvd.rank() == 0:
    callbacks.append(
        tf.keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint-{epoch}.h5"))
    )

# Change 7: each process takes its part of the steps of an epoch
model.fit(
    train.batch(args.batch_size),
    steps_per_epoch=(len(x_train) // args.batch_size) // size,
    epochs=args.epochs,
    callbacks=callbacks,
    verbose=0,
)
score = model.evaluate(x_test, y_test, verbose=0)
print(f"rank {hvd.rank()}: accuracy {score[1]:.2f}, learning rate {float(K.get_value(opt.lr)):.3f}")
print("checkpoints:", len(os.listdir(folder)))
