"""Right programs of the kinds that MPI courses teach: a number of ranks and a source by name.

None needs buffered sends, and no result depends on the order of messages.
"""

PROGRAMS = {
    "ping-pong": (2, """
        ball = np.zeros(4)
        for turn in range(3):
            if rank == 0:
                comm.Send(ball, 1, tag=turn); comm.Recv(ball, 1, tag=turn)
            else:
                comm.Recv(ball, 0, tag=turn); ball += 1; comm.Send(ball, 0, tag=turn)
        print(ball[0])
    """),
    "ring of even and odd ranks": (4, """
        right, left = (rank + 1) % size, (rank - 1) % size
        total = value = rank
        for _ in range(size - 1):
            if rank % 2 == 0:
                comm.send(value, right); value = comm.recv(source=left)
            else:
                received = comm.recv(source=left); comm.send(value, right); value = received
            total += value
        print(total)
    """),
    "token ring": (4, """
        if rank == 0:
            comm.send(["start"], 1)
            print(comm.recv(source=size - 1))
        else:
            comm.send([*comm.recv(source=rank - 1), rank], (rank + 1) % size)
    """),
    "halo exchange in one dimension": (3, """
        u = np.arange(6.0) + 10 * rank
        below = rank - 1 if rank else MPI.PROC_NULL
        above = rank + 1 if rank < size - 1 else MPI.PROC_NULL
        for _ in range(2):
            comm.Sendrecv(u[1:2], below, 0, u[-1:], above, 0)
            comm.Sendrecv(u[-2:-1], above, 1, u[:1], below, 1)
            u[1:-1] = (u[:-2] + u[2:]) / 2
        print(u.tolist())
    """),
    "halo exchange in two dimensions": (4, """
        grid = comm.Create_cart([2, 2], [True, True])
        u = np.full((4, 4), float(grid.rank))
        up, down = grid.Shift(0, 1)
        left, right = grid.Shift(1, 1)
        grid.Sendrecv(u[-2].copy(), down, 0, u[0], up, 0)
        grid.Sendrecv(u[1].copy(), up, 1, u[-1], down, 1)
        for to, whence, inner, outer in ((right, left, -2, 0), (left, right, 1, -1)):
            got = np.empty(4)
            grid.Sendrecv(u[:, inner].copy(), to, 2, got, whence, 2)
            u[:, outer] = got
        print(u.sum())
    """),
    "halo exchange without blocking": (3, """
        u = np.arange(4.0) + rank
        left, right = (rank - 1) % size, (rank + 1) % size
        for _ in range(2):
            ghosts = np.empty(2)
            waiting = [comm.Irecv(ghosts[:1], left, 0), comm.Irecv(ghosts[1:], right, 1),
                       comm.Isend(u[-1:].copy(), right, 0), comm.Isend(u[:1].copy(), left, 1)]
            inner = u[1:-1] * 2
            MPI.Request.Waitall(waiting)
            u = np.concatenate([ghosts[:1], inner, ghosts[1:]])
        print(u.tolist())
    """),
    "master and workers": (3, """
        status = MPI.Status()
        if rank == 0:
            tasks, found = [1, 2, 3], {}
            for worker in range(1, size):
                comm.send(tasks.pop(), worker, tag=1)
            working = size - 1
            while working:
                task, result = comm.recv(source=MPI.ANY_SOURCE, status=status)
                found[task] = result
                if tasks:
                    comm.send(tasks.pop(), status.source, tag=1)
                else:
                    comm.send(None, status.source, tag=2); working -= 1
            print(sorted(found.items()))
        else:
            while True:
                task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
                if status.tag == 2: break
                comm.send((task, task ** 2), 0)
    """),
    "workers that ask": (3, """
        if rank == 0:
            left, status = [3, 4], MPI.Status()
            for _ in range(len(left) + size - 1):
                comm.recv(source=MPI.ANY_SOURCE, tag=7, status=status)
                comm.send(left.pop() if left else 0, status.source)
            print(comm.reduce(0))
        else:
            mine = 0
            while True:
                comm.send("ready", 0, tag=7)
                if not (number := comm.recv(source=0)): break
                mine += number
            comm.reduce(mine)
    """),
    "pi by a reduction": (4, """
        steps = 40
        part = sum(4 / (1 + ((i + 0.5) / steps) ** 2) for i in range(rank, steps, size)) / steps
        pi = comm.reduce(part, op=MPI.SUM, root=0)
        if rank == 0: print(round(pi, 4))
    """),
    "Monte Carlo": (4, """
        draw = np.random.default_rng(rank)
        hits = int((draw.random((100, 2)) ** 2).sum(axis=1).__lt__(1).sum())
        print(4 * comm.allreduce(hits) / (100 * size))
    """),
    "trapezoids, collected by messages": (3, """
        xs = np.linspace(rank, rank + 1, 9)
        part = int(((xs[1:] + xs[:-1]) / 2).sum() * 8)
        if rank == 0:
            for source in range(1, size): part += comm.recv(source=source)
            print(part)
        else:
            comm.send(part, 0)
    """),
    "matrix times vector": (3, """
        a = np.arange(18.0).reshape(6, 3) if rank == 0 else None
        rows, x = np.empty((2, 3)), np.ones(3)
        comm.Scatter(a, rows, root=0); comm.Bcast(x, root=0)
        y = np.empty(6) if rank == 0 else None
        comm.Gather(rows @ x, y, root=0)
        if rank == 0: print(y.tolist())
    """),
    "matrix product of Cannon": (4, """
        grid = comm.Create_cart([2, 2], [True, True])
        i, j = grid.coords
        a, b, c = np.full((2, 2), i + 1.0), np.full((2, 2), j + 1.0), np.zeros((2, 2))
        def shift(block, axis, by):
            source, dest = grid.Shift(axis, by)
            grid.Sendrecv_replace(block, dest, 0, source, 0)
        if i: shift(a, 1, -i)
        if j: shift(b, 0, -j)
        for _ in range(2):
            c += a @ b
            shift(a, 1, -1); shift(b, 0, -1)
        print(c.tolist())
    """),
    "odd-even sort": (4, """
        mine = [7, 1, 5, 3][rank]
        for phase in range(size):
            other = rank + 1 if (rank + phase) % 2 == 0 else rank - 1
            if 0 <= other < size:
                theirs = comm.sendrecv(mine, other, source=other)
                mine = min(mine, theirs) if rank < other else max(mine, theirs)
        print(mine)
    """),
    "sample sort": (3, """
        values = sorted([(7 * i + 5 * rank) % 23 for i in range(6)])
        samples = sorted(comm.allreduce([values[2], values[4]]))
        cuts = samples[2::2][: size - 1]
        parts = [[v for v in values if sum(v >= c for c in cuts) == to] for to in range(size)]
        mine = sorted(v for part in comm.alltoall(parts) for v in part)
        print(comm.allreduce(mine) == sorted(comm.allreduce(values)))
    """),
    "prefix sum by doubling": (4, """
        total, step = rank + 1, 1
        while step < size:
            to = rank + step if rank + step < size else MPI.PROC_NULL
            whence = rank - step if rank >= step else MPI.PROC_NULL
            received = comm.sendrecv(total, to, source=whence)
            total += received or 0
            step *= 2
        assert total == comm.scan(rank + 1)
        print(total)
    """),
    "broadcast along a tree": (4, """
        value, step = ("news" if rank == 0 else None), 1
        while step < size:
            if rank < step and rank + step < size: comm.send(value, rank + step)
            elif step <= rank < 2 * step: value = comm.recv(source=rank - step)
            step *= 2
        print(value)
    """),
    "reduction along a tree": (4, """
        total, step = rank, 1
        while step < size:
            if rank % (2 * step):
                comm.send(total, rank - step); break
            if rank + step < size: total += comm.recv(source=rank + step)
            step *= 2
        if rank == 0: print(total)
    """),
    "allreduce by recursive doubling": (4, """
        total, step = rank + 1, 1
        while step < size:
            total += comm.sendrecv(total, rank ^ step, source=rank ^ step)
            step *= 2
        print(total)
    """),
    "Game of Life": (3, """
        rows = np.zeros((4, 6), int)
        if rank == 0: rows[1:3, 2] = 1
        if rank == 1: rows[1, 2] = 1
        up, down = (rank - 1) % size, (rank + 1) % size
        for _ in range(2):
            rows[0] = comm.sendrecv(rows[-2].copy(), down, 0, source=up, recvtag=0)
            rows[-1] = comm.sendrecv(rows[1].copy(), up, 1, source=down, recvtag=1)
            near = sum(np.roll(np.roll(rows, i, 0), j, 1)
                       for i in (-1, 0, 1) for j in (-1, 0, 1)) - rows
            rows[1:-1] = ((near == 3) | ((near == 2) & (rows == 1)))[1:-1]
        print(comm.allreduce(int(rows[1:-1].sum())))
    """),
    "pipeline": (3, """
        done = []
        for item in range(4):
            value = item if rank == 0 else comm.recv(source=rank - 1, tag=item)
            value = value * 2 + rank
            if rank < size - 1: comm.send(value, rank + 1, tag=item)
            else: done.append(value)
        if done: print(done)
    """),
    "pipeline whose sends overlap": (3, """
        request, found = MPI.REQUEST_NULL, []
        for item in range(3):
            value = item if rank == 0 else comm.recv(source=rank - 1)
            request.Wait()
            if rank < size - 1: request = comm.isend(value + 1, rank + 1)
            else: found.append(value)
        request.Wait()
        print(found)
    """),
    "dining philosophers with tags": (3, """
        # Rank 0 has the forks; the others take both at once and give them back.
        TAKE, GIVE = 1, 2
        if rank == 0:
            status, free, waiting, meals = MPI.Status(), True, [], 0
            for _ in range(2 * (size - 1)):
                comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
                if status.tag == TAKE: waiting.append(status.source)
                else: free = True
                if free and waiting:
                    comm.send("eat", waiting.pop(0)); free = False; meals += 1
            print(meals)
        else:
            comm.send(None, 0, tag=TAKE); comm.recv(source=0); comm.send(None, 0, tag=GIVE)
    """),
    "rows and columns by Split": (4, """
        row, column = comm.Split(rank // 2, rank), comm.Split(rank % 2, rank)
        print(row.allreduce(rank), column.allreduce(rank), row.bcast(rank), column.gather(rank))
        row.Free(); column.Free()
    """),
    "conjugate gradients": (3, """
        n = 6
        rows = np.array_split(np.arange(n), size)[rank]
        a = 3 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
        b, x = np.ones(n)[rows], np.zeros(len(rows))
        r = b.copy(); p = r.copy(); rr = comm.allreduce(float(r @ r))
        for _ in range(n):
            if rr < 1e-20: break
            whole = np.concatenate(comm.allgather(p))
            ap = a[rows] @ whole
            alpha = rr / comm.allreduce(float(p @ ap))
            x += alpha * p; r -= alpha * ap
            new = comm.allreduce(float(r @ r)); p = r + new / rr * p; rr = new
        print(np.round(x, 6).tolist())
    """),
    "Jacobi until nothing changes": (2, """
        u, change = np.zeros(4), 1.0
        if rank == 0: u[0] = 1.0
        other, steps = 1 - rank, 0
        while change > 0.05:
            edge = -2 if rank == 0 else 1
            ghost = comm.sendrecv(float(u[edge]), other, source=other)
            u[-1 if rank == 0 else 0] = ghost
            new = u.copy(); new[1:-1] = (u[:-2] + u[2:]) / 2
            change = comm.allreduce(float(abs(new - u).max()), op=MPI.MAX); u = new; steps += 1
        print(steps)
    """),
    "messages of unknown length": (2, """
        if rank == 0:
            comm.Send(np.arange(5.0), 1, tag=3)
        else:
            status = MPI.Status()
            comm.Probe(0, 3, status)
            data = np.empty(status.Get_count(MPI.DOUBLE)); comm.Recv(data, status.source, 3)
            print(data.sum())
    """),
    "one message from each, in any order": (3, """
        if rank == 0:
            status, found = MPI.Status(), [0] * size
            for _ in range(size - 1):
                comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                found[status.source] = comm.recv(source=status.source, tag=status.tag)
            print(found)
        else:
            comm.send(rank * 10, 0, tag=rank)
    """),
    "histogram": (3, """
        counts = np.bincount([(rank * i) % 4 for i in range(9)], minlength=4)
        total = np.zeros_like(counts)
        comm.Reduce(counts, total, op=MPI.SUM, root=0)
        if rank == 0: print(total.tolist())
    """),
    "transposition by alltoall": (3, """
        block = np.arange(3) + 10 * rank
        out = np.empty_like(block)
        comm.Alltoall(block, out)
        print(out.tolist())
    """),
    "largest value and its rank": (4, """
        print(comm.allreduce(([3, 9, 2, 9][rank], rank), op=MPI.MAXLOC))
    """),
}  # fmt: skip
