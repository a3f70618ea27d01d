"""torch's own gloo: the same mismatches are named as on allranks, and the same programs run."""

from __future__ import annotations

import pytest

from tests.torch.test_groups import IMPORTS
from tests.torch.test_mismatches import BEGIN, SEEDS, check_report
from tests.torch.test_patterns import PATTERNS

#: Calls in a group of torch and in one of allranks are not compared with each other.
IN_TWO_GROUPS = ("order of allranks' own call", "group new_group, all_reduce")


@pytest.mark.covers("mismatch", "torch on gloo")
@pytest.mark.parametrize("name", SEEDS)
def test_a_mismatch_in_torchs_own_gloo_is_named_with_rank_and_line(gloo_ranks, name):
    begun = gloo_ranks.on_ranks(IMPORTS + BEGIN)
    assert begun.status == "ok", begun.text
    seed = SEEDS[name]
    if name in IN_TWO_GROUPS:
        seed = seed._replace(title="wait for each other", finds=" in ")
    check_report(gloo_ranks.on_ranks(seed.source, timeout=90), seed)


@pytest.mark.parametrize("call", ["dist.all_reduce(x)", "dist.all_reduce(x, async_op=True).wait()"])
def test_no_rank_uses_the_result_of_a_mismatch(gloo_ranks, call):
    """The bytes of both tensors have the same size, so gloo itself notices nothing."""
    assert gloo_ranks.on_ranks(IMPORTS + BEGIN).status == "ok"
    cell = gloo_ranks.on_ranks(
        "x = torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32)\n"
        f"{call}\nprint('a result')"
    )
    assert "CollectiveMismatch: all_reduce(SUM) needs the same dtype" in cell.text
    assert "│ a result" not in cell.text


def test_the_end_of_an_earlier_cells_wait_closes_no_connections_of_a_later_one(gloo_ranks):
    """The thread that ends a wait may be late on a busy machine."""
    assert gloo_ranks.on_ranks(IMPORTS + BEGIN).status == "ok"
    inside = "from allranks.collectives import world\nearlier = world.current().scope.number"
    assert gloo_ranks.on_ranks(inside).status == "ok"
    cell = gloo_ranks.on_ranks(
        "from allranks.features.torch_jax import torch_state\ntorch_state.close(earlier)\n"
        "x = torch.ones(3)\ndist.all_reduce(x)\nint(x[0])"
    )
    assert cell.text == "ranks 0–2 → 3\n"


#: Lines that torch's own gloo refuses, or where it waits for ever, and others for them.
INSTEAD = {
    "operations and dtypes": {
        "dist.broadcast(narrow, 2)\n": "",
    },
    "pieces of different sizes": {
        "outs = [torch.empty(n) for n in receive]\n": "outs = []\n",
        "dist.all_to_all(outs, [torch.full((n,), float(rank)) for n in send])\n": "",
        "[[float(r)] * receive[r] for r in range(size)]": "[]",
    },
    "models with large gradients": {"assert shared()\n": ""},
    # A send waits for its receive.
    "messages of any rank, tags and groups": {
        "dist.recv(b, 1, tag=7)\n    dist.recv(c, 1, group=part)\n    dist.recv(a, 1)\n": (
            "dist.recv(a, 1)\n    dist.recv(b, 1, tag=7)\n    dist.recv(c, 1, group=part)\n"
        )
    },
    "groups of some ranks": {'if hasattr(dist, "split_group")': "if False"},
}


def test_a_call_that_gloo_refuses_on_all_ranks_is_no_mismatch(gloo_ranks):
    assert gloo_ranks.on_ranks(IMPORTS + BEGIN).status == "ok"
    cell = gloo_ranks.on_ranks(
        "import time\nx = torch.ones(3)\ntime.sleep(0.3 * (rank == 1))\n"
        "try:\n    dist.all_gather([x] * 2, x)\n"
        "except (RuntimeError, ValueError):\n    dist.all_reduce(x)\nint(x[0])"
    )
    assert cell.text == "ranks 0–2 → 3\n"


def test_a_rank_whose_call_gloo_refuses_is_named(gloo_ranks):
    assert gloo_ranks.on_ranks(IMPORTS + BEGIN).status == "ok"
    cell = gloo_ranks.on_ranks("dist.all_gather([t] * (2 if rank == 1 else 3), t)", timeout=90)
    assert "ranks 0, 2 were waiting at line 2: dist.all_gather" in cell.text


@pytest.mark.parametrize("name", PATTERNS)
def test_a_program_on_torchs_own_gloo_is_no_false_alarm(gloo_ranks, name):
    begun = gloo_ranks.on_ranks(
        f"{IMPORTS}\ndist.is_initialized() or dist.init_process_group('gloo')\n"
        "assert type(dist.group.WORLD).__name__ == 'ComparedGroup'"
    )
    assert begun.status == "ok", begun.text
    source = PATTERNS[name]
    for line, other in INSTEAD.get(name, {}).items():
        assert line in source
        source = source.replace(line, other)
    cell = gloo_ranks.on_ranks(f"{source}\n'right'", timeout=180)
    assert cell.status == "ok", cell.text
    assert "→ 'right'\n" in cell.text
