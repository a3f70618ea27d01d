"""Sixty solutions of students, thirty of them right. Run as a cell, on any number of ranks.

`wrong` names the text that the student reads, and the sizes at which the solution is right by luck.
"""

import sys

import numpy as np

from allranks.grading import collective, expect, line, ring, tree
from allranks.grading.patterns import depth
from allranks.lessons.on_ranks import CellLink
from allranks.lessons.ring import ring_allreduce

SOLUTIONS = {}
RIGHT, LEFT = (rank + 1) % size, (rank - 1) % size
ARRAY = np.arange(1003.0) + rank
EVERY = [np.arange(1003.0) + r for r in range(size)]
NBYTES = ARRAY.nbytes


def whole(result):
    return all(np.array_equal(a, b) for a, b in zip(result, EVERY, strict=True))


def total(result):
    return np.array_equal(result, sum(EVERY))


#: For each exercise: the expectation, and the test of the result.
EXERCISES = {
    "allgather": (
        lambda: expect(
            ring(rounds=size - 1),
            bytes_per_rank=(size - 1) * NBYTES,
            no_rank_above=(size - 1) * NBYTES,
        ),
        whole,
    ),
    "allreduce": (
        lambda: expect(
            ring(rounds=2 * (size - 1)),
            bytes_per_rank=2 * (size - 1) / size * NBYTES,
            no_rank_above=2 * NBYTES,
        ),
        total,
    ),
    "tree": (lambda: expect(tree(), no_rank_above=(depth(size)) * NBYTES), total),
    "scan": (lambda: expect(line()), lambda result: np.array_equal(result, sum(EVERY[: rank + 1]))),
    "sum": (lambda: expect(collective("allreduce")), total),
    "halo": (
        lambda: expect(longest_chain=2),
        lambda result: all(
            there is None if not 0 <= r < size else np.array_equal(there, EVERY[r])
            for there, r in zip(result, (rank - 1, rank + 1), strict=True)
        ),
    ),
}


def right(exercise):
    def add(function):
        SOLUTIONS[function.__name__] = exercise, function, "", ()
        return function

    return add


def wrong(exercise, text, by_luck=()):
    def add(function):
        SOLUTIONS[function.__name__] = exercise, function, text, by_luck
        return function

    return add


def judged(name):
    """Returns why a solution is wrong, as the student reads it; empty if it is right."""
    exercise, function, *_ = SOLUTIONS[name]
    expectation, test = EXERCISES[exercise]
    try:
        with expectation():
            result = function(ARRAY.copy())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(comm.allgather(test(result))) else "wrong result"


def passed_round(exchange):
    """Makes an allgather of a function that sends an array to the right and returns the left's."""

    def allgather(array):
        found, piece = [None] * size, array
        found[rank] = array
        for step in range(1, size):
            piece = exchange(piece)
            found[(rank - step) % size] = piece
        return found

    return allgather


def reduced_round(exchange):
    """Makes an allreduce in pieces of a function that exchanges pieces."""

    def allreduce(array):
        pieces = np.array_split(array, size)
        for step in range(size - 1):
            pieces[(rank - step - 1) % size] += exchange(
                pieces[(rank - step) % size], pieces[(rank - step - 1) % size].size
            )
        for step in range(size - 1):
            pieces[(rank - step) % size] = exchange(
                pieces[(rank + 1 - step) % size], pieces[(rank - step) % size].size
            )
        return np.concatenate(pieces)

    return allreduce


# allgather


@right("allgather")
def sendrecv(array):
    return passed_round(lambda piece: comm.sendrecv(piece, RIGHT, source=LEFT))(array)


@right("allgather")
def upper_sendrecv(array):
    def exchange(piece):
        comm.Sendrecv(piece, RIGHT, 0, came := np.empty_like(piece), LEFT, 0)
        return came

    return passed_round(exchange)(array)


@right("allgather")
def isend_before_recv(array):
    def exchange(piece):
        request = comm.isend(piece, dest=RIGHT)
        came = comm.recv(source=LEFT)
        request.wait()
        return came

    return passed_round(exchange)(array)


@right("allgather")
def both_posted(array):
    def exchange(piece):
        came = np.empty_like(piece)
        MPI.Request.Waitall([comm.Irecv(came, LEFT), comm.Isend(piece, RIGHT)])
        return came

    return passed_round(exchange)(array)


@right("allgather")
def even_ranks_send_first(array):
    def exchange(piece):
        if rank % 2 == 0:
            send(piece, RIGHT)
            return recv(LEFT)
        came = recv(LEFT)
        send(piece, RIGHT)
        return came

    return passed_round(exchange)(array)


