# Which ranks are there, and which GPU does each of them take?
import logging

import horovod.tensorflow as hvd
import tensorflow as tf

logging.root.setLevel(logging.INFO)
tf.get_logger().setLevel("ERROR")

hvd.init()
rank = hvd.rank()
local_rank = hvd.local_rank()
size = hvd.size()
local_size = hvd.local_size()
logging.info(f"This is process with rank {rank} and local rank {local_rank}")

gpus = tf.config.experimental.list_physical_devices("GPU")
if local_rank == 0:
    logging.info(
        f"This is process with rank {rank} and local rank {local_rank}: gpus available are: {gpus}"
    )
if local_rank >= len(gpus):
    raise Exception("Not enough gpus.")
tf.config.experimental.set_visible_devices(gpus[local_rank], "GPU")
