"""Trainings with torch whose cause is known: it is named below the cell."""

from __future__ import annotations

import re

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


def test_a_loader_that_takes_most_of_the_time_is_named(ranks):
    cell = ranks.on_ranks(f"READS = 200_000\n{BEGIN}{TRAIN}", timeout=_SECONDS)
    assert cell.status == "ok", cell.text
    said = re.findall(r"^ranks 0–2 · (.* for .* of the time.*)$", cell.text, re.MULTILINE)
    # On a busy machine the looks may find it elsewhere: then nothing is said.
    for text in said:
        assert text.startswith("all ranks wait for data for ")
        assert "`for x, y in torch.utils.data.DataLoader(Data()" in text
