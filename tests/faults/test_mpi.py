"""Programs as courses write them, with ``MPI.COMM_WORLD``: what goes wrong in them is told."""

import re

import pytest

from tests.faults.notebook import KEPT

START = "from mpi4py import MPI\nimport numpy as np\nworld = MPI.COMM_WORLD\n"
#: What one rank does, or all but one, and the line that is blamed. More of mpi4py's calls, without
#: cells: MISSED in tests/mpi/ranks/communicator_suite.py, and WAITING in misuse_suite.py.
HANGS = {
    "a large Send": "if rank == 0: world.Send(np.ones(10**6), dest=1)",
    "Create_intercomm": (
        "half = world.Split(rank // 2)\n"
        "if rank: half.Create_intercomm(0, world, 0 if rank > 1 else 2)"
    ),
    "Spawn": "if rank: world.Spawn('true')",
    "Win.Create": "if rank: MPI.Win.Create(np.ones(3), comm=world)",
    "Win.Fence": "win = MPI.Win.Create(np.ones(3), comm=world)\nif rank: win.Fence()",
    "File.Write_all": (
        "file = MPI.File.Open(world, '{folder}/shared', MPI.MODE_CREATE | MPI.MODE_WRONLY)\n"
        "if rank: file.Write_all(np.ones(3))"
    ),
}


@pytest.mark.parametrize("source", HANGS.values(), ids=HANGS.keys())
def test_who_waits_in_mpi_for_a_rank_that_does_not_come_is_told(notebook, tmp_path, source):
    cell = notebook.on_ranks(START + source.replace("{folder}", str(tmp_path)))
    assert (cell.status, cell.error_name) == ("error", "CellFailed")
    assert "raised RankLeft" in cell.text
    assert re.search(r"rank \d finished In\[\d+\]", cell.text)
    cell.says(f"----> {len(f'{START}{source}'.splitlines()) + 1} {source.splitlines()[-1]}")
    assert notebook.on_ranks("kept").text == KEPT
    assert notebook.on_ranks("float(MPI.COMM_WORLD.allreduce(1))").text == "ranks 0–3 → 4.0\n"


def test_a_corrected_cell_does_not_receive_the_message_of_the_failed_one(notebook):
    failed = notebook.on_ranks(
        f"{START}twin = world.Dup()\n"
        "if rank == 0:\n    world.send('old', 1)\nelif rank == 1:\n    raise ValueError('wrong')"
    )
    assert failed.status == "error"
    corrected = "world.send('new', 1) if rank == 0 else world.recv() if rank == 1 else None"
    notebook.on_ranks(corrected).says("rank 1 → 'new'")
    stale = notebook.on_ranks("twin.isend('old', 0)")
    stale.says("StaleHandle: a communicator from Split(), Dup() or Create_…() lasts until an error")


CLASSES = """
import enum
class V:
    made = 0
    def __init__(self, x):
        V.made += 1
        self.x = x
    def __add__(self, other):
        return V(self.x + other.x) if isinstance(other, V) else NotImplemented
class Color(enum.Enum):
    RED = 1
class Mine(Exception): pass
def f(): return rank
"""
SENT = """
def own(value):
    match value:
        case {"v": V(x=int()), Color.RED: Mine(), "f": g}: return g is f
left, right = (rank - 1) % size, (rank + 1) % size
value = {"v": V(rank), Color.RED: Mine("no"), "f": f}
posted = comm.isend(value, right, 1)
received = [
    comm.bcast(value), comm.scatter([value] * size), broadcast_object(value, root=1),
    *comm.allgather(value), *comm.alltoall([value] * size), *allgather_object(value),
    *(comm.gather(value) or []), comm.sendrecv(value, right, 0, None, left, 0),
    comm.irecv(None, left, 1).wait(),
]
posted.wait()
sums = comm.allreduce(V(rank)), comm.reduce(V(rank)) or V(0), comm.scan(V(rank))
all(map(own, received)) and all(type(one) is V for one in sums), sums[0].x
"""


