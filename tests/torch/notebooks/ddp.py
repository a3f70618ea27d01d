# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# %%
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"process {rank} of {world_size}")

# %%
torch.manual_seed(rank)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
y = x.sum(dim=1, keepdim=True)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()

# %%
for epoch in range(20):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
total = loss.detach().clone()
dist.all_reduce(total)
if rank == 0:
    print("mean loss below 0.5:", (total / world_size).item() < 0.5)

# %%
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(flat) for _ in range(world_size)]
dist.all_gather(others, flat)
print("all ranks hold the same weights:", all(torch.equal(flat, other) for other in others))

# %%
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
fresh = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
fresh.load_state_dict(torch.load("model.pt", map_location="cpu"))
print("checkpoint loaded:", torch.equal(fresh(x), model.module(x)))

# %%
dist.destroy_process_group()
