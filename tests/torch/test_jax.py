"""A rank leaves, or dies, while others wait for it in JAX: JAX can be begun anew."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook
from tests.ports import free_port
from tests.torch.conftest import ALL_HERE, MISSING, python_with_torch

SETTLED_SECONDS = 90
#: The first use of JAX in fresh ranks.
FIRST_SECONDS = 300
PAGE = (Path(__file__).parents[2] / "docs" / "torch_jax.md").read_text()
FIRST, SHARDED, SETTINGS = re.findall(r"test_jax.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
BEGIN = """
import os
import time
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
if not jax.distributed.is_initialized():
    jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
add = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
def ones():
    spread = NamedSharding(mesh, PartitionSpec("data"))
    return jax.make_array_from_process_local_data(spread, np.ones((1, 4), np.float32))
"""
KEPT = "kept, mine = 10 * rank, jnp.arange(2) + rank"
STUCK = """
import ctypes, signal
if rank == {}:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    print('here')
    ctypes.CDLL(None).pause()
"""
END = """
from jax.extend.backend import clear_backends
jax.distributed.shutdown()
clear_backends()
"""
CELLS = {
    "a rank raises": ("if rank == 1:\n    raise ValueError\nfloat(add(ones()))", 1),
    "many steps are under way": (
        "x = ones()\nfor step in range(100 if rank != 2 else 50):\n    y = add(x)\n"
        "y.block_until_ready()",
        2,
    ),
    "a rank is not asked": (
        "if rank > 0:\n    multihost_utils.process_allgather(np.ones(2))",
        0,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _begun(ranks: Notebook) -> Iterator[None]:
    told = ranks.on_ranks(FIRST, timeout=FIRST_SECONDS)
    assert told.status == "ok"
    assert "2 of 3 with 3 devices" in told.text
    # The first collective connects the ranks; JAX itself gives one up after 30 s.
    first = ranks.on_ranks(f"{BEGIN}{KEPT}\nfloat(add(ones()))", timeout=FIRST_SECONDS)
    assert first.status == "ok", first.text
    yield
    assert ranks.on_ranks(END).status == "ok"


def check_the_next_cell(ranks: Notebook) -> None:
    following = ranks.on_ranks(
        f"{BEGIN}jax.process_count(), float(add(ones())), kept, (mine + 1).tolist()",
        timeout=SETTLED_SECONDS,
    )
    for rank in range(3):
        assert f"→ (3, 12.0, {10 * rank}, [{rank + 1}, {rank + 2}])\n" in following.text


@pytest.mark.covers("error", "JAX on gloo")
@pytest.mark.parametrize(("source", "culprit"), CELLS.values(), ids=CELLS.keys())
def test_who_waits_is_told_for_whom_and_jax_can_be_begun_anew(ranks, source, culprit):
    cell = ranks.on_ranks(source, timeout=SETTLED_SECONDS)
    assert cell.status == "error"
    assert "a collective of JAX needs all of ranks 0–2" in cell.text
    left = rf": rank {culprit} (has left cell|finished) In\[{cell.execution_count}\]"
    assert re.search(left, cell.text)
    assert "Connection closed" not in cell.text
    check_the_next_cell(ranks)


def test_jax_refuses_to_go_on_with_the_devices_of_one_rank(ranks):
    """It would sum each rank's share alone, and could not be initialised any more."""
    cell = ranks.on_ranks("float(add(ones())) if rank else None", timeout=SETTLED_SECONDS)
    assert "a collective of JAX needs all of ranks 0–2" in cell.text
    for query in ("jax.devices()", "jnp.ones(1)"):
        assert "Type: jax.distributed.initialize()" in ranks.on_ranks(query).text
    check_the_next_cell(ranks)


@pytest.mark.covers("interrupt", "JAX on gloo")
def test_an_interrupt_is_heard_in_jax(ranks):
    cell = ranks.start_on_ranks(
        "print('here')\ntime.sleep(600) if rank == 0 else float(add(ones()))"
    ).wait_for(ALL_HERE)
    ranks.drain(0.5)
    ranks.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_name == "CellInterrupted"
    assert "Gloo" not in cell.text
    check_the_next_cell(ranks)


