# %% 1
def two_sums(first, second):
    if rank > 0:
        comm.send(first, dest=0, tag=1)
        comm.send(second, dest=0, tag=2)
        return None
    return tuple(
        sum(comm.recv(source=MPI.ANY_SOURCE, tag=tag) for _ in range(size - 1)) for tag in (1, 2)
    )


# %% 2
def same_sum(value):
    if rank > 0:
        comm.send((rank, value), dest=0)
        return None
    received = sorted(comm.recv(source=MPI.ANY_SOURCE) for _ in range(size - 1))
    return sum((each for _, each in received), value)
