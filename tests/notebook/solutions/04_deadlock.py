# %% 1
def from_left(array):
    if rank == 0:
        send(array, right)
        return recv(left)
    result = recv(left)
    send(array, right)
    return result


# %% 2
def exchanged(array):
    if partner >= size:
        return array
    if rank < partner:
        send(array, partner)
        return recv(partner)
    result = recv(partner)
    send(array, partner)
    return result
