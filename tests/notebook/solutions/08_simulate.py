# %% 1
def tree_sum(value):
    step = 1
    while step < size:
        if rank % (2 * step):
            comm.send(value, dest=rank - step)
            return None
        if rank + step < size:
            value += comm.recv(source=rank + step)
        step *= 2
    return value
