"""Cells of two ranks that share a GPU, or have one each: what ends them, and what the next one has.

    python tests/gpu/cells.py

Its Python needs cupy, and what a notebook needs. Each step shows its seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests.faults.notebook import Notebook  # noqa: E402  the folder is found above
from tests.kernel import Cell  # noqa: E402

INTERRUPTED_SECONDS = 1.0
BEGIN = """
import os
import cupy
import numpy as np
kept, mine = 10 * rank, cupy.full(1 << 20, rank + 1.0, "float32")
print(device, float(allreduce(mine, Sum)[0]))
"""
NEXT = "print('next', float(allreduce(cupy.ones(3), Sum)[0]), globals().get('kept'))"
DIES = "if rank == 1:\n    os._exit(3)\nallreduce(mine, Sum)"
# A write to an address that no array has.
BREAKS = """
source = 'extern "C" __global__ void f(int *at) { at[threadIdx.x] = 1; }'
if rank == 1:
    cupy.RawKernel(source, "f")((1,), (1,), (np.uint64(8),))
    cupy.cuda.runtime.deviceSynchronize()
allreduce(mine, Sum)
"""
# About ten seconds of work before the call.
BUSY = """
spins = 'extern "C" __global__ void g(long long n)'
spins += '{ long long t = clock64(); while (clock64() - t < n); }'
cupy.RawKernel(spins, "g")((1,), (1,), (np.int64(15_000_000_000),))
print("works")
allreduce(mine, Sum)
"""


class Steps:
    """The steps of one notebook, and what was wrong in them."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self.wrong: list[str] = []

    def run(self, name: str, source: str, *wanted: str, never: str = "Exception ignored") -> None:
        """Runs a cell, in whose text all of ``wanted`` must be, and ``never`` must not."""
        began = time.monotonic()
        self.check(name, self._notebook.on_ranks(source, timeout=120), began, *wanted, never=never)

    def check(self, name: str, cell: Cell, began: float, *wanted: str, never: str) -> None:
        missing = [part for part in wanted if part not in cell.text]
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        if missing or never in cell.text:
            self.wrong.append(f"{name}: expected {missing}, and no {never!r}; found:\n{cell.text}")

    def interrupt(self, name: str, source: str, begun: str) -> None:
        """Interrupts a cell, which must end before the work of its GPU."""
        cell = self._notebook.start_on_ranks(source).wait_for(begun)
        self._notebook.drain(1.0)
        began = time.monotonic()
        self._notebook.interrupt()
        cell.wait(60)
        took = time.monotonic() - began
        self.check(name, cell, began, "KeyboardInterrupt", never="will be killed")
        if took > INTERRUPTED_SECONDS:
            self.wrong.append(f"{name}: ended {took:.1f} s after the interrupt")


def wrong() -> list[str]:
    with tempfile.TemporaryDirectory() as folder, Notebook(Path(folder)) as notebook:
        started = notebook.run("%distributed start -n 2", 300)
        if started.status != "ok":
            return [started.text]
        steps = Steps(notebook)
        steps.run("begin", BEGIN, "cuda:0 ", "3.0")
        steps.interrupt("an interrupt while the GPU works", BUSY, "works")
        steps.run("after it", NEXT, "next 2.0 0", "next 2.0 10")
        steps.run("a death", DIES, "rank 1 was replaced", "rank 0 kept its")
        steps.run("after it", f"import cupy\n{NEXT}", "next 2.0 0", "next 2.0 None")
        steps.run("begin again", BEGIN, "3.0")
        broken = "CUDA refuses every further call of rank 1", "rank 1 was replaced, with", "mine."
        steps.run("an illegal access", BREAKS, *broken)
        steps.run("after it", f"import cupy\n{NEXT}", "next 2.0 0", "next 2.0 10")
        return steps.wrong


if __name__ == "__main__":
    found = wrong()
    print("\n".join(found) or "all cells ended as they should")
    raise SystemExit(bool(found))
