"""Compares collectives of arrays on a GPU with manual staging, direct calls of NCCL, and torch.

``python -m benchmarks gpu`` starts mpiexec itself. Two and four ranks that share a GPU are compared
with plain cupy and mpi4py, and with torch's gloo and NCCL; one rank over NCCL with
``cupy.cuda.nccl`` and torch's NCCL. A side that cannot run here is left out, with the reason.
Without a GPU it prints what is missing, and measures nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import ranks, results

RANK = "ALLRANKS_BENCHMARK_RANK"
STAGED_BYTES = [1 << 20, 16 << 20, 64 << 20, 256 << 20]
NCCL_BYTES = [4, 64 << 10, 1 << 20, 64 << 20]
# NCCL 2.30 and newer then allow ranks to share a GPU; older versions ignore it.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}

Side = Callable[[Any], ranks.Call]
"""Makes a side's call for an array like this one."""


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


def usable(
    comm: Any, makers: dict[str, Callable[[], Side]], small: Any
) -> tuple[dict[str, Side], dict[str, str]]:
    """Returns the sides that can run on every rank, and why the others cannot. Collective.

    A side can run if all ranks have made it, and one call with the array ``small`` has ended.
    """
    sides, left_out = {}, {}
    for name, make in makers.items():
        why = ""
        try:
            side = make()
            side(small)()
        except Exception as error:  # of a library that is missing, too old, or refuses the GPU
            why = f"{type(error).__name__}: {str(error).strip()}"
        found = enumerate(comm.allgather(why))
        if reason := next((f"rank {rank}: {each}" for rank, each in found if each), ""):
            left_out[name] = reason
        else:
            sides[name] = side
    return sides, left_out


def by_ours(c: Any, transport: str) -> Side:
    def side(mine: Any) -> ranks.Call:
        def call() -> Any:
            return c.allreduce(mine, c.Sum, transport=transport)

        call()
        # Where memory on the GPU cannot be shared, ipc is staged.
        if (way := c.records()[-1].transport) != transport:
            raise RuntimeError(f"the array went by {way}")
        return call

    return side


def by_hand(cupy: Any, comm: Any) -> Side:
    """Manual staging: copy down, MPI_Allreduce, copy up."""
    from mpi4py import MPI

    def side(mine: Any) -> ranks.Call:

        def call() -> Any:
            host = cupy.asnumpy(mine)
            out = np.empty_like(host)
            comm.Allreduce(host, out, MPI.SUM)
            found = cupy.asarray(out)
            cupy.cuda.get_current_stream().synchronize()
            return found

        return call

    return side


def by_hand_pinned(cupy: Any, comm: Any) -> Side:
    import cupyx
    from mpi4py import MPI

    def side(mine: Any) -> ranks.Call:
        down, up = (cupyx.empty_pinned(mine.size, np.float32) for _ in range(2))

        def call() -> Any:
            mine.get(out=down)
            comm.Allreduce(down, up, MPI.SUM)
            found = cupy.empty_like(mine)
            found.set(up)
            cupy.cuda.get_current_stream().synchronize()
            return found

        return call

    return side


def by_nccl(cupy: Any, ends: ExitStack) -> Side:
    """NCCL on one rank. A call ends when its result is complete, because NCCL returns earlier."""
    from cupy.cuda import nccl

    raw = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    ends.callback(raw.destroy)
    stream = cupy.cuda.Stream(non_blocking=True)

    def side(mine: Any) -> ranks.Call:
        out = cupy.empty_like(mine)
        cupy.cuda.get_current_stream().synchronize()

        def call() -> None:
            raw.allReduce(mine.data.ptr, out.data.ptr, mine.size, 7, 0, stream.ptr)
            stream.synchronize()

        return call

    return side


