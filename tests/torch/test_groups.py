"""torch's process groups, from cell to cell."""

from __future__ import annotations

import pytest

IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import nn\nkept = []"
AGAIN = """
for _ in range(3):
    dist.init_process_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    kept.append(model)
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        import time
        time.sleep(0.1)
    dist.destroy_process_group()
"""


def test_groups_follow_each_other_while_their_models_stay(ranks):
    """A model keeps its group's store alive, and rank 0 may be late to close the last one."""
    assert ranks.on_ranks(IMPORTS).status == "ok"
    for _ in range(2):
        cell = ranks.on_ranks(AGAIN)
        assert cell.status == "ok", cell.text
    assert ranks.on_ranks("len(kept)").text == "ranks 0–2 → 6\n"


COUNTED = """
from unittest.mock import patch

stores = []

def sums(times):
    for _ in range(times):
        dist.init_process_group()
        dist.all_reduce(t := torch.ones(1))
        dist.distributed_c10d._get_default_store().set(f"rank {rank}", "here")
        dist.destroy_process_group()
    return int(t)

def counted(make):
    def __init__(self, *arguments, **options):
        stores.append(self)
        make(self, *arguments, **options)
    return __init__

sums(1)
with patch.object(dist.TCPStore, "__init__", counted(dist.TCPStore.__init__)):
    found = sums(5)
found, len(stores)
"""
SHUT = """
import os, socket
import psutil

def shut():
    at = int(os.environ["MASTER_PORT"])
    links = [link for link in psutil.Process().net_connections("tcp") if link.raddr]
    for link in links:
        if link.raddr.port == at:
            with socket.socket(fileno=os.dup(link.fd)) as own:
                own.shutdown(socket.SHUT_RDWR)
    return any(link.raddr.port == at for link in links)

sums(1)
was_open = shut() if rank == 1 else None
sums(2), was_open
"""


def test_a_later_group_makes_no_connection_to_the_store(ranks):
    """At each one, C++ asks a name server for the name of 127.0.0.1, which may not answer."""
    assert ranks.on_ranks(IMPORTS).status == "ok"
    assert ranks.on_ranks(COUNTED).text == "ranks 0–2 → (3, 0)\n"


