"""Random programs of collectives and messages that cannot deadlock, the same for each seed."""

from __future__ import annotations

import random

_HEAD = """
import hashlib
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
draw = np.random.default_rng({seed} + 1000 * rank)
found = []
def keep(*values):
    for value in values:
        if isinstance(value, np.ndarray):
            data = str(value.dtype).encode() + str(value.shape).encode() + value.tobytes()
            found.append(hashlib.md5(data).hexdigest()[:12])
        else:
            found.append(repr(value))
def some(size, dtype="float64"):
    return ((draw.random(size) - 0.5) * 10.0 ** draw.integers(-3, 6, size)).astype(dtype)
right, left = (rank + 1) % size, (rank - 1) % size
"""


def program(seed: int, steps: int = 12) -> str:
    """Returns the source of a program, whose last expression is what each rank has found."""
    draw = random.Random(seed)
    lines = [_HEAD.format(seed=seed)]
    for _ in range(steps):
        lines.append(draw.choice(_STEPS)(draw))
    return "\n".join([*lines, "found"])


def _size(draw: random.Random) -> int:
    return draw.choice([1, 3, 7, 64, 1000, 9000, 40000])


def _dtype(draw: random.Random) -> str:
    return draw.choice(["float64", "float64", "float32", "int64", "int32", "float16"])


def _reduction(draw: random.Random) -> str:
    op = draw.choice(["Sum", "Average", "Min", "Max", "Product"])
    x = f'some({_size(draw)}, "{_dtype(draw)}")'
    return draw.choice(
        [
            f"keep(allreduce({x}, op={op}))",
            f"keep(allreduce({x}, op={op}))",
            f"keep(reduce({x}, op={op}, root=size - 1))",
            f"keep(reducescatter({x}.reshape(-1, 1), op={op}))",
            f"keep(*grouped_allreduce([{x}, some(5), {x}], op={op}))",
            f"handle = allreduce_async({x}, op={op}); y = some(3); keep(y, synchronize(handle))",
            f"keep(allreduce({x}, op=Sum, prescale_factor=0.3, postscale_factor=1.7))",
            f"keep(allreduce({x}, op=Sum, compression=Compression.fp16))",
        ]
    )


def _moved(draw: random.Random) -> str:
    dtype = _dtype(draw)
    return draw.choice(
        [
            f'keep(broadcast(some({_size(draw)}, "{dtype}"), root=size // 2))',
            f'keep(allgather(some((rank + {draw.randint(1, 3)}, 2), "{dtype}")))',
            f'keep(gather(some((rank + 1, 3), "{dtype}"), root=0))',
            f'keep(scatter(some((2 * size, 3), "{dtype}") if rank == 0 else None, root=0))',
            f'keep(alltoall(some((3 * size, 2), "{dtype}")))',
            "keep(alltoall(some((size * (size + 1) // 2,)), splits=range(1, size + 1))[0])",
            "keep(broadcast_object({'a': rank, 'b': [1.5, rank]}, root=size - 1))",
            "keep(allgather_object((rank, 'x' * rank)))",
            "barrier()",
        ]
    )


def _objects(draw: random.Random) -> str:
    return draw.choice(
        [
            "keep(comm.bcast({'r': rank, 'v': some(3)} if rank == 0 else None)['v'])",
            "keep(comm.gather((rank, float(some(1)[0])), root=size - 1))",
            "keep(comm.allgather(float(some(1)[0])))",
            "keep(comm.scatter([float(v) for v in some(size)] if rank == 0 else None, root=0))",
            "keep(comm.alltoall([float(v) for v in some(size)]))",
            "keep(comm.allreduce(float(some(1)[0])))",
            "keep(comm.allreduce(some(4)))",
            "keep(comm.allreduce(float(some(1)[0]), op=MPI.MAX))",
            "keep(comm.reduce(float(some(1)[0]), root=0))",
            "keep(comm.scan(float(some(1)[0])))",
            "keep(comm.exscan(float(some(1)[0])))",
            "comm.barrier()",
        ]
    )


