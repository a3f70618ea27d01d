# %%
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# %%
accelerator = Accelerator(cpu=True)
set_seed(42)
accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}")

# %%
x = torch.randn(256, 8)
y = (x.sum(dim=1) > 0).long()
train_loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
eval_loader = DataLoader(TensorDataset(x, y), batch_size=50)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, train_loader, eval_loader = accelerator.prepare(
    model, optimizer, train_loader, eval_loader
)

# %%
for epoch in range(10):
    model.train()
    for inputs, targets in train_loader:
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

# %%
model.eval()
correct = seen = 0
for inputs, targets in eval_loader:
    with torch.no_grad():
        predictions = model(inputs).argmax(dim=-1)
    predictions, targets = accelerator.gather_for_metrics((predictions, targets))
    correct += (predictions == targets).sum().item()
    seen += targets.numel()
accelerator.print(f"seen {seen}, accuracy above 0.9: {correct / seen > 0.9}")

# %%
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "accelerated.pt")
accelerator.end_training()
