"""Faults at random moments, several at once, on several hosts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tests.simulated.scenarios import any_cell, simulated, work

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld, Fault
    from tests.simulated.notebook import SimulatedNotebook

_CELLS = 5
#: What the ranks survive.
_SHORT = (
    *("kill_rank", "kill_rank", "stall_rank", "kill_spare", "cut_short", "reset"),
    *("stall_relay", "stall_agent", "stall_notebook", "interrupt"),
)
_HOSTS = (*_SHORT, "kill_host", "kill_agent", "kill_relay", "cut_middle", "cut_long", "stall_host")


def _plan(kinds: Sequence[str], rng: random.Random) -> Sequence[Fault]:
    from tests.simulated.chaos import random_plan

    return random_plan(rng, kinds, _CELLS)


def _run_cells(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    notebook.start()
    for number in range(1, _CELLS + 1):
        notebook.cell(any_cell(world.work, number))
        if notebook.state != "running":
            return


def _check_ranks_are_left(notebook: SimulatedNotebook) -> None:
    """Short faults end all ranks only if the user interrupts a replacement twice."""
    if notebook.state != "running":
        why = notebook.cluster.cells.connection.roster.lost_because
        assert re.search("interrupted (it )?twice", why), why


@simulated(seeds=70, plan=partial(_plan, _SHORT))
def test_short_faults_cost_no_line_and_no_cluster(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _run_cells(world, notebook)
    _check_ranks_are_left(notebook)


_NETWORK = ("reset", "reset", "cut_short", "cut_middle", "stall_relay")


@simulated(seeds=15, plan=partial(_plan, _NETWORK))
def test_an_unsteady_network_loses_and_repeats_no_line(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    for number in range(1, _CELLS + 1):
        notebook.cell(work(seconds=1.5, lines=100, sets=number))
    assert notebook.state == "running", notebook.outcome[-1]


@simulated(seeds=40, plan=partial(_plan, _HOSTS))
def test_lost_hosts_are_named_and_every_cell_ends(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _run_cells(world, notebook)


_HERE = ("kill_rank", "kill_rank", "stall_rank", "stall_agent", "stall_notebook", "interrupt")


@simulated(seeds=20, hosts=0, ranks=4, plan=partial(_plan, _HERE))
def test_ranks_of_one_machine_survive_deaths_and_stops(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _run_cells(world, notebook)
    _check_ranks_are_left(notebook)


@simulated(seeds=15, plan=partial(_plan, _SHORT))
def test_awaited_cells_end_as_others_do(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    notebook.start()
    for number in range(1, _CELLS + 1):
        notebook.awaited_cell(any_cell(world.work, number))
    _check_ranks_are_left(notebook)


@simulated(seeds=15)
def test_submitted_cells_run_in_their_order_while_ranks_die(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.after(world.chance.uniform(0, 3), world.fault, "kill_rank")
    specs = [any_cell(world.work, number) for number in range(1, _CELLS + 1)]
    shown = [result.view.cell for result in notebook.submitted_cells(specs)]
    assert shown == sorted(shown)
    assert notebook.state == "running", notebook.outcome[-1]


_AROUND_ATTACH = ("kill_rank", "kill_spare", "cut_short", "reset", "stall_relay", "stall_agent")


@simulated(seeds=25, plan=partial(_plan, _AROUND_ATTACH))
def test_the_ranks_of_a_kernel_that_dies_at_any_moment_are_attached_to(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.after(world.chance.uniform(0, 5), notebook.kill)
    notebook.dies_in(*(any_cell(world.work, number) for number in range(1, 4)))
    world.pass_time(world.chance.choice([0.05, 0.5, 3.0]))
    assert world.new_notebook().attach(notebook)
    for number in range(4, _CELLS + 1):
        world.notebook.cell(any_cell(world.work, number))
    assert world.notebook.state == "running", world.notebook.outcome[-1]


_WHILE_WATCHED = ("kill_rank", "stall_rank", "stall_agent", "stall_notebook", "interrupt")


@simulated(seeds=15, hosts=0, ranks=4, plan=partial(_plan, _WHILE_WATCHED))
def test_a_watcher_shows_each_line_of_the_cells_once(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    watcher = notebook.watched()
    if world.chance.random() < 0.5:  # another one stands still meanwhile
        world.after(world.chance.uniform(0, 1), notebook.watched().process.freeze, 20.0)
    world.pass_time(1)
    for number in range(1, _CELLS + 1):
        spec = any_cell(world.work, number)
        result = notebook.cell(spec)
        world.pass_time(0.5)
        if result.error is None:
            shown = [len(watcher.lines[result.view.cell, rank]) for rank in range(world.size)]
            assert shown == [spec["lines"]] * world.size
            assert watcher.ended[result.view.cell] == set(range(world.size))