def _buffers(draw: random.Random) -> str:
    n, op = _size(draw), draw.choice(["SUM", "SUM", "MAX", "MIN", "PROD"])
    dtype = draw.choice(["float64", "float32", "int64"])
    start = f'x = some({n}, "{dtype}"); y = np.zeros_like(x); '
    many = f'x = some(4, "{dtype}"); y = np.zeros((size, 4), "{dtype}"); '
    cut = f'x = some((size, 4), "{dtype}"); y = np.zeros((size, 4), "{dtype}"); '
    return draw.choice(
        [
            f"{start}comm.Allreduce(x, y, op=MPI.{op}); keep(y)",
            f"{start}comm.Allreduce(x, y, op=MPI.{op}); keep(y)",
            f"{start}comm.Reduce(x, y, op=MPI.{op}, root=0); keep(y)",
            f"{start}comm.Reduce(x, y, op=MPI.{op}, root=size - 1); keep(y)",
            f"{start}comm.Scan(x, y, op=MPI.{op}); keep(y)",
            f"{start}comm.Exscan(x, y, op=MPI.{op}); keep(y if rank else 0)",
            f"{start}comm.Bcast(x, root=0); keep(x)",
            f"{start}comm.Iallreduce(x, y, op=MPI.{op}).Wait(); keep(y)",
            f"{many}comm.Allgather(x, y); keep(y)",
            f"{many}comm.Gather(x, y, root=0); keep(y)",
            f"{cut}comm.Alltoall(x, y); keep(y)",
            f"{cut}comm.Scatter(x, y[0], root=0); keep(y)",
            f"{cut}z = np.zeros(4, x.dtype); comm.Reduce_scatter_block(x, z, op=MPI.{op}); keep(z)",
            "x = some(rank + 1); y = np.zeros(size * (size + 1) // 2); "
            "comm.Allgatherv(x, [y, list(range(1, size + 1))]); keep(y)",
            f"x = some({n}); comm.Allreduce(MPI.IN_PLACE, x); keep(x)",
        ]
    )


def _messages(draw: random.Random) -> str:
    n, tag = _size(draw), draw.randint(0, 9)
    return draw.choice(
        [
            f"keep(comm.sendrecv((rank, some(3)), right, {tag}, None, left, {tag})[1])",
            f"x = some({n}); y = np.zeros_like(x); "
            f"comm.Sendrecv(x, right, {tag}, y, left, {tag}); keep(y)",
            f"one = comm.isend((rank, 'a'), right, {tag}); "
            f"keep(comm.recv(source=left, tag={tag})); one.wait()",
            f"x = some({n}); y = np.zeros_like(x); "
            f"both = [comm.Irecv(y, left, {tag}), comm.Isend(x, right, {tag})]; "
            "MPI.Request.Waitall(both); keep(y)",
            f"status = MPI.Status(); one = comm.isend([rank] * (rank + 1), left, {tag}); "
            f"keep(comm.recv(source=MPI.ANY_SOURCE, tag={tag}, status=status), "
            "status.source, status.tag); one.wait()",
            "if size > 1:\n    if rank == 0: send(some(6), 1)\n    if rank == 1: keep(recv(0))",
            f"one = comm.Isend(some({n}), right, {tag}); status = MPI.Status(); "
            f"comm.Probe(left, {tag}, status); y = np.zeros(status.Get_count(MPI.DOUBLE)); "
            f"comm.Recv(y, left, {tag}); one.Wait(); keep(y)",
            "if rank == 0: keep(sorted(comm.recv(tag=10) for _ in range(size - 1)))\n"
            "else: comm.send((rank, rank * 2), 0, tag=10)\ncomm.Barrier()",
        ]
    )


def _groups(draw: random.Random) -> str:
    return draw.choice(
        [
            "sub = comm.Split(rank % 2, -rank); keep(sub.rank, sub.size); x = some(5); "
            "y = np.zeros(5); sub.Allreduce(x, y); keep(y, sub.allgather(rank)); sub.Free()",
            "sub = comm.Dup(); keep(sub.allreduce(rank + 0.5)); sub.Free()",
            "evens = add_process_set(range(0, size, 2)); x = some(4)\n"
            "if evens.included(): keep(allreduce(x, op=Sum, process_set=evens))\n"
            "remove_process_set(evens)",
            "ring = comm.Create_cart([size], [True]); keep(ring.Shift(0, 1), ring.coords); "
            "keep(ring.sendrecv(rank, ring.Shift(0, 1)[1], 0, None, ring.Shift(0, 1)[0], 0))",
        ]
    )


_STEPS = [_reduction, _moved, _objects, _buffers, _messages, _groups]
