"""A rank leaves while others wait for it in torch's own gloo: the cell ends, the next one works."""

from __future__ import annotations

import re

import pytest

from tests.torch.conftest import ALL_HERE
from tests.torch.test_groups import IMPORTS, SUM, check_groups_after_a_failure_on_one_rank
from tests.torch.test_keep import ROUNDED, check_a_training_continues

SETTLED_SECONDS = 90
BEGIN = "dist.is_initialized() or dist.init_process_group()\n"
CELLS = {
    "a rank raises": ("if rank == 1:\n    raise ValueError\ndist.all_reduce(t)", "all_reduce", 1),
    "a handle is awaited": (
        "if rank != 2:\n    dist.all_reduce(t, async_op=True).wait()",
        "all_reduce",
        2,
    ),
    "a rank ends the cell": ("if rank != 2:\n    dist.barrier()", "barrier", 2),
    "a rank is not asked": ("if rank > 0:\n    dist.broadcast_object_list([1])", "broadcast", 0),
    "a message never comes": ("if rank == 0:\n    dist.recv(t, 1)", "recv", 1),
    "nobody takes a message": (
        "if rank == 0:\n    dist.send(torch.ones(3_000_000), 1)",
        "send",
        1,
    ),
    "a sharded model is short of a step": (
        "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(nn.Linear(3, 1))\n"
        "if rank != 1:\n    model(t).sum().backward()",
        "all_gather",
        1,
    ),
    "a model is short of a step": (
        "model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\n"
        "for step in range(3 if rank else 2):\n    model(t).sum().backward()",
        "all_reduce",
        0,
    ),
    "a part of the ranks": (
        "part = dist.new_group([0, 2])\nif rank == 0:\n    dist.all_reduce(t, group=part)",
        "all_reduce",
        2,
    ),
}
NEXT = "dist.init_process_group()\ndist.all_reduce(t)\nint(t[0]), kept"


@pytest.fixture(scope="module", autouse=True)
def _imported(gloo_ranks):
    assert gloo_ranks.on_ranks(IMPORTS).status == "ok"
    assert gloo_ranks.on_ranks("t, kept = torch.ones(3), 10 * rank").status == "ok"


@pytest.mark.covers("error", "torch on gloo")
@pytest.mark.parametrize(("source", "what", "culprit"), CELLS.values(), ids=CELLS.keys())
def test_who_waits_is_told_for_whom_and_the_next_cell_works(gloo_ranks, source, what, culprit):
    cell = gloo_ranks.on_ranks(BEGIN + source, timeout=SETTLED_SECONDS)
    assert cell.status == "error"
    needed = rf"{what}[^ ]* needs .*: rank {culprit} has left cell"
    never = rf"rank {culprit} finished In\[{cell.execution_count}\] without calling {what}"
    alone = rf"{what} needs rank {culprit}: rank {culprit} finished In\[{cell.execution_count}\]"
    assert re.search(f"{needed}|{never}|{alone}", cell.text), cell.text
    assert "call init_process_group() again" in cell.text
    assert "Connection closed" not in cell.text
    following = gloo_ranks.on_ranks(f"t.fill_(1)\n{NEXT}", timeout=SETTLED_SECONDS)
    assert following.text == "rank 0 → (3, 0)\nrank 1 → (3, 10)\nrank 2 → (3, 20)\n"


def test_ranks_that_wait_for_messages_of_each_other_are_named(gloo_ranks):
    gloo_ranks.on_ranks(BEGIN)
    cell = gloo_ranks.on_ranks("dist.recv(t, (rank + 1) % size)", timeout=SETTLED_SECONDS)
    assert "Deadlock: ranks 0–2 wait for each other" in cell.text
    assert f"rank 1 in recv at In[{cell.execution_count}]:2: dist.recv(t" in cell.text
    following = gloo_ranks.on_ranks(f"t.fill_(1)\n{NEXT}", timeout=SETTLED_SECONDS)
    assert "rank 1 → (3, 10)" in following.text


@pytest.mark.covers("interrupt", "torch on gloo")
def test_an_interrupt_is_heard_in_torch_which_says_why_its_groups_are_closed(gloo_ranks):
    cell = gloo_ranks.start_on_ranks(
        f"{BEGIN}model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\nprint('here')\n"
        "import time\ntime.sleep(600) if rank == 0 else dist.barrier()"
    ).wait_for(ALL_HERE)
    gloo_ranks.drain(0.5)
    gloo_ranks.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_name == "CellInterrupted"
    assert "KeyboardInterrupt" in cell.error_value
    assert "RuntimeError" not in cell.text
    why = (
        "torch's process groups were closed on all ranks to end a wait in cell "
        f"In[{cell.execution_count}]: call init_process_group() again, and wrap models again."
    )
    following = gloo_ranks.on_ranks("dist.all_reduce(t)")
    assert f"please make sure to call init_process_group. {why}" in following.text
    assert why in gloo_ranks.on_ranks("dist.init_process_group()\nmodel(t).sum().backward()").text
    destroyed = "dist.destroy_process_group()\ndist.all_reduce(t)"
    assert why not in gloo_ranks.on_ranks(destroyed).text
    following = gloo_ranks.on_ranks(f"t.fill_(1)\n{NEXT}", timeout=SETTLED_SECONDS)
    assert "rank 1 → (3, 10)" in following.text


