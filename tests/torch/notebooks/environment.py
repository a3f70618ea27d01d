# A notebook for processes that a launcher numbers by environment variables.
import os
import random

rank = int(os.environ["RANK"])
drawn = random.random()
print("process", rank, "of", os.environ["WORLD_SIZE"], "here", os.environ["LOCAL_RANK"])
print("address given:", bool(os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])))
# %%
# %%rank 1
other = drawn
print("only process", rank, "has other:", "other" in globals())
# %%
# %%rank 0
# %%time
print("timed on process", rank)
# %%
import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size())


# %%
class Layers(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            seen = torch.relu(layer(x))
            if number == stop_at:
                breakpoint()
            x = seen
        return x


model = Layers()
stop_at = None
print("shape", tuple(model(torch.ones(2, 8)).shape))
