"""Trainings of torch that continue after a death: with what was kept, or what a rank still has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torch.test_groups import IMPORTS

TRAINS = """
import torch
from torch import nn

torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.arange(15.0).reshape(5, 3)

def step():
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return round(loss.item(), 6)

losses = [step() for _ in range(3)]
keep("model", "optimizer", "x", "step", "losses")
after = [step() for _ in range(3)]
after
"""
DIE = "import os\nif rank == 1: os._exit(5)\nbarrier()"
GOES_ON = "import torch\n[step() for _ in range(3)]"


@pytest.fixture(scope="module", autouse=True)
def _fresh_before_and_after(ranks):
    """JAX ends all processes that it has initialized where one of them dies."""
    assert ranks.run("%distributed restart", 300).status == "ok"
    yield
    assert ranks.run("%distributed restart", 300).status == "ok"


def values(cell):
    """The value of each rank, as it is shown."""
    assert cell.status == "ok", cell.text
    shown = [line.partition("→ ") for line in cell.text.splitlines() if "→" in line]
    return {label.strip(): value for label, _, value in shown}


@pytest.mark.replaces
def test_a_training_goes_on_in_the_new_rank_as_it_would_have_in_the_dead_one(ranks):
    went_on = values(ranks.on_ranks(TRAINS))
    assert len(set(went_on.values())) == 3  # each has a model of its own
    died = ranks.on_ranks(DIE)
    assert died.error_name == "RankDied"
    assert "rank 1 was replaced, with model, optimizer, x, step and losses kept" in died.text
    # The copy that was kept is as the model was then, and its optimizer is of this very model.
    again = values(ranks.on_ranks(GOES_ON, "-r 1"))
    assert again["rank 1"] == went_on["rank 1"]
    same = "optimizer.param_groups[0]['params'][0] is next(model.parameters())"
    assert values(ranks.on_ranks(same)) == {"ranks 0–2": "True"}
    assert values(
        ranks.on_ranks("model.training, model[1].num_batches_tracked.item()", "-r 1")
    ) == {"rank 1": "(True, 6)"}


@pytest.mark.replaces
def test_what_is_kept_after_each_cell_is_as_the_cell_has_left_it(ranks):
    ranks.run("%distributed keep weights")
    try:
        values(
            ranks.on_ranks("import torch\nweights = torch.full((2,), float(rank)).requires_grad_()")
        )
        values(ranks.on_ranks("with torch.no_grad(): weights += 1\nweights.sum().item()"))
        assert "rank 1 was replaced, with weights kept" in ranks.on_ranks(DIE).text
        kept = values(ranks.on_ranks("weights.tolist(), weights.requires_grad", "-r 1"))
        assert kept == {"rank 1": "([2.0, 2.0], True)"}
    finally:
        ranks.run("%distributed keep off")


BEGIN = f"""{IMPORTS}
import os
from torch.nn.parallel import DistributedDataParallel
from allranks.torch import recover
dist.is_initialized() or dist.init_process_group()

def net():
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def train(until, save=lambda *_: None):
    global step
    while step < until:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step * size + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if (rank, step) == dies:
            os._exit(3)
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 4 == 0:
            save(model, optimizer, step)
    whole = [getattr(p, "full_tensor", lambda: p)() for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])

def alike(found):
    every = [torch.zeros_like(found) for _ in range(size)]
    dist.all_gather(every, found)
    return all(torch.equal(found, other) for other in every)
