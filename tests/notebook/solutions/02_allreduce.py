# %% 1
def deviation_of_all(images):
    mine = np.array([images.sum(), (images**2).sum(), images.size])
    total, squares, number = allreduce(mine, op=Sum)
    return np.sqrt(squares / number - (total / number) ** 2)


# %% 2
def rank_with_most(digit):
    return allgather(np.array([np.sum(labels == digit)])).argmax()