def test_the_connection_to_the_store_is_made_again_where_it_was_ended_on_one_rank(ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    assert ranks.on_ranks(COUNTED).status == "ok"
    found = ranks.on_ranks(SHUT).text
    assert found == "ranks 0, 2 → (3, None)\nrank 1     → (3, True)\n"
    assert ranks.on_ranks(COUNTED).text == "ranks 0–2 → (3, 0)\n"


SUM = "t = torch.ones(1)\ndist.init_process_group()\ndist.all_reduce(t)\nint(t)"
FAILS_ON_ONE = """
from unittest.mock import patch

def fails(name, make, *arguments):
    with patch(f"torch.distributed.distributed_c10d.{name}", side_effect=OSError("no mesh")):
        try:
            make(*arguments)
        except OSError:
            print("failed")
"""
FIRST_GROUP = f"""{FAILS_ON_ONE}
if rank == 1:
    fails("rendezvous", dist.init_process_group)
t = torch.ones(1)
dist.init_process_group()
dist.all_reduce(t)
int(t), dist.group.WORLD.group_name
"""
FURTHER_GROUP = f"""{FAILS_ON_ONE}
if rank == 1:
    fails("_new_process_group_helper", dist.new_group)
part = dist.new_group([0, 1, 2])
t.fill_(1)
dist.all_reduce(t, group=part)
dist.destroy_process_group()
int(t)
"""


def check_groups_after_a_failure_on_one_rank(ranks):
    """torch names groups by a counter, which only that rank has advanced."""
    assert ranks.on_ranks(IMPORTS).status == "ok"
    cell = ranks.on_ranks(FIRST_GROUP, "--timeout 60", timeout=90)
    assert cell.text == "rank 1    │ failed\nranks 0–2 → (3, '0')\n"
    cell = ranks.on_ranks(FURTHER_GROUP, "--timeout 60", timeout=90)
    assert cell.text == "rank 1    │ failed\nranks 0–2 → 3\n"


def test_groups_are_made_after_one_rank_has_failed_to_make_one(ranks):
    check_groups_after_a_failure_on_one_rank(ranks)


def test_a_tensor_that_is_not_in_host_memory_is_refused_with_what_to_type(ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    ranks.on_ranks("dist.is_initialized() or dist.init_process_group()")
    cell = ranks.on_ranks("dist.all_reduce(torch.ones(2, device='meta'))")
    assert ranks.on_ranks("dist.destroy_process_group()").status == "ok"
    assert "No backend type associated with device type meta. allranks moves" in cell.text
    assert "--torch allranks, to try its groups on GPUs, or %distributed start" in cell.text


CLOSED = (
    "torch's process groups are closed on all ranks, as a rank of theirs has died: call "
    "init_process_group() again"
)
DEATHS = {"a rank waits for it": "dist.all_reduce(t)", "the others have ended": ""}


@pytest.mark.replaces
@pytest.mark.covers("error", "torch on allranks")
@pytest.mark.covers("death", "torch on allranks")
@pytest.mark.parametrize("wait", DEATHS.values(), ids=DEATHS.keys())
def test_a_rank_that_dies_takes_its_groups_along(ranks, wait):
    """The one in its place has none, and could make none with ranks that have."""
    assert ranks.on_ranks(IMPORTS).status == "ok"
    assert ranks.on_ranks(SUM).text == "ranks 0–2 → 3\n"
    dying = ranks.on_ranks(f"import os\nif rank == 1: os._exit(3)\n{wait}")
    assert dying.text.count(CLOSED) == 1
    if wait:
        assert "ranks 0, 2 were waiting at line 4: dist.all_reduce(t)" in dying.text
        assert "needs all of ranks 0–2: rank 1 ended with exit code 3." in dying.text
    assert "gloo" not in dying.text
    assert ranks.on_ranks(f"{IMPORTS}\n{SUM}").text == "ranks 0–2 → 3\n"
    left = ranks.on_ranks("if rank == 2: raise ValueError\ndist.all_reduce(t)")
    assert "ranks 0–1 were waiting" in left.text
    # MPI's own connections to the new rank are still there.
    again = f"dist.destroy_process_group()\n{SUM}\ndist.destroy_process_group()"
    following = ranks.on_ranks(f"{again}\ncomm.allreduce(rank)")
    assert following.text == "ranks 0–2 → 3\n"


USUAL = """
import os
from torch.distributed.device_mesh import init_device_mesh

where = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(where)
device = torch.device("cuda", where) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
model = nn.Linear(2, 1).to(device)
ids = [where] if device.type == "cuda" else None
model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
model(torch.ones(1, 2, device=device)).sum().backward()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
if where == 0:
    print("the first of", os.environ["LOCAL_WORLD_SIZE"])
dist.barrier()
dist.destroy_process_group()
mesh.size()
"""


def test_the_lines_that_choose_a_gpu_choose_the_cpu_where_there_is_none(ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    cell = ranks.on_ranks(USUAL)
    assert cell.text == "rank 0    │ the first of 3\nranks 0–2 → 3\n"


FORKED = """
import multiprocessing, os, socket, tempfile
where = f"file://{tempfile.mkdtemp()}/store" if found_by == "file" else "env://"
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]

def alone(place, count):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", init_method=where, rank=place, world_size=count)
    t = torch.ones(1)
    dist.all_reduce(t)
    os._exit(int(t) if type(dist.group.WORLD).__name__ == "ProcessGroup" else 99)

made = [multiprocessing.get_context("fork").Process(target=alone, args=(r, 3)) for r in range(3)]
for process in made:
    process.start()
for process in made:
    process.join()
[process.exitcode for process in made]
"""


@pytest.mark.parametrize("found_by", ["file", "environment"])
def test_processes_that_a_rank_forks_have_torchs_own_groups(found_by, ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    cell = ranks.on_ranks(f"found_by = {found_by!r}\n{FORKED}", timeout=90)
    assert cell.text == "ranks 0–2 → [3, 3, 3]\n"
