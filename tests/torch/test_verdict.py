"""Trainings with torch whose cause is known: it is named below the cell."""

from __future__ import annotations

import re

import pytest

from tests.kernel import patched
from tests.torch.conftest import LEAST_SECONDS

_SECONDS = 300
BEGIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.is_initialized() or dist.init_process_group()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, at):
        sum(range(READS))
        return torch.ones(8) * at, torch.ones(1)

model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
"""
TRAIN = """
for x, y in torch.utils.data.DataLoader(Data(), batch_size=8):
    loss = (model(x + rank) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True, scope="module")
def _judged(ranks):
    """Also on a busy machine, where a rank may tell late of its steps, and answer late."""
    with (
        patched(ranks.run, LEAST_SECONDS, 1),
        patched(ranks.run, "allranks.features.verdict.notebook._ASK_SECONDS", 60),
        patched(ranks.on_ranks, "allranks.engine.telemetry._PULSE_SECONDS", 0.1),
    ):
        yield


def test_a_loader_that_takes_most_of_the_time_is_named(ranks):
    cell = ranks.on_ranks(f"READS = 200_000\n{BEGIN}{TRAIN}", timeout=_SECONDS)
    assert cell.status == "ok", cell.text
    # On a busy machine the looks may find it elsewhere, or a rank may have no core: then nothing is
    # said of all ranks.
    said = re.findall(r"^ranks 0–2 · (all ranks .* of the time.*)$", cell.text, re.MULTILINE)
    for text in said:
        assert text.startswith("all ranks wait for data for ")
        assert "`for x, y in torch.utils.data.DataLoader(Data()" in text


MANUAL = """
import time, torch

def train(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(80, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    for step in range(120):
        x = torch.randn(32, 80)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.01)
        {reduce}
        optimizer.step()
"""
REDUCE = "for p in model.parameters(): p.grad = allreduce(p.grad)"
SAID = r"^ranks 0–2 · (?:the ranks' weights|each rank has trained) .*$"


def said_of(ranks, reduce, call):
    cell = ranks.on_ranks(MANUAL.format(reduce=reduce) + call, timeout=_SECONDS)
    assert cell.status == "ok", cell.text
    return re.findall(SAID, cell.text, re.MULTILINE)


def test_weights_of_a_function_that_differ_from_the_start_are_named(ranks):
    checked = ranks.on_ranks(
        MANUAL.format(reduce=REDUCE) + "train(rank)", "--check weights", timeout=_SECONDS
    )
    assert checked.status == "error"
    assert "WeightsDiffer: expected the same weights on all ranks after step 1" in checked.text
    assert "array 0 (100, 80): other values on every rank, by at most " in checked.text
    (said,) = said_of(ranks, REDUCE, "train(rank)")
    assert "differ in 4 of 4 arrays: " in said
    assert "although gradients were reduced: they differed before the first step" in said


def test_an_array_whose_gradients_are_not_reduced_is_named(ranks):
    all_but_one = "for p in [*model.parameters()][:3]: p.grad = allreduce(p.grad)"
    (said,) = said_of(ranks, all_but_one, "train(7)")
    assert "differ in 1 of 4 arrays: " in said
    assert "The gradients of array 3 (1,) were not reduced" in said


def test_ranks_that_each_train_a_model_are_told_so(ranks):
    (said,) = said_of(ranks, "", "train(rank)")
    assert "each rank has trained a model of its own" in said


def test_ranks_that_train_one_model_are_told_nothing_of_its_weights(ranks):
    assert said_of(ranks, REDUCE, "train(7)") == []
    healthy = TRAIN.replace("in torch", "in 3 * [*torch").replace("batch_size=8)", "batch_size=8)]")
    cell = ranks.on_ranks(f"READS = 20_000\n{BEGIN}{healthy}", timeout=_SECONDS)
    assert cell.status == "ok", cell.text
    assert not re.search(SAID, cell.text, re.MULTILINE)
