"""Trainings that are slow for one known reason: ``slow.py forward|backward|input|memory``.

They run with ``allranks run -np 2``, and unchanged with ``traceml run --nproc-per-node 2``, whose
steps they mark if TraceML is installed.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, FEATURES = 240, 32, 256


def trace_step(model):
    """Returns what surrounds a step: TraceML's, if it is installed."""
    if find_spec("traceml_ai") is None:
        return nullcontext()
    import traceml_ai

    return traceml_ai.trace_step(model)


class Rows(Dataset):
    def __init__(self, steps, work):
        self.steps, self.work = steps, work

    def __len__(self):
        return self.steps * BATCH

    def __getitem__(self, at):
        sum(range(self.work))
        return torch.randn(FEATURES), torch.ones(1)


class Normalize(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = work

    def forward(self, x):
        sum(i * i for i in range(self.work))
        return x / x.norm()


def clip(gradient, work):
    sum(i * i for i in range(work))
    return gradient.clamp(-1, 1)


def train(reason):
    slow = 1_000_000 if dist.get_rank() == 1 else 0
    first = nn.Linear(FEATURES, FEATURES)
    inner = nn.Sequential(
        Normalize(slow if reason == "forward" else 0), first, nn.ReLU(), nn.Linear(FEATURES, 1)
    )
    first.weight.register_hook(lambda gradient: clip(gradient, slow if reason == "backward" else 0))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    history = []
    # Short steps: more of them keep more.
    rows = Rows(20 * STEPS if reason == "memory" else STEPS, 60_000 if reason == "input" else 0)
    for x, y in DataLoader(rows, batch_size=BATCH):
        with trace_step(model):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if reason == "memory":
            history.append(x.repeat(1, 4))


if __name__ == "__main__":
    if find_spec("traceml_ai") is not None:
        import traceml_ai

        traceml_ai.init(mode="auto")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(sys.argv[1])
    dist.destroy_process_group()
