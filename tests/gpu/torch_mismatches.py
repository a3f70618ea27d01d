"""Mismatches in torch's own groups: of NCCL on two GPUs, and of gloo where there is no GPU.

    python tests/gpu/torch_mismatches.py

Its Python needs torch, and what a notebook needs. Each failed cell must name the mismatch, and the
next one must work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests.faults.notebook import Notebook  # noqa: E402  the folder is found above

BEGIN = """
import torch
import torch.distributed as dist
from torch import nn
gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(0)
device = torch.device("cuda", 0) if gpu else torch.device("cpu")
dist.is_initialized() or dist.init_process_group("nccl" if gpu else "gloo")
t = torch.ones(1000, device=device)
dist.all_reduce(t)
"""
LAST = "print('used', t.sum().item())"
#: A cell of two ranks, and what its report says.
CELLS = {
    "shape": ("dist.all_reduce(t[:999] if rank else t)", "all_reduce(SUM) needs the same shape"),
    "dtype": ("dist.all_reduce(t.double() if rank else t)", "needs the same dtype"),
    "operation": ("(dist.barrier if rank else dist.all_reduce)(*[t][rank:])", "same operation"),
    "root": ("dist.broadcast(t, rank)", "broadcast needs the same root"),
    "missing": ("if rank:\n    dist.all_reduce(t)\n    " + LAST, "without calling all_reduce"),
    "backward": (
        "model = nn.Linear(1000, 10).to(device)\n"
        "model = nn.parallel.DistributedDataParallel(model)\n"
        "loss = model(t).sum()\nif rank:\n    loss.backward()\n    " + LAST,
        "without calling all_reduce",
    ),
    "asynchronous": (
        "work = dist.all_reduce(t[:999] if rank else t, async_op=True)\nwork.wait()\n" + LAST,
        "all_reduce(SUM) needs the same shape",
    ),
}


def failures() -> list[str]:
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Notebook(Path(folder)) as notebook:
        started = notebook.run("%distributed start -n 2 --torch gloo", 300)
        if started.status != "ok":
            return [started.text]
        for name, (source, words) in CELLS.items():
            begun = notebook.on_ranks(BEGIN, timeout=120)
            if begun.status != "ok":
                found.append(f"{name}: the groups were not made:\n{begun.text}")
                continue
            cell = notebook.on_ranks(source, timeout=60)
            if words not in cell.text or "used" in cell.text.partition("raised")[0]:
                found.append(f"{name}: expected {words!r}, found:\n{cell.text}")
    return found


if __name__ == "__main__":
    found = failures()
    print("\n".join(found) or f"{len(CELLS)} mismatches are named")
    raise SystemExit(bool(found))
