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


USUAL = """
import os
from torch.distributed.device_mesh import init_device_mesh

where = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(where)
device = torch.device("cuda", where) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
model = nn.Linear(2, 1).to(device)
ids = [where] if device.type == "cuda" else None
model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
model(torch.ones(1, 2, device=device)).sum().backward()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
if where == 0:
    print("the first of", os.environ["LOCAL_WORLD_SIZE"])
dist.barrier()
dist.destroy_process_group()
mesh.size()
"""


def test_the_lines_that_choose_a_gpu_choose_the_cpu_where_there_is_none(ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    cell = ranks.on_ranks(USUAL)
    assert cell.text == "rank 0    │ the first of 3\nranks 0–2 → 3\n"