def test_objects_of_classes_of_cells_are_the_receivers_own(notebook):
    notebook.on_ranks(f"for _ in range(rank): pass\n{CLASSES}")
    assert notebook.on_ranks(SENT).text == "ranks 0–3 → (True, 6)\n"
    notebook.on_ranks("if rank == 0:\n    class V:\n        def __init__(self, x): self.x = -x\n")
    cell = notebook.on_ranks("v = comm.bcast(V(1))\ntype(v) is V, v.x")
    assert cell.text == "rank 0    → (True, -1)\nranks 1–3 → (False, -1)\n"
    cell = notebook.on_ranks(
        "if rank == 0:\n    class Only: pass\n"
        "    a, b = comm.bcast(Only()), comm.bcast(Only)\n"
        "else: a, b = comm.bcast(None), comm.bcast(None)\n"
        "type(a) is b, [type(one) is b for one in comm.allgather(a)]"
    )
    assert cell.text == "ranks 0–3 → (True, [True, True, True, True])\n"


def test_objects_of_simulated_ranks_are_the_receivers_own(notebook):
    cell = notebook.on_ranks(f"{CLASSES}{SENT}", "-n 4 --simulate")
    assert cell.text == "ranks 0–3 → (True, 6)\n"


def test_the_window_of_a_rank_that_runs_no_cell_is_used(notebook):
    notebook.on_ranks(
        f"{START}counter = np.zeros(1, 'l') if rank == 0 else None\n"
        "window = MPI.Win.Create(counter, comm=world)\n"
        "drawn, one = np.zeros(1, 'l'), np.ones(1, 'l')"
    )
    draws = (
        "for _ in range(3):\n"
        "    window.Lock(0)\n    window.Fetch_and_op(one, drawn, 0)\n    window.Unlock(0)\n"
        "window.Lock_all()\nwindow.Accumulate(one, 0)\nwindow.Flush(0)\n"
        "window.Get(drawn, 0)\nwindow.Unlock_all()\n"
        "int(drawn[0]) > 3"
    )
    cell = notebook.on_ranks(draws, "-r 1-3")
    assert cell.text == "ranks 1–3 → True\n"
    assert notebook.on_ranks("window.Free()\nint(counter[0]) if rank == 0 else 12").text == (
        "ranks 0–3 → 12\n"
    )


def test_what_goes_wrong_on_duplicates_and_in_mpis_own_calls_is_told(notebook):
    notebook.on_ranks(
        f"{START}twin = world.Dup()\n"
        "twin.Allreduce(np.ones(2), np.empty(2)) if rank else twin.Bcast(np.ones(2))"
    ).says("CollectiveMismatch: a collective needs the same operation on every rank")
    assert notebook.on_ranks("kept").text == KEPT
    # After its own, Open MPI ends a rank at its next call, and mpiexec all of them.
    cell = notebook.on_ranks("from mpi4py.MPI import Finalize\nFinalize()").ok()
    assert cell.text.startswith("ranks 0–3 · MPI.Finalize() has no effect here, because the next")
    assert notebook.on_ranks("MPI.Init()\nMPI.Init_thread() == MPI.Query_thread()").text == (
        "ranks 0–3 → True\n"
    )
    assert notebook.on_ranks("MPI.COMM_WORLD.Dup().allreduce(1)").text == "ranks 0–3 → 4\n"


