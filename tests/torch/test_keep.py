"""A model of torch and its optimizer that are kept: the process in a dead rank's place has them."""

from __future__ import annotations

import pytest

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
    assert ranks.run("%distributed restart", 120).status == "ok"
    yield
    assert ranks.run("%distributed restart", 120).status == "ok"


def values(cell):
    """The value of each rank, as it is shown."""
    assert cell.status == "ok", cell.text
    shown = [line.partition("→ ") for line in cell.text.splitlines() if "→" in line]
    return {label.strip(): value for label, _, value in shown}


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