OWN_CONNECTIONS = """
import socket
from multiprocessing.connection import Client, Listener

if rank == 0:
    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(("127.0.0.1", 0))
ports = broadcast_object((listening.getsockname()[1], listener.address[1]) if rank == 0 else None)
if rank == 0:
    plain, pickled = listening.accept()[0], listener.accept()
elif rank == 1:
    plain = socket.create_connection(("127.0.0.1", ports[0]))
    pickled = Client(("127.0.0.1", ports[1]))
"""
THEY_WORK = """
if rank == 0:
    plain.sendall(b"text")
    pickled.send("object")
if rank == 1:
    print(plain.recv(4), pickled.recv())
"""


def test_the_end_of_a_wait_leaves_connections_of_the_program_alone(gloo_ranks):
    assert gloo_ranks.on_ranks(f"{BEGIN}{OWN_CONNECTIONS}").status == "ok"
    cell = gloo_ranks.on_ranks(
        "if rank == 2:\n    raise ValueError\ndist.all_reduce(t)", timeout=SETTLED_SECONDS
    )
    assert "call init_process_group() again" in cell.text
    assert gloo_ranks.on_ranks(THEY_WORK).text == "rank 1 │ b'text' object\n"
    following = gloo_ranks.on_ranks(f"t.fill_(1)\n{NEXT}", timeout=SETTLED_SECONDS)
    assert "rank 1 → (3, 10)" in following.text


def test_a_rank_that_is_late_is_waited_for(gloo_ranks):
    """Rank 2 has done its part and left; what the others wait for is rank 0, which comes."""
    cell = gloo_ranks.on_ranks(
        f"{BEGIN}import time\nwork = None\nif rank == 0:\n    time.sleep(4)\n"
        "t.fill_(1)\nwork = dist.all_reduce(t, async_op=True)\nif rank < 2:\n    work.wait()",
        timeout=SETTLED_SECONDS,
    )
    assert cell.status == "ok", cell.text
    assert gloo_ranks.on_ranks("work.wait()\nint(t[0])").text == "ranks 0–2 → 3\n"


MEETINGS = {"the first rank": ("rank > 0", 0), "another rank": ("rank < 2", 2)}


@pytest.mark.parametrize(("who", "missing"), MEETINGS.values(), ids=MEETINGS.keys())
def test_a_rank_that_does_not_make_the_group_is_named(gloo_ranks, who, missing):
    cell = gloo_ranks.on_ranks(
        f"dist.destroy_process_group()\nif {who}:\n    dist.init_process_group()",
        timeout=SETTLED_SECONDS,
    )
    assert f"rank {missing} finished In[{cell.execution_count}] without calling" in cell.text
    assert "init_process_group" in cell.text
    following = gloo_ranks.on_ranks(f"t.fill_(1)\n{NEXT}", timeout=SETTLED_SECONDS)
    assert "rank 1 → (3, 10)" in following.text


def test_groups_of_gloo_are_made_after_one_rank_has_failed_to_make_one(gloo_ranks):
    gloo_ranks.on_ranks("dist.is_initialized() and dist.destroy_process_group()")
    check_groups_after_a_failure_on_one_rank(gloo_ranks)


NO_MESH = """
from unittest.mock import patch
with patch("torch.distributed.distributed_c10d.ProcessGroupGloo", side_effect=OSError("no mesh")):
    if rank == 1:
        dist.init_process_group()
if rank != 1:
    dist.init_process_group()
"""


def test_all_ranks_or_none_have_a_group_of_gloo(gloo_ranks):
    cell = gloo_ranks.on_ranks(NO_MESH, timeout=SETTLED_SECONDS)
    assert "OSError: no mesh" in cell.text
    assert "torch's init_process_group needs all of ranks 0–2: rank 1 has left cell" in cell.text
    assert ". Correct the error of rank 1. " in cell.text
    following = gloo_ranks.on_ranks(SUM, timeout=SETTLED_SECONDS)
    assert following.text == "ranks 0–2 → 3\n"


@pytest.mark.replaces
@pytest.mark.covers("death", "torch on gloo")
def test_a_training_on_gloo_continues_after_a_death(gloo_ranks):
    # gloo sums in another order after a wrapper's first step.
    check_a_training_continues(gloo_ranks, 1, ROUNDED)
