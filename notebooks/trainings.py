import time

import numpy as np


def read(name, step):
    if name == "C":
        time.sleep(0.025)
    return np.random.default_rng([step, rank]).normal(size=(20, 1000))


def augment(name, batch):
    if name == "A" and rank == size - 1:
        time.sleep(0.03)
    return batch + 0.01


def save(name, step):
    if name == "B" and rank == 0 and step % 20 == 19:
        time.sleep(0.5)


def normalised(name, batch, step):
    if name == "D" and rank == 1 and step == 60:
        batch[:] = 3.0
    with np.errstate(invalid="ignore"):
        return (batch - batch.mean()) / batch.std()


def train(name):
    weights = np.zeros(1000)
    for step in range(120):
        batch = normalised(name, augment(name, read(name, step)), step)
        errors = batch @ weights - batch[:, 0]
        time.sleep(0.012)  # the work of a larger model
        weights -= 0.0003 * allreduce(batch.T @ errors, name="gradients")
        save(name, step)
        log(step=step, loss=np.mean(errors**2))