def test_a_rank_that_computes_on_its_own_is_left_alone(ranks):
    """Nothing is awaited from the others, who have left: what JAX calls back takes its time."""
    cell = ranks.on_ranks(
        "def slow(x):\n    time.sleep(5)\n    return x\n"
        "like = jax.ShapeDtypeStruct((), jnp.float32)\n"
        "if rank == 0:\n    float(jax.jit(lambda x: jax.pure_callback(slow, like, x))(1.0))",
        timeout=SETTLED_SECONDS,
    )
    assert cell.status == "ok", cell.text
    assert ranks.on_ranks("float(add(ones()))").text == "ranks 0–2 → 12.0\n"


def test_a_rank_that_waits_for_another_thread_is_left_alone(ranks):
    # As at a prompt, while the other ranks have ended the cell.
    cell = ranks.on_ranks("import threading\nif rank == 0: threading.Event().wait(6)", timeout=60)
    cell.ok().lacks("JAX")
    assert ranks.on_ranks("float(add(ones()))").text == "ranks 0–2 → 12.0\n"


def test_an_array_is_shown_with_its_sharding_and_the_parts_of_each_rank(ranks):
    cell = ranks.on_ranks("x = ones() * 2\nx")
    assert cell.status == "ok"
    assert "Array(shape=(3, 4), dtype=float32, sharding=NamedSharding(mesh=Mesh(" in cell.text
    for rank in range(3):
        part = rf"rank {rank} +→ Array\(.*\n +→ \[{rank}:{rank + 1}, 0:4\] on "
        assert re.search(part, cell.text)
    assert "[[2. 2. 2. 2.]]" in cell.text
    # On the page there are two rows, for two ranks.
    three = SHARDED.replace("arange(4.0).reshape(2, 2)", "arange(6.0).reshape(3, 2)")
    shown = ranks.on_ranks(three)
    assert re.search(r"rank 2 +→ .*\n +→ \[2:3, 0:2\] on ", shown.text)
    assert "[[4. 5.]]" in shown.text
    assert ranks.on_ranks("jnp.ones(2)").text == "ranks 0–2 → Array([1., 1.], dtype=float32)\n"


def test_what_was_made_before_jax_was_shut_down_is_refused_with_the_reason(ranks):
    ranks.on_ranks("old, add_old = ones(), add\nfloat(add(ones())) if rank else None")
    cell = ranks.on_ranks("jax.distributed.initialize()\nadd_old(old)", timeout=SETTLED_SECONDS)
    assert "and functions that use them must be made again" in cell.text
    check_the_next_cell(ranks)
    for source in ("add_old(ones())", "old + ones()", "add(old)"):
        cell = ranks.on_ranks(source, timeout=SETTLED_SECONDS)
        assert "and functions that use them must be made again" in cell.text
    check_the_next_cell(ranks)


def test_a_rank_that_does_not_initialize_jax_is_named(ranks):
    assert ranks.on_ranks(END).status == "ok"
    cell = ranks.on_ranks("if rank != 1: jax.distributed.initialize()", timeout=SETTLED_SECONDS)
    assert "raised RankLeft" in cell.text
    assert "without calling jax.distributed.initialize; ranks 0, 2 wait for it" in cell.text
    check_the_next_cell(ranks)


def test_jax_is_initialized_at_an_address_of_the_program(ranks):
    assert ranks.on_ranks(END).status == "ok"

    def initialize() -> str:
        return f"jax.distributed.initialize('127.0.0.1:{free_port()}', size, rank)"

    cell = ranks.on_ranks(f"if rank != 1:\n    raise ValueError\n{initialize()}")
    assert "rank 1 was waiting at line" in cell.text
    cell = ranks.on_ranks(f"{initialize()}\njax.process_count()", timeout=SETTLED_SECONDS)
    assert cell.text == "ranks 0–2 → 3\n"
    check_the_next_cell(ranks)


def test_a_number_of_processes_that_is_not_that_of_the_ranks_is_named(ranks):
    assert ranks.on_ranks(END).status == "ok"
    cell = ranks.on_ranks("jax.distributed.initialize(num_processes=4)")
    assert "found num_processes=4, and there are 3 ranks" in cell.text
    check_the_next_cell(ranks)


