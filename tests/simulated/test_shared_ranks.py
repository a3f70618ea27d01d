"""Ranks with several users: the members of an ensemble, and notebooks that lend them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulated.scenarios import any_cell, reduce, simulated, work

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld
    from tests.simulated.notebook import SimulatedNotebook


@simulated(seeds=8)
def test_all_members_of_an_ensemble_end_where_a_rank_dies_and_each_shows_its_lines_once(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.after(world.chance.uniform(0, 1), world.fault, "kill_rank")
    assert notebook.ensemble(work(seconds=0.5, lines=20), 15).states == 15 * ["finished"]
    assert not notebook.cell(reduce(sets=1)).error


@simulated(seeds=12)
def test_an_ensemble_begins_with_all_ranks_where_one_dies_as_it_begins(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    victim = world.chance.randrange(world.size)
    world.when("members", lambda: world.kill_rank(victim), after=world.chance.uniform(0, 0.002))
    assert notebook.ensemble(work(seconds=0.5, lines=20), 15).states == 15 * ["finished"]
    assert not notebook.cell(reduce(sets=1)).error


@simulated(seeds=8, hosts=0, ranks=4)
def test_two_notebooks_lend_each_other_ranks_of_which_some_die(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    holder, other = notebook, world.new_notebook()
    world.after(world.chance.uniform(0, 4), world.fault, "kill_rank")
    for number in range(1, 6):
        holder.cell(any_cell(world.work, number))
        holder.lend()
        assert other.attach(notebook)
        holder, other = other, holder
    holder.cell(reduce(sets=6))
    world.pass_time(4)  # the rank has died by now, in a cell or between two
    assert not holder.cell(reduce(sets=7)).error
    holder.stop()


@simulated(seeds=8, hosts=0, ranks=4)
def test_ranks_are_lent_where_one_dies_in_that_moment_and_the_other_notebook_replaces_it(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    victim = world.chance.randrange(world.size)
    world.when("stay", lambda: world.kill_rank(victim), after=world.chance.uniform(0, 0.0005))
    notebook.lend()
    other = world.new_notebook()
    assert other.attach(notebook)
    assert not other.cell(reduce(sets=1)).error
    other.stop()
