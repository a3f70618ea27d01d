"""Compares collectives of arrays on a GPU with manual staging and with direct calls of NCCL.

``python -m benchmarks gpu`` starts mpiexec itself. Two and four ranks that share a GPU are compared
with plain cupy and mpi4py, one rank with NCCL with ``cupy.cuda.nccl``. Without a GPU it prints what
is missing, and measures nothing.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks import ranks, results

RANK = "ALLRANKS_BENCHMARK_RANK"
STAGED_BYTES = [1 << 20, 16 << 20, 64 << 20, 256 << 20]
NCCL_BYTES = [4, 64 << 10, 1 << 20, 64 << 20]


def missing() -> str:
    from allranks.cluster import devices

    try:
        import cupy
    except ImportError:
        return "the package cupy is missing: pip install 'allranks[cuda12]'"
    if not devices.visible_gpus():
        return f"no GPU is visible here: {devices.why_none()}"
    return "" if cupy.is_available() else "cupy finds no GPU that it can use"


def machine() -> dict[str, Any]:
    import cupy
    import pynvml
    from cupy.cuda import nccl

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    gpu = {
        "gpu": pynvml.nvmlDeviceGetName(handle),
        "gpus": pynvml.nvmlDeviceGetCount(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "nccl": nccl.get_version() if nccl.available else None,
        "cupy": cupy.__version__,
    }
    return {"machine": results.machine(), "gpu": gpu}


def staged(c: Any, cupy: Any, comm: Any, nbytes: int) -> dict[str, list[float]]:
    # Manual staging: copy down, MPI_Allreduce, copy up; with ordinary and with pinned memory.
    import cupyx
    from mpi4py import MPI

    mine = cupy.ones(nbytes // 4, np.float32)
    down, up = (cupyx.empty_pinned(nbytes // 4, np.float32) for _ in range(2))

    def by_hand() -> Any:
        host = cupy.asnumpy(mine)
        out = np.empty_like(host)
        comm.Allreduce(host, out, MPI.SUM)
        found = cupy.asarray(out)
        cupy.cuda.get_current_stream().synchronize()
        return found

    def by_hand_pinned() -> Any:
        mine.get(out=down)
        comm.Allreduce(down, up, MPI.SUM)
        found = cupy.empty_like(mine)
        found.set(up)
        cupy.cuda.get_current_stream().synchronize()
        return found

    peers = {
        "allranks": lambda: c.allreduce(mine, c.Sum, transport="staged"),
        "by hand": by_hand,
        "by hand, pinned": by_hand_pinned,
    }
    return ranks.slowest(comm, peers, 15 if nbytes < 64 << 20 else 7)


def nccl_alone(c: Any, cupy: Any, comm: Any, nbytes: int) -> dict[str, list[float]]:
    # Each call is timed until its result is complete, because NCCL returns earlier.
    from cupy.cuda import nccl

    mine = cupy.ones(max(1, nbytes // 4), np.float32)
    out = cupy.empty_like(mine)
    raw = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream(non_blocking=True)

    def direct() -> None:
        raw.allReduce(mine.data.ptr, out.data.ptr, mine.size, 7, 0, stream.ptr)
        stream.synchronize()

    cupy.cuda.get_current_stream().synchronize()
    peers = {"allranks": lambda: c.allreduce(mine, c.Sum, transport="nccl"), "nccl": direct}
    found = ranks.slowest(comm, peers, 50)
    raw.destroy()
    return found


def on_ranks() -> None:
    from mpi4py import MPI

    from allranks.engine import libraries

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    libraries.set_variables(os.environ, libraries.pinning([os.environ[RANK]], rank, size)[1])
    import cupy

    import allranks.collectives as c

    c.init()
    comm = MPI.COMM_WORLD
    if size == 1:
        rows = {str(n): nccl_alone(c, cupy, comm, n) for n in NCCL_BYTES}
    else:
        rows = {str(n): staged(c, cupy, comm, n) for n in STAGED_BYTES}
    ranks.write(rank, rows)


def table(result: dict[str, Any]) -> str:
    lines = []
    for size, rows in result["samples"].items():
        for nbytes, peers in rows.items():
            middle = {name: float(np.median(times)) for name, times in peers.items()}
            shown = [f"{time * 1e3:.3f}" for time in middle.values()]
            ratios = [f"{time / middle['allranks']:.2f}×" for time in list(middle.values())[1:]]
            lines.append([f"{size} × {int(nbytes):,} B", " / ".join(middle), *shown, *ratios])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    why = missing()
    if why:
        print(f"gpu: nothing was measured: {why}")
        return
    from allranks.cluster import devices

    uuid = devices.visible_gpus()[0].uuid
    measured = {"samples": {str(n): ranks.run(n, __file__, **{RANK: uuid}) for n in (1, 2, 4)}}
    about = machine()
    result = results.write("gpu", about["machine"], {"gpu": about["gpu"], **measured})
    print(table(result))


if __name__ == "__main__":
    if RANK in os.environ:
        on_ranks()
    else:
        main()