@right("allgather")
def rank_0_receives_first(array):
    def exchange(piece):
        came = np.empty_like(piece)
        if rank:
            comm.Send([piece, MPI.DOUBLE], dest=RIGHT)
            comm.Recv([came, MPI.DOUBLE], source=LEFT)
        else:
            comm.Recv([came, MPI.DOUBLE], source=LEFT)
            comm.Send([piece, MPI.DOUBLE], dest=RIGHT)
        return came

    return passed_round(exchange)(array)


@right("allgather")
def cartesian(array):
    circle = comm.Create_cart([size], periods=[True])
    left, right = circle.Shift(0, 1)
    exchange = passed_round(lambda piece: circle.sendrecv(piece, dest=right, source=left))
    return exchange(array)


@right("allgather")
def to_the_left(array):
    found, piece = [None] * size, array
    found[rank] = array
    for step in range(1, size):
        piece = comm.sendrecv(piece, dest=LEFT, source=RIGHT)
        found[(rank + step) % size] = piece
    return found


@right("allgather")
def replaced_in_place(array):
    def exchange(piece):
        piece = piece.copy()
        comm.Sendrecv_replace(piece, dest=RIGHT, source=LEFT)
        return piece

    return passed_round(exchange)(array)


@right("allgather")
def posted_receive_then_send(array):
    own = comm.Dup()

    def exchange(piece):
        came = np.empty_like(piece)
        request = own.Irecv(came, source=LEFT)
        own.Send(piece, dest=RIGHT)
        request.Wait()
        return came

    return passed_round(exchange)(array)


@wrong("allgather", "called broadcast, gather; only send and receive are allowed here")
def gathers_at_root_and_broadcasts(array):
    return comm.bcast(comm.gather(array, root=0), root=0)


@wrong("allgather", "all messages begin or end at rank 0", {2})
def gathers_at_root_by_hand(array):
    if rank == 0:
        found = [array] + [comm.recv(source=r) for r in range(1, size)]
        for r in range(1, size):
            for part in found[:r] + found[r + 1 :]:
                comm.send(part, dest=r)
        return found
    comm.send(array, dest=0)
    found = [comm.recv(source=0) for _ in range(size - 1)]
    return found[:rank] + [array] + found[rank:]


@wrong("allgather", "called allgather")
def one_allgather(array):
    return comm.allgather(array)


@wrong("allgather", "called allgather")
def our_allgather(array):
    return list(allgather(array[np.newaxis]))


@wrong("allgather", "ranks that wait for each other")
def every_rank_sends_first(array):
    def exchange(piece):
        came = np.empty_like(piece)
        comm.Send(piece, dest=RIGHT)
        comm.Recv(came, source=LEFT)
        return came

    return passed_round(exchange)(array)


@wrong("allgather", "Short messages fit into a buffer")
def every_rank_sends_objects_first(array):
    def exchange(piece):
        comm.send(piece, dest=RIGHT)
        return comm.recv(source=LEFT)

    return passed_round(exchange)(array)


@wrong("allgather", "ranks that wait for each other")
def every_rank_sends_first_with_ours(array):
    def exchange(piece):
        send(piece, RIGHT)
        return recv(LEFT)

    return passed_round(exchange)(array)


@wrong("allgather", "came = comm.recv(source=LEFT)  # first")
def every_rank_receives_first(array):
    def exchange(piece):
        came = comm.recv(source=LEFT)  # first
        comm.send(piece, dest=RIGHT)
        return came

    return passed_round(exchange)(array)


@wrong("allgather", "sends", {2})
def to_all_others_at_once(array):
    requests = [comm.isend(array, dest=r) for r in range(size) if r != rank]
    found = [array if r == rank else comm.recv(source=r) for r in range(size)]
    MPI.Request.waitall(requests)
    return found


@wrong("allgather", "a ring: each rank sends")
def one_round_too_many(array):
    found = passed_round(lambda piece: comm.sendrecv(piece, RIGHT, source=LEFT))(array)
    comm.sendrecv(array, RIGHT, source=LEFT)
    return found


@wrong("allgather", "sent by each rank", {2})
def sends_all_that_it_has(array):
    have = {rank: array}
    for _ in range(size - 1):
        have |= comm.sendrecv(have, RIGHT, source=LEFT)
    return [have[r] for r in range(size)]


@wrong("allgather", "wrong result", {2})
def counts_in_the_wrong_direction(array):
    found, piece = [None] * size, array
    found[rank] = array
    for step in range(1, size):
        piece = comm.sendrecv(piece, RIGHT, source=LEFT)
        found[(rank + step) % size] = piece
    return found


@wrong("allgather", "a ring: each rank sends")
def one_round_too_few(array):
    found, piece = [array] * size, array
    for step in range(1, size - 1):
        piece = comm.sendrecv(piece, RIGHT, source=LEFT)
        found[(rank - step) % size] = piece
    return found


