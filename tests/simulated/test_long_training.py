"""The faults of hosts one after the other, on 32 ranks, also those that ``make chaos`` omits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulated.scenarios import reduce, simulated

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld
    from tests.simulated.notebook import SimulatedNotebook

_AWAY_SECONDS = 45.0


def _begin(world: ClusterWorld, kind: str, host: str) -> None:
    rank = 8 * world.host_names.index(host) + world.chance.randrange(8)
    if kind == "rank killed":
        world.kill_rank(rank)
    elif kind == "rank stopped":
        world.note(f"rank {rank} stands still for 5 s")
        world.rank(rank).p.freeze(5.0)
    elif kind == "cable out for 5 s":
        world.cut_off(host, 5.0, others=True)
    elif kind == "cable out for good":
        world.cut_off(host, _AWAY_SECONDS, others=True)
    elif kind == "host crashed":
        world.kill_host(host, _AWAY_SECONDS)
    else:
        world.notebook.kill()


@simulated(seeds=2, hosts=4, ranks=8)
def test_each_fault_of_hosts_costs_a_training_only_what_it_must(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    kinds = ["rank killed", "rank stopped", "cable out for 5 s", "kernel killed"]
    kinds += ["cable out for good", "host crashed"]
    notebook.start()
    notebook.stay()
    for kind in world.chance.sample(kinds, len(kinds)):
        host = world.any_host(world.chance)
        world.notebook.cell(reduce(seconds=3.0, sets=1))
        world.after(world.chance.uniform(0, 2), _begin, world, kind, host)
        if kind == "kernel killed":
            before = world.notebook
            before.dies_in(reduce(seconds=3.0, sets=2))
            world.pass_time(world.chance.uniform(0, 3))
            assert world.new_notebook().attach(before)
        else:
            world.notebook.cell(reduce(seconds=3.0, sets=2))
        while world.notebook.cell(reduce(seconds=3.0, sets=3)).error:
            assert world.notebook.state == "running"
        assert [world.rank(rank).vars for rank in range(32)] == 32 * [{"x": 3}]
        if kind in ("cable out for good", "host crashed"):  # the host returns
            world.pass_time(_AWAY_SECONDS)
            world.notebook.restart()
            world.notebook.stay()