def test_a_wait_after_the_users_own_shutdown_is_ended_too(ranks):
    """JAX's connections between CPUs stay, and its collectives work on."""
    source = "jax.distributed.shutdown()\nif rank == 1: raise ValueError\nfloat(add(ones()))"
    cell = ranks.on_ranks(source, timeout=SETTLED_SECONDS)
    assert "a collective of JAX needs all of ranks 0–2: rank 1 has left cell" in cell.text
    assert ". Correct the error of rank 1. " in cell.text
    check_the_next_cell(ranks)


def begin_anew_after_rank_1_was_replaced(ranks):
    following = ranks.on_ranks(
        f"{BEGIN}jax.process_count(), float(add(ones())), globals().get('kept')",
        timeout=SETTLED_SECONDS,
    )
    assert "→ (3, 12.0, None)\n" in following.text  # of rank 1
    assert "→ (3, 12.0, 20)\n" in following.text
    assert ranks.on_ranks(KEPT).status == "ok"


@pytest.mark.replaces
@pytest.mark.covers("death", "JAX on gloo")
@pytest.mark.parametrize("waits", ["float(add(ones()))", "barrier()"])
def test_the_others_live_on_when_a_rank_dies_and_jax_can_be_begun_anew(ranks, waits):
    cell = ranks.on_ranks(f"import os\nif rank == 1: os._exit(5)\n{waits}")
    assert "rank 1 was replaced" in cell.text
    assert cell.text.count("JAX is shut down on all ranks, because one of them has died") == 1
    assert "needs all of ranks 0–2: rank 1 ended with exit code 5" in cell.text
    assert "Connection closed" not in cell.text
    begin_anew_after_rank_1_was_replaced(ranks)


def test_the_death_of_rank_0_ends_all_ranks_and_is_named_first(ranks):
    """JAX's service runs in it: JAX aborts the processes that have lost it."""
    try:
        cell = ranks.on_ranks("if rank == 0: os._exit(5)\nbarrier()")
        assert cell.error_name == "ClusterLost"
        assert "rank 0 (" in cell.error_value
        assert "ended with exit code 5; ranks 1–2 were killed by signal 6" in cell.error_value
    finally:
        again = ranks.on_ranks(f"{BEGIN}{KEPT}\nfloat(add(ones()))", timeout=FIRST_SECONDS)
        assert again.status == "ok", again.text


@pytest.mark.replaces
def test_a_rank_that_does_not_hear_an_interrupt_is_replaced_and_jax_can_be_begun_anew(ranks):
    cell = ranks.start_on_ranks(STUCK.format(1)).wait_for("here")
    ranks.interrupt()
    cell.wait_for("; rank 1 will be killed by the next interrupt and replaced: ")
    ranks.interrupt()
    cell.wait(SETTLED_SECONDS).fails("CellInterrupted", "rank 1 was replaced", "ranks 0, 2 kept")
    begin_anew_after_rank_1_was_replaced(ranks)


@pytest.mark.replaces
def test_all_ranks_end_with_rank_0_if_it_does_not_hear_an_interrupt(ranks):
    """JAX's service runs in it: the message of the first interrupt says so."""
    cell = ranks.start_on_ranks(STUCK.format(0)).wait_for("here")
    why = ", because ranks 1–2 cannot run without rank 0"
    try:
        ranks.interrupt()
        cell.wait_for(f"; all ranks will be killed by the next interrupt{why}")
        ranks.interrupt()
        cell.wait(SETTLED_SECONDS).fails("CellInterrupted", f"their variables are lost{why}. ")
    finally:
        again = ranks.on_ranks(f"{BEGIN}{KEPT}\nfloat(add(ones()))", timeout=FIRST_SECONDS)
        assert again.status == "ok", again.text


def test_this_jax_has_the_settings_that_end_waits_on_gpus_after_a_death():
    """It aborts at a flag that it does not know."""
    begin = "jax.distributed.initialize(heartbeat_timeout_seconds=10)"
    source = SETTINGS.removeprefix("%%distributed\n")
    assert begin in source
    asked = "from jaxlib import xla_client\nprint(xla_client.generate_pjrt_gpu_plugin_options())"
    python = python_with_torch() or pytest.skip(MISSING)
    done = subprocess.run(
        [python, "-c", source.replace(begin, f"jax.devices()\n{asked}")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "'abort_collectives_on_failure': True, 'use_tfrt_gpu_client': True" in done.stdout
