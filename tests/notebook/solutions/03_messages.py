# %% 1
def rotated(array):
    return comm.sendrecv(array, dest=right, source=left)


# %% 2
def my_allgather(array):
    result, piece = [None] * size, array
    result[rank] = array
    for step in range(1, size):
        piece = comm.sendrecv(piece, dest=right, source=left)
        result[(rank - step) % size] = piece
    return result


# %% 3
def my_allreduce(array):
    pieces = np.array_split(array, size)
    for step in range(size - 1):
        piece = comm.sendrecv(pieces[(rank - step) % size], dest=right, source=left)
        pieces[(rank - step - 1) % size] += piece
    for step in range(size - 1):
        piece = comm.sendrecv(pieces[(rank + 1 - step) % size], dest=right, source=left)
        pieces[(rank - step) % size] = piece
    return np.concatenate(pieces)
