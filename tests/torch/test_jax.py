"""A rank leaves while others wait for it in JAX: the cell ends, and JAX can be begun anew."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.faults.notebook import Notebook

SETTLED_SECONDS = 30
BEGIN = """
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
    # The first collective connects the ranks; JAX itself gives one up after 30 s.
    assert ranks.on_ranks(f"{BEGIN}{KEPT}\nfloat(add(ones()))").status == "ok"
    yield
    assert ranks.on_ranks(END).status == "ok"


def check_the_next_cell(ranks: Notebook) -> None:
    following = ranks.on_ranks(
        f"{BEGIN}jax.process_count(), float(add(ones())), kept, (mine + 1).tolist()",
        timeout=SETTLED_SECONDS,
    )
    for rank in range(3):
        assert f"→ (3, 12.0, {10 * rank}, [{rank + 1}, {rank + 2}])\n" in following.text


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


def test_an_interrupt_is_heard_in_jax(ranks):
    cell = ranks.start_on_ranks(
        "print('here')\ntime.sleep(60) if rank == 0 else float(add(ones()))"
    ).wait_for("here")
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


def test_a_rank_that_dies_is_replaced_and_what_jax_will_do_is_told(ranks):
    try:
        cell = ranks.on_ranks("import os\nif rank == 1: os._exit(5)\nbarrier()")
        assert "rank 1 was replaced" in cell.text
        assert cell.text.count("JAX was initialized with a rank that has died") == 1
        assert "rank 2 → 20" in ranks.on_ranks("globals().get('kept')").text
    finally:
        # JAX leaves nobody who has met the dead rank another way.
        assert ranks.run("%distributed restart", 120).status == "ok"
        assert ranks.on_ranks(f"{BEGIN}{KEPT}").status == "ok"
