"""Seeded mismatches in torch's collectives: each is named with the rank and the line of the cell,
on all ranks, and no tensor is changed.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.torch.test_groups import IMPORTS


class Seed(NamedTuple):
    """One mismatch: rank ``culprit`` differs from the others, or has not made the call."""

    source: str
    culprit: int
    #: What the message says about the call.
    title: str
    #: What it says about the culprit, after its number.
    finds: str
    #: The line in ``source`` of the culprit's call; 0 if it made none.
    line: int = 1
    #: The line of the other ranks' calls.
    others: int = 1


SIZED = "torch.zeros(4 if rank == {0} else 3)"
TYPED = "torch.zeros(3, dtype=torch.{1} if rank == {0} else torch.float32)"


def shape(call: str, culprit: int, title: str, found: str = "(4,)") -> Seed:
    return Seed(call.replace("X", SIZED.format(culprit)), culprit, f"{title} needs the same shape",
                f" has {found}")  # fmt: skip


def dtype(call: str, culprit: int, title: str, name: str = "float64") -> Seed:
    source = call.replace("X", TYPED.format(culprit, name))
    return Seed(source, culprit, f"{title} needs the same dtype", f" has {name}")


def root(call: str, culprit: int, title: str) -> Seed:
    return Seed(call.replace("R", f"(0 if rank == {culprit} else {3 - culprit})"), culprit,
                f"{title} needs the same root", " has 0")  # fmt: skip


def order(mine: str, theirs: str, culprit: int, found: str) -> Seed:
    source = f"if rank == {culprit}:\n    {mine}\nelse:\n    {theirs}"
    return Seed(source, culprit, "needs the same operation", f" has {found}", 2, 4)


def missing(call: str, culprit: int, title: str) -> Seed:
    return Seed(f"if rank != {culprit}:\n    {call}", culprit, f"without calling {title}",
                " finished In[", 0, 2)  # fmt: skip


#: Tensors for the collectives that have several.
THREE = "[torch.zeros(3) for _ in range(3)]"
SEEDS = {
    "shape all_reduce": shape("dist.all_reduce(X)", 1, "all_reduce(SUM)"),
    "shape all_reduce of the last rank": shape("dist.all_reduce(X)", 2, "all_reduce(SUM)"),
    "shape all_reduce, asynchronous": shape(
        "dist.all_reduce(X, async_op=True).wait()", 0, "all_reduce(SUM)"
    ),
    "shape all_reduce, transposed": Seed(
        "dist.all_reduce(torch.zeros(2, 3) if rank == 1 else torch.zeros(3, 2))", 1,
        "all_reduce(SUM) needs the same shape", " has (2, 3)",
    ),
    "shape all_reduce, large": Seed(
        "dist.all_reduce(torch.zeros(1_000_001 if rank == 1 else 1_000_000))", 1,
        "all_reduce(SUM) needs the same shape", " has (1000001,)",
    ),
    "shape all_reduce_coalesced": shape(
        "with dist._coalescing_manager():\n    dist.all_reduce(X)\n    dist.all_reduce(t)", 1,
        "all_reduce_coalesced(SUM)", "((4,), (3,))",
    ),
    "shape broadcast": shape("dist.broadcast(X, 0)", 1, "broadcast"),
    "shape reduce": shape("dist.reduce(X, 0)", 2, "reduce(SUM)"),
    "shape all_gather": shape(
        "x = X\ndist.all_gather([torch.zeros_like(x) for _ in range(3)], x)", 1, "all_gather"
    )._replace(line=2, others=2),
    "shape all_gather_into_tensor": shape(
        "x = X\ndist.all_gather_into_tensor(torch.zeros(3 * len(x)), x)", 0,
        "all_gather_into_tensor",
    )._replace(line=2, others=2),
    "shape gather": shape(
        f"x = X\ndist.gather(x, {THREE} if rank == 0 else None)", 2, "gather"
    )._replace(line=2, others=2),
    "shape scatter": shape(f"dist.scatter(X, {THREE} if rank == 0 else None)", 1, "scatter"),
    "shape reduce_scatter_tensor": Seed(
        "x = torch.zeros(2 if rank == 1 else 1)\n"
        "dist.reduce_scatter_tensor(x, torch.zeros(3 * len(x)))", 1,
        "reduce_scatter_tensor(SUM) needs the same shape", " has (6,)", 2, 2,
    ),
    "shape reduce_scatter": Seed(
        "x = torch.zeros(2 if rank == 2 else 1)\n"
        "dist.reduce_scatter(x, [torch.zeros_like(x) for _ in range(3)])", 2,
        "reduce_scatter(SUM) needs the same shape", " has (3, 2)", 2, 2,
    ),
    "shape all_to_all_single": Seed(
        "x = torch.zeros(6 if rank == 1 else 3)\ndist.all_to_all_single(torch.zeros_like(x), x)", 1,
        "all_to_all_single needs the same shape", " has (6,)", 2, 2,
    ),
    "dtype all_reduce": dtype("dist.all_reduce(X)", 1, "all_reduce(SUM)"),
    "dtype all_reduce of the same size": dtype("dist.all_reduce(X)", 2, "all_reduce(SUM)", "int32"),
    "dtype all_reduce, bfloat16": dtype("dist.all_reduce(X)", 0, "all_reduce(SUM)", "bfloat16"),
    "dtype broadcast": dtype("dist.broadcast(X, 0)", 1, "broadcast", "int32"),
    "dtype reduce": dtype("dist.reduce(X, 0)", 2, "reduce(SUM)"),
    "dtype all_gather": dtype(
        "x = X\ndist.all_gather([torch.zeros_like(x) for _ in range(3)], x)", 1, "all_gather"
    )._replace(line=2, others=2),
    "dtype gather": dtype(
        f"x = X\ndist.gather(x, {THREE} if rank == 0 else None)", 1, "gather", "int32"
    )._replace(line=2, others=2),
    "dtype scatter": dtype(
        f"dist.scatter(X, {THREE} if rank == 0 else None)", 2, "scatter", "int32"
    ),
    "dtype reduce_scatter_tensor": dtype(
        "x = X\ndist.reduce_scatter_tensor(torch.zeros(1, dtype=x.dtype), x)", 1,
        "reduce_scatter_tensor(SUM)", "float64",
    )._replace(line=2, others=2),
    "dtype all_to_all_single": dtype(
        "x = X\ndist.all_to_all_single(torch.zeros_like(x), x)", 2, "all_to_all_single", "int32"
    )._replace(line=2, others=2),
    "op all_reduce": Seed(
        "dist.all_reduce(t, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)", 1,
        "all_reduce needs the same reduction", " has MAX",
    ),
    "op reduce": Seed(
        "dist.reduce(t, 0, dist.ReduceOp.MIN if rank == 2 else dist.ReduceOp.SUM)", 2,
        "reduce needs the same reduction", " has MIN",
    ),
    "op reduce_scatter_tensor": Seed(
        "dist.reduce_scatter_tensor(torch.zeros(1), t, "
        "dist.ReduceOp.AVG if rank == 0 else dist.ReduceOp.SUM)", 0,
        "reduce_scatter_tensor needs the same reduction", " has AVG",
    ),
    "op of bits": Seed(
        "dist.all_reduce(torch.ones(3, dtype=torch.int32), "
        "dist.ReduceOp.BOR if rank == 1 else dist.ReduceOp.BAND)", 1,
        "all_reduce needs the same reduction", " has BOR",
    ),
    "order broadcast, all_reduce": order("dist.broadcast(t, 0)", "dist.all_reduce(t)", 1,
                                         "broadcast"),
    "order barrier, all_reduce": order("dist.barrier()", "dist.all_reduce(t)", 2, "barrier"),
    "order gather, all_gather": order(
        f"dist.gather(t, {THREE})", f"dist.all_gather({THREE}, t)", 0, "gather"
    ),
    "order of an object": order(
        "dist.broadcast_object_list([1])", "dist.all_reduce(t)", 1, "broadcast"
    ),
    "order of allranks' own call": order("allreduce(t)", "dist.all_reduce(t)", 1, "allreduce"),
    "order of two shapes": Seed(
        "a, b = torch.zeros(2), torch.zeros(5)\nfor x in (b, a) if rank == 1 else (a, b):\n"
        "    dist.all_reduce(x)", 1, "all_reduce(SUM) needs the same shape", " has (5,)", 3, 3,
    ),
    "order of a backward pass": order(
        "dist.barrier()", "model(t).sum().backward()", 2, "barrier"
    ),
    "group of new_group": Seed(
        "dist.new_group([0, 1] if rank == 1 else [0, 2])", 1, "new_group needs the same",
        " has (0, 1)",
    ),
    "group part, all": Seed(
        "if rank == 2:\n    dist.all_reduce(t, group=part)\nelse:\n    dist.all_reduce(t)", 2,
        "wait for each other", " in all_reduce(SUM)", 2, 4,
    ),
    "group equal ranks": Seed(
        "dist.all_reduce(t, group=same if rank == 1 else None)", 1, "wait for each other",
        " in all_reduce(SUM)",
    ),
    "group new_group, all_reduce": order(
        "dist.new_group([0, 1])", "dist.all_reduce(t)", 1, "new_group"
    ),
    "root broadcast": root("dist.broadcast(t, R)", 1, "broadcast"),
    "root reduce": root("dist.reduce(t, R)", 2, "reduce(SUM)"),
    "root gather": root(
        f"dist.gather(t, {THREE} if rank == R else None, dst=R)", 1, "gather"
    ),
    "root scatter": root(
        f"dist.scatter(t, {THREE} if rank == R else None, src=R)", 2, "scatter"
    ),
    "root broadcast_object_list": root("dist.broadcast_object_list([1], R)", 1, "broadcast"),
    "missing all_reduce": missing("dist.all_reduce(t)", 1, "all_reduce(SUM)"),
    "missing barrier": missing("dist.barrier()", 0, "barrier"),
    "missing backward": Seed(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\nif rank != 2:\n"
        "    model(t).sum().backward()", 2, "without calling all_reduce(SUM)", " finished In[",
        0, 3,
    ),
    "missing step of several": Seed(
        "for step in range(2 if rank == 1 else 3):\n    dist.all_reduce(torch.zeros(3))", 1,
        "without calling all_reduce(SUM)", " finished In[", 0, 2,
    ),
    "missing new_group": missing("dist.new_group([1, 2])", 0, "new_group"),
}  # fmt: skip


BEGIN = """
dist.is_initialized() or dist.init_process_group('gloo')
t = torch.arange(3.0) + rank
part, same = dist.new_group([1, 2]), dist.new_group([0, 1, 2])
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
"""


@pytest.fixture(scope="module", autouse=True)
def _begun(ranks):
    begun = ranks.on_ranks(IMPORTS + BEGIN)
    assert begun.status == "ok", begun.text
    yield
    assert ranks.on_ranks("dist.destroy_process_group()").status == "ok"


def test_there_are_fifty_seeds():
    assert len(SEEDS) == 50
    kinds = {name.partition(" ")[0] for name in SEEDS}
    assert kinds == {"shape", "dtype", "op", "order", "group", "root", "missing"}


def check_report(cell, seed: Seed) -> None:
    """Checks that the failed cell of a seed names the culprit, and the lines of all ranks."""
    kind = "RankLeft" if seed.line == 0 else "CollectiveMismatch"
    assert cell.status == "error", cell.text
    assert kind in cell.text, cell.text
    assert seed.title in cell.text, cell.text
    assert f"rank {seed.culprit}{seed.finds}" in cell.text, cell.text
    where = f"In[{cell.execution_count}]:"
    # The first line of the cell is its magic.
    lines = [line for line in cell.text.splitlines() if where in line]
    if seed.line:
        assert any(
            f"{where}{seed.line + 1}:" in line and names(line, seed.culprit) for line in lines
        ), cell.text
    others = [
        other
        for other in {0, 1, 2} - {seed.culprit}
        if any(f"{where}{seed.others + 1}:" in line and names(line, other) for line in lines)
    ]
    # A cycle has only some of the ranks.
    assert len(others) >= (1 if seed.title == "wait for each other" else 2), cell.text


@pytest.mark.covers("mismatch", "torch on allranks")
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS.keys())
def test_a_mismatch_is_named_with_rank_and_line_and_changes_no_tensor(ranks, seed):
    check_report(ranks.on_ranks(seed.source), seed)
    after = ranks.on_ranks("dist.all_reduce(one := torch.ones(1))\n(t - rank).tolist(), int(one)")
    assert after.text == "ranks 0–2 → ([0.0, 1.0, 2.0], 3)\n"


def names(line: str, rank: int) -> bool:
    """Whether a line of a message is about a rank, as ``ranks 0, 2 at …`` or ``rank 1 in …``."""
    found: set[int] = set()
    for word in line.partition(":")[0].replace(",", " ").split():
        first, _, last = word.partition("–")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
        elif word in ("at", "in"):
            break
    return rank in found