def test_mpi_is_there_without_an_import_and_with_what_mpi4py_builds_on_it(notebook):
    cell = notebook.on_ranks(
        "from mpi4py import MPI as imported\n"
        "MPI is imported, MPI.COMM_WORLD is comm, MPI.COMM_SELF.size, comm.Get_name()"
    )
    assert cell.text == "ranks 0–3 → (True, True, 1, 'MPI_COMM_WORLD')\n"
    cell = notebook.on_ranks(
        "from mpi4py.futures import MPICommExecutor\nfrom mpi4py.util import pkl5\n"
        "with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:\n"
        "    squares = list(executor.map(pow, [1, 2, 3], [2] * 3)) if executor else None\n"
        "pair = comm.Create_group(comm.group.Incl([0, 1]))\n"
        "squares, pkl5.Intracomm(comm).bcast(rank, 1), pair.allreduce(1) if pair else 0"
    )
    assert cell.text == (
        "rank 0    → ([1, 4, 9], 1, 2)\nrank 1    → (None, 1, 2)\nranks 2–3 → (None, 1, 0)\n"
    )
    cell = notebook.on_ranks(
        f"{START}port = world.bcast(MPI.Open_port() if rank == 0 else None)\n"
        "if rank < 2:\n"
        "    met = MPI.COMM_SELF.Connect(port) if rank else MPI.COMM_SELF.Accept(port)\n"
        "    said = met.sendrecv(rank, 0, source=0)\n"
        "    met.Disconnect()\n"
        "    print('heard', said)"
    )
    assert cell.text == "rank 0 │ heard 1\nrank 1 │ heard 0\n"


@pytest.mark.replaces
@pytest.mark.parametrize("communicator", ["MPI.COMM_WORLD", "comm.Dup()"])
def test_an_abort_ends_its_rank_alone_and_that_is_replaced(notebook, communicator):
    """The launcher would take the end of the whole job for what was asked for."""
    notebook.on_ranks("kept = 10 * rank")
    made = f"made = {communicator}"
    notebook.on_ranks(f"{made}\nif rank == 1:\n    made.Abort(7)\nbarrier()").fails(
        "RankDied"
    ).says("ended with exit code 7", "ranks 0, 2–3 kept theirs")
    assert notebook.on_ranks("kept", "-r 0,2-3").text == "rank 0 → 0\nrank 2 → 20\nrank 3 → 30\n"
    notebook.note_files()


CHILD = "from mpi4py import MPI; MPI.Comm.Get_parent().send('here', 0)"


def test_processes_that_ranks_without_tcp_could_never_reach_are_not_spawned(notebook):
    notebook.on_ranks("kept = 10 * rank")
    cell = notebook.on_ranks(f"{START}MPI.COMM_SELF.Spawn('true')")
    assert cell.error_name == "CellFailed"
    assert "raised UsageError" in cell.text
    assert "found OMPI_MCA_btl=self,sm, with which no rank listens" in cell.text
    assert "%env OMPI_MCA_btl=self,sm,tcp  and  %distributed restart" in cell.text
    assert notebook.on_ranks("kept").text == KEPT


def test_a_pool_whose_processes_could_never_be_reached_is_refused(notebook):
    cell = notebook.on_ranks(
        "from mpi4py.futures import MPIPoolExecutor\nMPIPoolExecutor(1).submit(abs, -1).result()"
    )
    cell.fails("CellFailed", "at line 3").says("comm.Spawn needs tcp", "MPICommExecutor(comm, 0)")


def test_an_exception_in_an_op_of_the_user_fails_the_cell_and_keeps_the_ranks(notebook):
    notebook.on_ranks("kept = 10 * rank")
    notebook.on_ranks(
        f"{START}import numpy as np\n"
        "def broken(first, second, datatype):\n    raise ArithmeticError('of mine')\n"
        "op = MPI.Op.Create(broken, commute=True)\n"
        "world.Allreduce(np.ones(2), np.empty(2), op)"
    ).fails("CellFailed").says("raised ArithmeticError", "    raise ArithmeticError('of mine')")
    assert notebook.on_ranks("kept").text == KEPT


def test_what_is_spawned_is_reached_once_the_ranks_have_tcp(notebook):
    notebook.run("%env OMPI_MCA_btl=self,sm,tcp\n%distributed restart -n 1").ok()
    cell = notebook.on_ranks(
        f"import sys\n{START}"
        f"spawned = MPI.COMM_SELF.Spawn(sys.executable, ['-c', {CHILD!r}])\n"
        "spawned.recv(source=0)"
    )
    notebook.run("import os; del os.environ['OMPI_MCA_btl']")
    assert cell.text.endswith("rank 0 → 'here'\n"), cell.text
