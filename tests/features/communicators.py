"""A program that makes communicators in all ways, for real and for simulated ranks."""

PROGRAM = r"""
from mpi4py import MPI

def half():
    return comm.Split(rank % 2, -rank)

def grid(*extents):
    return comm.Create_cart(extents, [True] * len(extents))

WAYS = {
    "Split": half,
    "Split with equal keys": lambda: comm.Split(1, 0),
    "Split of some": lambda: comm.Split(0 if rank else MPI.UNDEFINED, rank),
    "Split_type": lambda: comm.Split_type(MPI.COMM_TYPE_SHARED, -rank),
    "Split_type of some": lambda: comm.Split_type(MPI.COMM_TYPE_SHARED if rank else MPI.UNDEFINED),
    "Dup": lambda: comm.Dup(),
    "Dup of one": lambda: MPI.COMM_SELF.Dup(),
    "Dup_with_info": lambda: comm.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda: comm.Clone(),
    "Idup": lambda: comm.Idup()[0],
    "Idup_with_info": lambda: comm.Idup_with_info(MPI.INFO_NULL)[0],
    "Create": lambda: comm.Create(comm.Get_group().Incl([2, 0])),
    "Create of all": lambda: comm.Create(comm.group.Incl([2, 0] if rank % 2 == 0 else [1, 3])),
    "Create_group": lambda: (
        comm.Create_group(comm.Get_group().Incl([2, 0, 1])) if rank < 3 else MPI.COMM_NULL
    ),
    "Create_group with a tag": lambda: (
        comm.Create_group(comm.group.Excl([0]), 7) if rank else MPI.COMM_NULL
    ),
    "Create_cart": lambda: comm.Create_cart([2, 2], [True, False]),
    "Create_cart of some": lambda: comm.Create_cart([3]),
    "Sub": lambda: grid(2, 2).Sub([False, True]),
    "Sub of no dimension": lambda: grid(2, 2).Sub([False, False]),
    "Dup of a grid": lambda: grid(4).Dup(),
    "Clone of a grid": lambda: grid(2, 2).Clone(),
    "Idup of a grid": lambda: grid(4).Idup()[0],
    "Split of a grid": lambda: grid(4).Split(0, -rank),
    "Dup of a half": lambda: half().Dup(),
    "Create of a half": lambda: (lambda own: own.Create(own.group.Incl([1])))(half()),
    "Create_group of a half": lambda: (lambda own: own.Create_group(own.group))(half()),
}

def described(make):
    first, second = make(), make()
    if first == MPI.COMM_NULL or second == MPI.COMM_NULL:
        return "null", first == second, make() == first
    me, n = first.rank, first.size
    posted = [one.irecv(None, (me - 1) % n, 5) for one in (second, first)]
    for one, text in ((first, "first"), (second, "second")):
        one.send(text, (me + 1) % n, 5)
    got = [request.wait() for request in posted]
    ranks = MPI.Group.Translate_ranks(first.group, list(range(n)), comm.group)
    moved = first.allreduce(rank), second.gather(rank, 0), first.Get_name() == comm.Get_name()
    extents = first.Get_topo() if first.Get_topology() == MPI.CART else None
    same = [one == other for one, other in ((first, second), (first, comm), (second, first))]
    kinds = first.Get_topology(), first.Is_intra(), first.is_inter
    first.Free()
    again = make()
    return me, n, got, list(ranks), moved, extents, same, kinds, again.allgather(rank)

def tried(make):
    try:
        return described(make)
    except Exception as error:
        return repr(error)

{name: tried(make) for name, make in WAYS.items()}
"""
