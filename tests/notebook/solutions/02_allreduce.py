# %% 1
mine = np.array([images.sum(), (images**2).sum(), images.size])
total, squares, number = allreduce(mine, op=Sum)
deviation = np.sqrt(squares / number - (total / number) ** 2)


# %% 2
def my_allreduce(array):
    left, right = (rank - 1) % size, (rank + 1) % size
    # Rank 0 speaks first, and hears the whole sum last.
    total = array if rank == 0 else recv(left) + array
    if rank < size - 1:
        send(total, right)
    if rank < size - 1:
        total = recv(left) if rank else recv(size - 1)
    if rank != size - 2:
        send(total, right)
    return total