@wrong("allgather", "Call wait() on its request")
def does_not_wait(array):
    def exchange(piece):
        came = np.zeros_like(piece)
        comm.Irecv(came, source=LEFT)
        comm.Isend(piece, dest=RIGHT).Free()
        return came

    return passed_round(exchange)(array)


@wrong("allgather", "never received a message of 16.1 kB")
def sends_one_more(array):
    found = passed_round(lambda piece: comm.sendrecv(piece, RIGHT, source=LEFT))(array)
    comm.isend(np.zeros(2000), dest=RIGHT)
    return found


@wrong("allgather", "ranks that wait for each other")
def expects_another_tag(array):
    def exchange(piece):
        request = comm.isend(piece, dest=RIGHT, tag=1)
        came = comm.recv(source=LEFT, tag=2)
        request.wait()
        return came

    return passed_round(exchange)(array)


@wrong("allgather", "sent a message before the one to pass on had been received", {2})
def sends_its_own_in_each_round(array):
    requests = [comm.isend(array, dest=RIGHT) for _ in range(size - 1)]
    found = [array] * size
    for step in range(1, size):
        found[(rank - step) % size] = comm.recv(source=LEFT)
    MPI.Request.waitall(requests)
    return found


# allreduce


@right("allreduce")
def pieces_by_sendrecv(array):
    return reduced_round(lambda piece, _: comm.sendrecv(piece, RIGHT, source=LEFT))(array)


@right("allreduce")
def pieces_by_upper_sendrecv(array):
    def exchange(piece, count):
        comm.Sendrecv(piece, dest=RIGHT, recvbuf=(came := np.empty(count)), source=LEFT)
        return came

    return reduced_round(exchange)(array)


@right("allreduce")
def pieces_by_isend(array):
    def exchange(piece, count):
        came = np.empty(count)
        request = comm.Isend(piece, dest=RIGHT)
        comm.Recv(came, source=LEFT)
        request.Wait()
        return came

    return reduced_round(exchange)(array)


@right("allreduce")
def pieces_by_ours(array):
    def exchange(piece, _):
        if rank == 0:
            send(piece, RIGHT)
            return recv(LEFT)
        came = recv(LEFT)
        send(piece, RIGHT)
        return came

    return reduced_round(exchange)(array)


@right("allreduce")
def the_ring_of_the_lessons(array):
    return ring_allreduce(array, CellLink(size))


@right("allreduce")
def pieces_by_posted_receive(array):
    def exchange(piece, count):
        came = np.empty(count)
        request = comm.Irecv(came, source=LEFT)
        comm.Send(piece, dest=RIGHT)
        request.Wait()
        return came

    return reduced_round(exchange)(array)


@right("allreduce")
def pieces_in_turns(array):
    def exchange(piece, count):
        came = np.empty(count)
        for turn in (0, 1):
            if rank % 2 == turn:
                comm.Ssend(piece, dest=RIGHT)
            else:
                comm.Recv(came, source=LEFT)
        return came

    if size % 2:  # then two neighbours have the same turn
        return pieces_by_isend(array)
    return reduced_round(exchange)(array)


@right("allreduce")
def pieces_by_irecv(array):
    def exchange(piece, _):
        requests = [comm.irecv(source=LEFT), comm.isend(piece, dest=RIGHT)]
        return MPI.Request.waitall(requests)[0]

    return reduced_round(exchange)(array)


@wrong("allreduce", "called broadcast, reduce")
def reduces_at_root(array):
    result = np.empty_like(array)
    comm.Reduce(array, result, root=0)
    comm.Bcast(result, root=0)
    return result


@wrong("allreduce", "a ring: each rank sends")
def adds_whole_arrays_around(array):
    result, piece = array.copy(), array
    for _ in range(size - 1):
        piece = comm.sendrecv(piece, RIGHT, source=LEFT)
        result += piece
    return result


@wrong("allreduce", "sent by each rank")
def whole_arrays_in_all_rounds(array):
    result, piece = array.copy(), array
    for step in range(2 * (size - 1)):
        piece = comm.sendrecv(piece, RIGHT, source=LEFT)
        if step < size - 1:
            result += piece
    return result


@wrong("allreduce", "ranks that wait for each other")
def pieces_sent_first(array):
    def exchange(piece, count):
        came = np.empty(count)
        comm.Send(piece, dest=RIGHT)
        comm.Recv(came, source=LEFT)
        return came

    return reduced_round(exchange)(array)


@wrong("allreduce", "IndexError")
def fails_on_the_last_rank(array):
    pieces = np.array_split(array, size - (rank == size - 1))
    result = [comm.sendrecv(pieces[step], RIGHT, source=LEFT) for step in range(size)]
    return np.concatenate(result)


@wrong("allreduce", "SystemExit")
def exits(array):
    sys.exit(0)


