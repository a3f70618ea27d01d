# %% 1
with torch.no_grad():
    hits = (ddp.module(x_part).argmax(dim=1) == y_part).sum()
dist.all_reduce(hits)


# %% 2
def step_of(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad = allreduce(parameter.grad)
    optimizer.step()
