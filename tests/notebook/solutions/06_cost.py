# %% 1
def naive_allreduce(array):
    if rank > 0:
        send(array, 0)
        return recv(0)
    total = array + sum(recv(r) for r in range(1, size))
    for r in range(1, size):
        send(total, r)
    return total


# %% 2
def busiest(nbytes):
    return 2 * (size - 1) * nbytes, 2 * (size - 1) / size * nbytes