@wrong("allreduce", "ranks that wait for each other")
def waits_for_its_isend_first(array):
    def exchange(piece, _):
        comm.isend(piece, dest=RIGHT).wait()
        return comm.recv(source=LEFT)

    return reduced_round(exchange)(array)


# tree


@right("tree")
def heap(array):
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    for child in children:
        array += recv(child)
    if rank:
        send(array, (rank - 1) // 2)
        array = recv((rank - 1) // 2)
    for child in children:
        send(array, child)
    return array


def binomial(array, give, take):
    mask = 1
    while mask < size and not rank & mask:
        if rank + mask < size:
            array = array + take(rank + mask)
        mask *= 2
    if rank:
        give(array, rank - mask)
        array = take(rank - mask)
    while mask > 1:
        mask //= 2
        if rank + mask < size:
            give(array, rank + mask)
    return array


@right("tree")
def binomial_of_objects(array):
    return binomial(array, comm.send, lambda source: comm.recv(source=source))


@right("tree")
def binomial_of_buffers(array):
    def take(source):
        comm.Recv(came := np.empty_like(array), source=source)
        return came

    return binomial(array, comm.Send, take)


@right("tree")
def heap_of_posted_receives(array):
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    parts = [np.empty_like(array) for _ in children]
    MPI.Request.Waitall(
        [comm.Irecv(part, child) for part, child in zip(parts, children, strict=True)]
    )
    result = sum(parts, array)
    if rank:
        comm.Send(result, (rank - 1) // 2)
        comm.Recv(result, (rank - 1) // 2)
    MPI.Request.Waitall([comm.Isend(result, child) for child in children])
    return result


@wrong("tree", "rank 0 received", {2, 3})
def star(array):
    if rank == 0:
        for r in range(1, size):
            array += comm.recv(source=r)
        for r in range(1, size):
            comm.send(array, dest=r)
        return array
    comm.send(array, dest=0)
    return comm.recv(source=0)


@wrong("tree", "wait for each other", {2, 3})
def there_and_back(array):
    if rank < size - 1:
        array += comm.recv(source=rank + 1)
    if rank:
        comm.send(array, dest=rank - 1)
        array = comm.recv(source=rank - 1)
    if rank < size - 1:
        comm.send(array, dest=rank + 1)
    return array


@wrong("tree", "called allreduce")
def no_tree(array):
    return comm.allreduce(array)


# scan


@right("scan")
def passes_on(array):
    if rank:
        array += recv(rank - 1)
    if rank < size - 1:
        send(array, rank + 1)
    return array


@right("scan")
def passes_buffers_on(array):
    if rank:
        comm.Recv(came := np.empty_like(array), source=rank - 1)
        array += came
    if rank < size - 1:
        comm.Send(array, dest=rank + 1)
    return array


@right("scan")
def with_null_processes(array):
    below = rank - 1 if rank else MPI.PROC_NULL
    above = rank + 1 if rank < size - 1 else MPI.PROC_NULL
    came = np.zeros_like(array)
    comm.Recv(came, source=below)
    comm.Send(array + came, dest=above)
    return array + came


@right("scan")
def from_any_source(array):
    if rank:
        array += comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    if rank < size - 1:
        comm.isend(array, dest=rank + 1, tag=7).wait()
    return array


@wrong("scan", "a line: each rank but the last sends 1 message", {2})
def to_all_above(array):
    requests = [comm.isend(array, dest=r) for r in range(rank + 1, size)]
    result = sum((comm.recv(source=r) for r in range(rank)), array)
    MPI.Request.waitall(requests)
    return result


# One collective, and the neighbours' arrays.


@right("sum")
def our_allreduce(array):
    return allreduce(array, op=Sum)


@right("sum")
def allreduce_of_buffers(array):
    comm.Allreduce(MPI.IN_PLACE, array)
    return array


@right("sum")
def posted_allreduce(array):
    result = np.empty_like(array)
    comm.Iallreduce(array, result).Wait()
    return result


@wrong("sum", "called allreduce (2 times)")
def two_allreduces(array):
    half = array.size // 2
    return np.concatenate([allreduce(array[:half], op=Sum), allreduce(array[half:], op=Sum)])


@right("halo")
def halo_by_sendrecv(array):
    below = rank - 1 if rank else MPI.PROC_NULL
    above = rank + 1 if rank < size - 1 else MPI.PROC_NULL
    from_below = comm.sendrecv(array, dest=above, source=below)
    return from_below, comm.sendrecv(array, dest=below, source=above)


@wrong("halo", "ranks that wait for each other")
def halo_that_sends_first(array):
    neighbours = [r for r in (rank - 1, rank + 1) if 0 <= r < size]
    for r in neighbours:
        comm.send(array, dest=r)
    return [comm.recv(source=r) if r in neighbours else None for r in (rank - 1, rank + 1)]
