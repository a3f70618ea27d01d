"""A training step on n ranks: without communication, with allranks, and with similar tools.

    python -m benchmarks.training [--sizes 2 4] [--quick]

The models are two Keras models of dense layers, with a hundred thousand and with ten million
parameters; each rank has its own batch. These run in the same processes in turns: the compiled step
with a plain Adam (no communication); with the simplest average of the gradients, in shared memory
and without checks (a lower limit for communication from a graph); and with
``DistributedOptimizer``, with all checks. Then, in other processes but within the same minutes,
tf.distribute.MultiWorkerMirroredStrategy runs in a custom loop, because Keras 3 refuses it in
``fit``; and Horovod, if it is installed. A time is the slowest rank's, a figure the median over
steps. The processes of each tool also measure the step without communication, so ratios compare
times of one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import ranks, results

BATCH = 64
MODELS = {"100 K": (784, 128, 10), "10 M": (784, 2560, 2560, 512, 10)}
TURNS = {"100 K": (40, 30), "10 M": (10, 2)}
"""Number of turns, and steps per turn."""
RANK = "ALLRANKS_BENCHMARK_PEER"


def model(widths: tuple[int, ...]) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, "relu") for width in widths[1:-1]]
    return keras.Sequential([keras.Input(widths[:1]), *layers, keras.layers.Dense(widths[-1])])


def stepper(made: Any, optimizer: Any) -> ranks.Call:
    import keras
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.random.normal((BATCH, made.input_shape[1]))
    y = tf.random.uniform((BATCH,), 0, 10, tf.int32)
    optimizer.build(made.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, made(x, training=True))
        variables = made.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return lambda: step().numpy()


def milliseconds(taken: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: [1e3 * seconds for seconds in times] for name, times in taken.items()}


def bare(count: int) -> Any:
    """Returns an Adam with the simplest possible average of gradients from a graph. Collective.

    One Python function in the graph, one pass through shared memory, and one wait without checks
    or interrupts.
    """
    import keras
    import numpy as np
    import tensorflow as tf
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size, page = world.rank, world.size, 4096
    room = -(-4 * count // page) * page
    path = world.bcast(f"/dev/shm/allranks-benchmark-{os.getpid()}-{count}")
    if rank == 0:
        with open(path, "wb") as file:
            file.truncate((1 + 2 * room // page * size) * page)
    world.Barrier()
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    world.Barrier()
    if rank == 0:
        os.unlink(path)
    arrived = np.frombuffer(memory, np.int64, 8 * size)[::8]
    blocks = [
        [np.frombuffer(memory, "f4", count, page + (2 * r + turn) * room) for r in range(size)]
        for turn in (0, 1)
    ]
    step = 0

    def average(*gradients: Any) -> list[Any]:
        nonlocal step
        step += 1
        parts, start = blocks[step & 1], 0
        for gradient in gradients:
            parts[rank][start : start + gradient.size] = gradient.reshape(-1)
            start += gradient.size
        arrived[rank] = step
        while arrived.min() < step:
            os.sched_yield()
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        total /= size
        made, start = [], 0
        for gradient in gradients:
            made.append(total[start : start + gradient.size].reshape(gradient.shape))
            start += gradient.size
        return made

    class Bare(keras.optimizers.Adam):  # type: ignore[misc]
        def apply(self, gradients: Any, variables: Any = None) -> Any:
            averaged = tf.numpy_function(average, gradients, [g.dtype for g in gradients])
            for made, gradient in zip(averaged, gradients, strict=True):
                made.set_shape(gradient.shape)
            return super().apply(averaged, variables)

    return Bare()


def on_rank(peer: str, quick: bool) -> None:
    import keras

    if peer == "horovod":
        import horovod.tensorflow as hvd
    else:
        import allranks.tensorflow as hvd
    hvd.init()
    from mpi4py import MPI

    found = {}
    for name, widths in MODELS.items():
        turns, each = TURNS[name]
        plain = model(widths)
        steps = {
            "none": stepper(plain, keras.optimizers.Adam()),
            peer: stepper(model(widths), hvd.DistributedOptimizer(keras.optimizers.Adam())),
        }
        if peer == "allranks" and hvd.size() > 1:
            steps["bare"] = stepper(model(widths), bare(plain.count_params()))
        taken = ranks.slowest(MPI.COMM_WORLD, steps, turns // (4 if quick else 1), each)
        found[name] = {"parameters": int(plain.count_params()), "ms": milliseconds(taken)}
    ranks.write(hvd.rank(), found)


def on_worker(rank: int, quick: bool) -> None:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    total = tf.distribute.get_replica_context
    found = {}
    for name, widths in MODELS.items():
        turns, each = TURNS[name]
        plain = stepper(model(widths), keras.optimizers.Adam())
        with strategy.scope():
            shared = model(widths)
            optimizer = keras.optimizers.Adam()
            optimizer.build(shared.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        x = tf.random.normal((BATCH, widths[0]))
        y = tf.random.uniform((BATCH,), 0, 10, tf.int32)
        size = strategy.num_replicas_in_sync

        def replica(
            shared: Any = shared,
            optimizer: Any = optimizer,
            x: Any = x,
            y: Any = y,
            loss_of: Any = loss_of,
            size: int = size,
        ) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, shared(x, training=True)) / (BATCH * size)
            variables = shared.trainable_variables
            gradients = tape.gradient(loss, variables)
            gradients = total().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            optimizer.apply(gradients, variables)
            return loss

        @tf.function  # type: ignore[untyped-decorator]
        def step(replica: Any = replica) -> Any:
            return strategy.run(replica)

        @tf.function  # type: ignore[untyped-decorator]
        def meet() -> Any:
            return strategy.run(lambda: total().all_reduce("SUM", tf.ones([])))

        def wait(meet: Any = meet) -> object:
            return meet().numpy()

        steps: dict[str, ranks.Call] = {"none": plain, "mirrored": lambda step=step: step().numpy()}
        taken = ranks.in_turns(steps, turns // (4 if quick else 1), each, wait)
        found[name] = {"parameters": int(shared.count_params()), "ms": milliseconds(taken)}
    ranks.write(rank, found)
    os._exit(0)  # the threads of its cluster wait for each other at exit


def settings(size: int, peer: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": str(max(1, cores // size)),
        "TF_NUM_INTEROP_THREADS": "1" if peer == "allranks" else "2",
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        "CUDA_VISIBLE_DEVICES": "",
        RANK: peer,
    }


def under_mpiexec(size: int, peer: str, quick: bool) -> Any:
    return ranks.run(
        size, "-m", "benchmarks.training", *["--quick"] * quick, **settings(size, peer)
    )


def mirrored(size: int, quick: bool) -> Any:
    from tests.mpi.launch import environment

    workers = [f"127.0.0.1:{29_700 + size * 10 + rank}" for rank in range(size)]
    running = []
    for rank in range(size):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        env = environment(**settings(size, f"mirrored {rank}"), TF_CONFIG=json.dumps(task))
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.training", *["--quick"] * quick],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600) for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(outputs[0][1][-2000:])
    return ranks.read(outputs[0][0])


def measure(size: int, quick: bool) -> dict[str, Any]:
    peers = {
        "allranks": under_mpiexec(size, "allranks", quick),
        "mirrored": mirrored(size, quick),
    }
    if importlib.util.find_spec("horovod") is not None:
        peers["horovod"] = under_mpiexec(size, "horovod", quick)
    return {"ranks": size, "peers": peers}


def table(result: dict[str, Any]) -> str:
    rows = []
    for run in result["runs"]:
        for name in MODELS:
            ours = run["peers"]["allranks"][name]["ms"]
            none = statistics.median(ours["none"])
            mine = statistics.median(ours["allranks"])
            one = statistics.median(result["alone"][name]["ms"]["none"])
            least = statistics.median(ours["bare"])
            row = [f"{name}, n={run['ranks']}", f"{none:.2f}", f"{least:.2f} ({least / none:.2f}×)"]
            row.append(f"{mine:.2f} ({mine / none:.2f}×)")
            for peer in ("mirrored", "horovod"):
                times = run["peers"].get(peer, {}).get(name, {}).get("ms")
                if times is None:
                    row.append("not installed")
                    continue
                theirs = statistics.median(times[peer])
                row.append(f"{theirs:.2f} ({theirs / mine:.1f}×)")
            rows.append([*row, f"{one / mine:.0%}"])
    head = [
        "parameters, ranks",
        "no communication ms",
        "bare average ms",
        "allranks ms",
        "MultiWorkerMirrored ms",
        "Horovod ms",
        "scaling efficiency",
    ]
    return results.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    peer = os.environ.get(RANK, "")
    if peer.startswith("mirrored"):
        on_worker(int(peer.split()[1]), options.quick)
    elif peer:
        on_rank(peer, options.quick)
    else:
        described = results.machine()
        runs = [measure(size, options.quick) for size in options.sizes]
        # One process with all cores, the reference for scaling.
        alone = under_mpiexec(1, "allranks", options.quick)
        result = results.write("training", described, {"alone": alone, "runs": runs})
        print(table(result))


if __name__ == "__main__":
    main()
