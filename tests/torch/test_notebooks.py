"""Notebooks as people have them: but for the lines that start the ranks, nothing is changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).with_name("notebooks")
SAID = {
    "ddp": [
        "rank 0 │ process 0 of 3",
        "rank 2 │ process 2 of 3",
        "rank 0 │ mean loss below 0.5: True",
        "ranks 0–2 │ all ranks hold the same weights: True",
        "ranks 0–2 │ checkpoint loaded: True",
    ],
    "fsdp": [
        "ranks 0–2 │ sharded: True",
        "ranks 0–2 │ the loss has fallen to a tenth: True",
        "ranks 0–2 │ a whole weight: (16, 8)",
    ],
    "accelerate": [
        "rank 0 │ 3 processes, DistributedType.MULTI_CPU",
        "rank 0 │ seen 256, accuracy above 0.9: True",
    ],
    "environment": [
        "rank 2 │ process 2 of 3 here 2",
        "ranks 0–2 │ address given: True",
        "rank 1 │ only process 1 has other: True",
        "rank 0 │ timed on process 0",
        "ranks 0–2 │ sum 3.0 of 3",
        "ranks 0–2 │ shape (2, 8)",
    ],
    "jax": [
        "rank 0 │ process 0 of 3",
        "ranks 0–2 │ devices: 3 local: 1",
        "ranks 0–2 │ global shape: (6, 4)",
        "ranks 0–2 │ sum over all processes: 24.0",
        "ranks 0–2 │ weights agree: True",
    ],
}


@pytest.mark.parametrize("name", SAID)
def test_a_notebook_runs_as_it_is(ranks, name):
    ranks.run("%distributed on")
    cells = (NOTEBOOKS / f"{name}.py").read_text().split("# %%\n")
    said = ""
    for text in filter(None, cells):
        source = re.sub(r"(?m)^# (%%\w)", r"\1", text)
        cell = ranks.run(source, timeout=120)
        assert cell.status == "ok", cell.text
        said += re.sub(" +│", " │", cell.text)
    ranks.run("%distributed off")
    for line in SAID[name]:
        assert line in said, said


def test_a_breakpoint_in_a_model_stops_every_rank(ranks):
    cells = (NOTEBOOKS / "environment.py").read_text().split("# %%\n")
    ranks.on_ranks(f"import torch\n{cells[-1]}\nstop_at = 2").ok()
    source = "%%distributed\nfound = tuple(model(torch.ones(2, 8)).shape)\nfound"
    cell = ranks.start(source, typing=True)
    asked = set()
    for count in range(1, 7):
        # A rank that is late with its second prompt comes after another one.
        rank = cell.prompt(count).partition(" │")[0]
        cell.answer("continue" if rank in asked else "number, 1000 + rank")
        asked.add(rank)
    assert asked == {"rank 0", "rank 1", "rank 2"}
    cell.wait().ok().says("(2, 1000)", "(2, 1001)", "(2, 1002)", "rank 2 → (2, 8)")
