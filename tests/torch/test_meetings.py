"""Ranks meet by other ways than the environment: a rank that does not come is named, the stop
button ends the wait, and the ranks stay.
"""

from __future__ import annotations

import pytest

from tests.ports import free_port
from tests.torch.conftest import ALL_HERE
from tests.torch.test_groups import IMPORTS

BEGIN = f"""{IMPORTS}
import time
from torch.distributed import rpc

dist.is_initialized() and dist.destroy_process_group()
kept = 10 * rank
"""


def begin() -> str:
    """What stands before each way: a port that no other program is given meanwhile."""
    port = free_port()
    return f"{BEGIN}port, tcp = {port}, 'tcp://127.0.0.1:{port}'\n"


SUM = "dist.all_reduce(x := torch.ones(1))\ndist.destroy_process_group()\nint(x), kept"
STILL_THERE = f"dist.init_process_group()\n{SUM}"
STORE = "store = dist.TCPStore('127.0.0.1', port, size, rank == 0)\n"
WAYS = {
    "tcp": ("", "dist.init_process_group(init_method=tcp, rank=rank, world_size=size)"),
    "a file": (
        "import tempfile\nfile = broadcast_object(tempfile.mktemp())\n",
        "dist.init_process_group(init_method=f'file://{file}', rank=rank, world_size=size)",
    ),
    "a store": (STORE, "dist.init_process_group(store=store, rank=rank, world_size=size)"),
    "the making of a store": ("", STORE.strip()),
    "remote calls": ("", "rpc.init_rpc(f'rank{rank}', rank=rank, world_size=size)"),
}
KEYS = {
    "get": (STORE, "store.get('a key')"),
    "wait": (STORE, "dist.PrefixStore('p', store).wait(['a key'])"),
}
EXTERNAL = {
    "tcp of more processes": (
        "",
        "dist.init_process_group(init_method=tcp, rank=rank, world_size=size + 1)",
    ),
    "a store that is nowhere": ("", "dist.TCPStore('127.0.0.1', port)"),
    "a store of more processes": ("", "dist.TCPStore('127.0.0.1', port, size + 1, rank == 0)"),
}


def check_that_the_ranks_are_there(ranks):
    following = ranks.on_ranks(STILL_THERE)
    assert following.text == "rank 0 → (3, 0)\nrank 1 → (3, 10)\nrank 2 → (3, 20)\n"


@pytest.mark.parametrize(("before", "way"), (WAYS | KEYS).values(), ids=(WAYS | KEYS).keys())
def test_a_rank_that_does_not_come_is_named(ranks, before, way):
    cell = ranks.on_ranks(f"{begin()}{before}if rank == 1:\n    {way}")
    assert "rank 1 (" in cell.text, cell.text
    assert "raised RankLeft" in cell.text
    assert f"finished In[{cell.execution_count}]" in cell.text
    check_that_the_ranks_are_there(ranks)


EVERY = WAYS | KEYS | EXTERNAL


@pytest.mark.parametrize(("before", "way"), EVERY.values(), ids=EVERY.keys())
def test_the_stop_button_ends_the_wait(ranks, before, way):
    cell = ranks.start_on_ranks(
        f"{begin()}{before}print('here')\nif rank == 2:\n    time.sleep(600)\nelse:\n    {way}"
    ).wait_for(ALL_HERE)
    ranks.drain(0.5)
    ranks.interrupt()
    ended = cell.wait()
    assert ended.error_name == "CellInterrupted", ended.text
    assert "NetworkError" not in ended.text
    check_that_the_ranks_are_there(ranks)


@pytest.mark.parametrize("way", ["tcp", "a file", "a store"])
def test_a_group_is_made_and_runs_on_allranks(ranks, way):
    before, make = WAYS[way]
    cell = ranks.on_ranks(f"{begin()}{before}{make}\nprint(type(dist.group.WORLD).__name__)\n{SUM}")
    assert "ranks 0–2 │ AllranksGroup\n" in cell.text
    assert "rank 1    → (3, 10)\n" in cell.text


def test_remote_calls_work(ranks):
    source = (
        "import warnings\nwarnings.filterwarnings('ignore')\n"
        "rpc.init_rpc(f'rank{rank}', rank=rank, world_size=size)\n"
        "found = rpc.rpc_sync(f'rank{(rank + 1) % size}', pow, args=(rank, 2))\n"
        "rpc.shutdown()\nfound"
    )
    assert ranks.on_ranks(f"{begin()}{source}").text == "rank 0 → 0\nrank 1 → 1\nrank 2 → 4\n"


def test_a_key_that_is_set_late_and_one_that_is_never_set(ranks):
    source = (
        "from datetime import timedelta\n"
        "if rank == 0:\n    store.set('asked', '')\n"
        "if rank == 2:\n    store.wait(['asked'])\n    store.set('late', 'here')\n"
        "try:\n    store.wait(['never'], timedelta(milliseconds=200))\n"
        "except dist.DistStoreError as error:\n    print(error)\n"
        "found = store.get('late'), store.multi_get(['late'])\nbarrier()\nfound"
    )
    cell = ranks.on_ranks(f"{begin()}{STORE}{source}")
    assert cell.text == (
        "ranks 0–2 │ wait timeout after 200ms, keys: /never\n          → (b'here', [b'here'])\n"
    )


def test_a_store_of_another_size_is_found_and_one_that_is_nowhere_is_given_up(ranks):
    source = (
        "from datetime import timedelta\nbrief = timedelta(milliseconds=100)\n"
        "try:\n    dist.TCPStore('127.0.0.1', port, timeout=brief)\n"
        "except dist.DistNetworkError as error:\n    print('100ms' in str(error))\nbarrier()\n"
        "if rank == 0:\n    store = dist.TCPStore('127.0.0.1', port, is_master=True)\n"
        "    store.set('key', 'value')\n"
        "else:\n    store = dist.TCPStore('127.0.0.1', port)\n"
        "found = store.get('key')\nbarrier()\nfound"
    )
    cell = ranks.on_ranks(f"{begin()}{source}")
    assert cell.text == "ranks 0–2 │ True\n          → b'value'\n"


def test_a_store_that_is_written_in_python_needs_no_methods_but_its_own(ranks):
    source = (
        "class Dictionary(dist.Store):\n"
        "    def __init__(self):\n        super().__init__()\n        self.values = {}\n"
        "    def set(self, key, value):\n        self.values[key] = value\n"
        "    def get(self, key):\n        return self.values[key]\n"
        "store = Dictionary()\nprefixed = dist.PrefixStore('p', store)\n"
        "prefixed.set('key', 'value')\nprefixed.get('key')"
    )
    assert ranks.on_ranks(f"{begin()}{source}").text == "ranks 0–2 → b'value'\n"


def test_a_number_of_processes_that_is_not_that_of_the_ranks_is_named(ranks):
    cell = ranks.on_ranks(f"{begin()}dist.init_process_group(rank=rank, world_size=size + 1)")
    assert "UsageError: torch needs world_size=3, the number of ranks: found 4." in cell.text
    waits = ranks.start_on_ranks(f"{begin()}{EXTERNAL['tcp of more processes'][1]}")
    waits.wait_for("torch waits for world_size=4 processes, and there are 3 ranks")
    ranks.drain(0.5)
    ranks.interrupt()
    assert waits.wait().error_name == "CellInterrupted"
    check_that_the_ranks_are_there(ranks)