"""
REPLICATED = """
def make():
    global model, optimizer, scheduler, step
    model, step = net(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""
FROM_THE_START = f"""{BEGIN}{REPLICATED}
make()
dies = DIES
recover(model, optimizer, scheduler)
first_wrapper = model = DistributedDataParallel(model)
result = train(20)
"""
CONTINUE = f"""{BEGIN}{REPLICATED}
dies = None
if "optimizer" not in globals():
    make()
done = recover(model, optimizer, scheduler)
step = broadcast_object(step, done.source)
model = DistributedDataParallel(getattr(model, "module", model))
result = train(20)
print(done, len(optimizer.state), alike(result))
"""


CLOSE = "import torch.distributed as dist\ndist.is_initialized() and dist.destroy_process_group()"


EXACT = "zlib.crc32(result.numpy().tobytes())"
ROUNDED = "round(result.abs().sum().item(), 3)"


def result_of(ranks, digits=EXACT):
    found = values(ranks.on_ranks(f"import zlib\n{digits}"))
    return found["ranks 0–2"]  # the same on all ranks


def check_a_training_continues(ranks, dead, digits=EXACT):
    """The wrapper that the death has left in a backward pass is still there."""
    assert ranks.on_ranks(CLOSE).status == "ok"
    assert ranks.on_ranks(FROM_THE_START.replace("DIES", "None")).status == "ok"
    undisturbed = result_of(ranks, digits)
    died = ranks.on_ranks(FROM_THE_START.replace("DIES", f"({dead}, 11)"))
    assert died.error_name == "RankDied", died.text
    continued = ranks.on_ranks(CONTINUE)
    source = int(dead == 0)
    assert f"ranks 0–2 │ Recovery(source={source}, replaced=({dead},)) 4 True\n" in continued.text
    done = f"all ranks have the state of rank {source} (Sequential, Adam, StepLR)"
    assert f"rank {source}    · recover: {done}; new: rank {dead}\n" in continued.text
    assert result_of(ranks, digits) == undisturbed


@pytest.mark.replaces
@pytest.mark.parametrize("dead", [1, 0])
def test_a_training_continues_with_the_state_of_a_rank_that_has_survived(ranks, dead):
    check_a_training_continues(ranks, dead)
    others = "-r 1,2" if dead == 0 else "-r 0,2"
    stale = ranks.on_ranks("first_wrapper(torch.ones(1, 4))", others)
    assert "a DistributedDataParallel needs an open process group" in stale.text


PAGE = (Path(__file__).parents[2] / "docs" / "torch_jax.md").read_text()
SAVE, LOAD = re.findall(r"test_keep.py -->\n```python\n(.*?)```", PAGE, re.S)
SHARDED = f"""{BEGIN}
from torch.distributed.fsdp import fully_shard
from types import SimpleNamespace
{SAVE}
scheduler = SimpleNamespace(step=lambda: None)

def make():
    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)
"""
SHARDED_FROM_THE_START = f"""{SHARDED}
(model, optimizer), step, dies = make(), 0, DIES
result = train(20, save)
"""


@pytest.mark.replaces
@pytest.mark.parametrize("dead", [1, 0])
def test_a_sharded_training_continues_from_what_was_kept(ranks, dead):
    assert ranks.on_ranks(CLOSE).status == "ok"
    assert ranks.on_ranks(SHARDED_FROM_THE_START.replace("DIES", "None")).status == "ok"
    undisturbed = result_of(ranks)
    died = ranks.on_ranks(SHARDED_FROM_THE_START.replace("DIES", f"({dead}, 11)"))
    assert died.error_name == "RankDied", died.text
    load = LOAD.removeprefix("%%distributed\n")
    again = f"{SHARDED}\ndies = None\n{load}\nprint('from', step)\nresult = train(20)"
    continued = ranks.on_ranks(f"{again}\nalike(result)")
    assert continued.text.endswith("ranks 0–2 │ from 8\n          → True\n")
    assert result_of(ranks) == undisturbed


REFUSED = {
    "found 0.weight, which is sharded, on rank 0": (
        "from torch.distributed.fsdp import fully_shard\nrecover(fully_shard(net()))"
    ),
    "found ranks 0, 2 weight of shape (1, 2) and dtype float32 at place 0, rank 1 weight of": (
        "recover(nn.Linear(3 if rank == 1 else 2, 1))"
    ),
    "found ranks 0–1 3 variables, rank 2 2 variables": (
        "net = nn.Linear(2, 1)\n"
        "recover(net, *[torch.optim.SGD(net.parameters())] if rank < 2 else [])"
    ),
    "found int on rank 0. For other values type: broadcast_object(value, source)": (
        "recover(nn.Linear(2, 1), 5)"
    ),
    "found weight, which is none, on rank 0. Initialize the model": "recover(nn.LazyLinear(3))",
    "recover needs a module first: found int. Type: recover(model, optimizer)": "recover(5)",
    "needs a root that is in the process set: found 7": "recover(nn.Linear(2, 1), source=7)",
}


@pytest.mark.parametrize(("message", "source"), REFUSED.items())
def test_a_state_that_cannot_be_copied_is_refused_on_all_ranks(ranks, message, source):
    cell = ranks.on_ranks(f"{BEGIN}\n{source}")
    assert message in cell.text
    assert "waiting" not in cell.text


RECOVER = f"{BEGIN}\nwhole = globals().get('whole') or nn.Linear(2, 1)\nrecover(whole)"


def replace(ranks, rank, others=""):
    died = ranks.on_ranks(f"import os\nif rank == {rank}: os._exit(3)\n{others}")
    assert f"rank {rank} was replaced" in died.text


@pytest.mark.replaces
def test_the_source_is_the_lowest_rank_with_a_state(ranks):
    for rank in range(3):
        replace(ranks, rank)
    none = ranks.on_ranks(RECOVER)
    assert "recover needs a rank that has survived: all ranks were replaced" in none.text
    chosen = ranks.on_ranks("recover(whole, source=2)")
    assert "ranks 0–2 → Recovery(source=2, replaced=(0, 1, 2))\n" in chosen.text
    replace(ranks, 0, "unfinished = DistributedDataParallel(whole)")
    assert "→ Recovery(source=1, replaced=(0,))\n" in ranks.on_ranks(RECOVER).text
