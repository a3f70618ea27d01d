"""torch's process groups, from cell to cell."""

from __future__ import annotations

IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import nn\nkept = []"
AGAIN = """
for _ in range(3):
    dist.init_process_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    kept.append(model)
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        import time
        time.sleep(0.1)
    dist.destroy_process_group()
"""


def test_groups_follow_each_other_while_their_models_stay(ranks):
    """A model keeps its group's store alive, and rank 0 may be late to close the last one."""
    assert ranks.on_ranks(IMPORTS).status == "ok"
    for _ in range(2):
        cell = ranks.on_ranks(AGAIN)
        assert cell.status == "ok", cell.text
    assert ranks.on_ranks("len(kept)").text == "ranks 0–2 → 6\n"