def by_torch(comm: Any, ends: ExitStack, backend: str, device: str = "cuda") -> Side:
    """torch's own group with this backend: the calls of its members are not compared."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    with patch("allranks.features.torch_jax.hook._is_rank", return_value=False):
        if not dist.is_initialized():
            folder = comm.bcast(tempfile.mkdtemp() if comm.Get_rank() == 0 else None)
            place = {"rank": comm.Get_rank(), "world_size": comm.Get_size()}
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", **place)
            ends.callback(dist.destroy_process_group)
        group = dist.new_group(backend=backend)

    def side(mine: Any) -> ranks.Call:
        tensor = torch.zeros(mine.size, device=device)

        def call() -> None:
            dist.all_reduce(tensor, group=group)
            if device == "cuda":
                torch.cuda.synchronize()

        return call

    return side


def sides_of(c: Any, cupy: Any, comm: Any, ends: ExitStack) -> dict[str, Callable[[], Side]]:
    """Returns what makes each side; the first is what the others are compared with."""
    if comm.Get_size() == 1:
        return {
            "allranks": lambda: by_ours(c, "nccl"),
            "nccl": lambda: by_nccl(cupy, ends),
            "torch nccl": lambda: by_torch(comm, ends, "nccl"),
        }
    return {
        "allranks": lambda: by_ours(c, "staged"),
        "by hand": lambda: by_hand(cupy, comm),
        "by hand, pinned": lambda: by_hand_pinned(cupy, comm),
        "torch gloo": lambda: by_torch(comm, ends, "gloo"),
        "allranks, ipc": lambda: by_ours(c, "ipc"),
        "allranks, nccl": lambda: by_ours(c, "nccl"),
        "torch nccl": lambda: by_torch(comm, ends, "nccl"),
    }


def on_ranks() -> None:
    from mpi4py import MPI

    from allranks.engine import libraries

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    libraries.set_variables(os.environ, libraries.pinning([os.environ[RANK]], rank, size)[1])
    import cupy

    import allranks.collectives as c

    c.init()
    comm = MPI.COMM_WORLD
    rows = {}
    with ExitStack() as ends:
        small = cupy.asarray(np.ones(1, np.float32))
        sides, left_out = usable(comm, sides_of(c, cupy, comm, ends), small)
        for nbytes in NCCL_BYTES if size == 1 else STAGED_BYTES:
            mine = cupy.asarray(np.ones(nbytes // 4, np.float32))
            calls = {name: side(mine) for name, side in sides.items()}
            repeats = 50 if size == 1 else 15 if nbytes < 64 << 20 else 7
            rows[str(nbytes)] = ranks.slowest(comm, calls, repeats)
        ranks.write(rank, {"samples": rows, "left_out": left_out})
        comm.Barrier()


def table(result: dict[str, Any]) -> str:
    lines = []
    for size, rows in result["samples"].items():
        for nbytes, sides in rows.items():
            if not sides:
                continue
            middle = {name: float(np.median(times)) for name, times in sides.items()}
            shown = [f"{time * 1e3:.3f}" for time in middle.values()]
            first, *others = middle.values()
            ratios = [f"{time / first:.2f}×" for time in others]
            lines.append([f"{size} × {int(nbytes):,} B", " / ".join(middle), *shown, *ratios])
    missing = [
        f"{size} rank{'s' * (size != '1')}: {name} is left out: {why}"
        for size, found in result["left_out"].items()
        for name, why in found.items()
    ]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), *missing])


def main() -> None:
    why = missing()
    if why:
        print(f"gpu: nothing was measured: {why}")
        return
    from allranks.cluster import devices

    uuid = devices.visible_gpus()[0].uuid
    # By the module's name: the folder of a file that is run comes first, and has a torch.py.
    program = "-m", "benchmarks.gpu"
    found = {str(n): ranks.run(n, *program, **{RANK: uuid}, **SHARED) for n in (1, 2, 4)}
    about = machine()
    measured = {
        what: {size: each[what] for size, each in found.items()} for what in ("samples", "left_out")
    }
    result = results.write("gpu", about["machine"], {"gpu": about["gpu"], **measured})
    print(table(result))


if __name__ == "__main__":
    if RANK in os.environ:
        on_ranks()
    else:
        main()
