# %%
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# %%
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
print("sharded:", all(isinstance(p, DTensor) for p in model.parameters()))

# %%
generator = torch.Generator().manual_seed(dist.get_rank())
x = torch.randn(64, 8, generator=generator)
y = x.sum(dim=1, keepdim=True)
first = last = None
for _ in range(60):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    first, last = first or loss.item(), loss.item()
print("the loss has fallen to a tenth:", last < first / 10)

# %%
whole = model[0].weight.full_tensor()
print("a whole weight:", tuple(whole.shape))

# %%
dist.destroy_process_group()
