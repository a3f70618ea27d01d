"""torch's collectives and training steps on allranks beside gloo, in turns in the same processes.

    python -m benchmarks.torch [--sizes 2 4] [--hosts] [--quick]

It needs a Python with torch. Starts mpiexec itself, once for each number of ranks on this host, or
with --hosts for two hosts of one rank each, made of namespaces (as `benchmarks.hosts`). A time is
the slowest rank's, and a figure is the median over repetitions. allranks compares all calls; gloo
is measured as it is, and with the comparison that ``--torch gloo`` adds. Training steps are also
measured without the comparison of allranks, and on one rank alone. Their models have dense layers
with a hundred thousand and with ten million parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from benchmarks import hosts, ranks, results

BYTES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
MODELS = {"100 K": (32, 200, 200, 200, 1), "10 M": (32, 1800, 1800, 1800, 1800, 1)}
TURNS = {"100 K": (40, 10), "10 M": (10, 2)}
"""Number of turns, and steps per turn."""
RANK = "ALLRANKS_BENCHMARK_TORCH"
HOSTS = "h0:1,h1:1"
SIDES = ("allranks", "gloo", "gloo, compared")
"""torch's own gloo as it is, and as ``--torch gloo`` has it, where members compare their calls."""


def groups() -> dict[str, Any]:
    """Returns a process group of all ranks for each side."""
    import torch.distributed as dist

    from allranks.features.torch_jax import choice, hook

    hook.install()
    dist.init_process_group("allranks")
    os.environ[choice.SETTING] = "gloo"
    compared = dist.new_group(backend="gloo")
    with patch("allranks.features.torch_jax.hook._is_rank", return_value=False):
        plain = dist.new_group(backend="gloo")
    return dict(zip(SIDES, (dist.group.WORLD, plain, compared), strict=True))


def stepper(widths: tuple[int, ...], group: Any = None) -> ranks.Call:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model: Any = nn.Sequential(*layers[:-1])
    if group is not None:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    batch = torch.randn(64, widths[0])

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def on_ranks(quick: bool) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from allranks import collectives as c

    c.init()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"ranks": c.size(), "allreduce": [], "steps": {}}
    made = groups()
    for nbytes in BYTES:
        tensor = torch.zeros(nbytes // 4)
        peers = {side: _reducer(dist, tensor, group) for side, group in made.items()}
        calls = 100 if nbytes <= 64 << 10 else 4 if nbytes <= 1 << 20 else 1
        repeats = (30 if nbytes <= 1 << 20 else 12) // (4 if quick else 1)
        taken = ranks.slowest(MPI.COMM_WORLD, peers, repeats, calls)
        found["allreduce"].append({"nbytes": nbytes, "ms": _milliseconds(taken)})
    for name, widths in MODELS.items():
        turns, each = TURNS[name]
        steps = {side: stepper(widths, group) for side, group in made.items()}
        steps["unchecked"] = _unchecked(stepper(widths, made["allranks"]))
        steps["none"] = stepper(widths)
        taken = ranks.slowest(MPI.COMM_WORLD, steps, turns // (4 if quick else 1) + 1, each)
        found["steps"][name] = _milliseconds(taken)
    ranks.write(c.rank(), found)
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group()


def _reducer(dist: Any, tensor: Any, group: Any) -> ranks.Call:
    return lambda: dist.all_reduce(tensor, group=group)


def _unchecked(step: ranks.Call) -> ranks.Call:
    """The step with the ranks' calls not compared, as after ``init(checks="off")``."""
    from allranks.collectives import world

    this = world.current()

    def unchecked() -> None:
        this.checks = False
        step()
        this.checks = True

    return unchecked


def _milliseconds(taken: dict[str, list[float]]) -> dict[str, list[float]]:
    return {side: [1e3 * seconds for seconds in times] for side, times in taken.items()}


def table(result: dict[str, Any]) -> str:
    rows = []
    for at in result["sizes"]:
        where = f"{at['ranks']} {'hosts' if result.get('hosts') else 'ranks'}"
        for row in at["allreduce"]:
            what = f"{where}, all_reduce of {_size(row['nbytes'])}"
            rows.append([what, *_figures(row["ms"]), "", ""])
        for name, taken in at["steps"].items():
            ratios = [_ratio(taken, "allranks", side) for side in ("unchecked", "none")]
            rows.append([f"{where}, DDP step, {name}", *_figures(taken), *ratios])
    head = ["", *SIDES, "allranks : gloo", "gloo, compared : gloo", "allranks : not compared"]
    head += ["allranks : one rank alone"]
    return "torch on allranks and on gloo, medians in milliseconds.\n\n" + results.markdown(
        head, rows
    )


def _figures(taken: dict[str, list[float]]) -> list[str]:
    medians = [f"{statistics.median(taken[side]):.2f}" if side in taken else "" for side in SIDES]
    return [*medians, _ratio(taken, "allranks", "gloo"), _ratio(taken, SIDES[2], "gloo")]


def _ratio(taken: dict[str, list[float]], one: str, other: str) -> str:
    if one not in taken or other not in taken:  # in results of an older version
        return ""
    return f"{statistics.median(taken[one]) / statistics.median(taken[other]):.2f}"


def _size(nbytes: int) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch", description=__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--hosts", action="store_true", help="between two hosts, as root")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    chosen = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("The benchmark of torch is left out: this Python has no torch.")
        return
    if os.environ.get(RANK):
        on_ranks(chosen.quick)
        return
    described = results.machine()
    words = ["-m", "benchmarks.torch", *(["--quick"] if chosen.quick else [])]
    if not chosen.hosts:
        measured = [ranks.run(size, *words, **{RANK: "1"}) for size in chosen.sizes]
        print(table(results.write("torch", described, {"sizes": measured})))
        return
    from tests.hosts.hosts import Hosts, missing

    if why := missing():
        print(why)
        return
    with Hosts(2) as namespaces:
        settings = {RANK: "1", "GLOO_SOCKET_IFNAME": "eth0"}
        measured = [hosts.launch(namespaces, HOSTS, *words, **settings)]
    about = {"hosts": HOSTS, "sizes": measured}
    print(table(results.write("torch_hosts", described, about)))


if __name__ == "__main__":
    main()
