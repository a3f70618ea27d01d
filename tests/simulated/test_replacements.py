"""Ranks that are replaced, or started again: what comes late, or again, counts once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.simulated.scenarios import check_replacement_goes_on, reduce, simulated, work

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld
    from tests.simulated.notebook import SimulatedNotebook


@simulated(seeds=3)
def test_a_new_rank_that_begins_late_is_waited_for(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.when("agree", lambda: world.jobs[-1].joining.freeze(1.5), after=0.0)
    world.after(0.2, world.kill_rank, world.chance.randrange(6))
    notebook.cell(reduce(seconds=1.0, sets=1))
    assert not notebook.told("did not answer")
    assert not notebook.cell(reduce(sets=2)).error


@simulated(seeds=3, hosts=4)
def test_tries_to_replace_a_rank_do_not_count_once_all_have_started_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def die(rank: int) -> None:
        if rank < 5:
            world.kill_rank(rank)
            world.when("join", lambda: die(rank + 1), after=0.03)
        else:
            world.when("settle", lambda: world.kill_rank(0), after=0.0)
            world.kill_on("h4", "agent")

    notebook.start(ALLRANKS_SPARES="4")
    notebook.cell(work(sets=1))
    world.after(0.2, die, 0)
    notebook.cell(reduce(seconds=1.0, sets=2))
    assert not notebook.cell(reduce(sets=3)).error
    assert not notebook.told("it was tried")


@simulated(seeds=5)
def test_a_new_rank_whose_restoring_a_death_ends_restores_with_the_next_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    victim, other = world.chance.sample(range(6), 2)
    notebook.start()
    notebook.cell({**work(sets=1), "keeps": True})
    world.when("settle", lambda: world.kill_rank(other), after=0.0)
    world.after(0.2, world.kill_rank, victim)
    notebook.cell(reduce(seconds=1.0, sets=2))
    assert [world.rank(rank).vars.get("x") for rank in (victim, other)] == [1, 1]
    assert not notebook.cell(reduce(sets=3)).error


@simulated(seeds=3)
def test_another_notebook_does_not_run_a_cell_where_one_has_left_calls_unfinished(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell({**work(sets=1), "unfinished": True})
    notebook.kill()
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=3)
def test_a_new_rank_that_dies_before_another_one_has_begun_is_replaced_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def kill_both() -> None:
        world.kill_rank(0)
        world.kill_rank(1)

    def let_one_begin_late() -> None:
        world.jobs[-1].joining.freeze(2.0)
        world.after(1.2, kill_both)  # of which one has not begun

    notebook.start()
    world.when("agree", let_one_begin_late, after=0.0)
    world.after(0.2, kill_both)
    notebook.cell(reduce(seconds=1.0, sets=1))
    assert not notebook.cell(reduce(sets=2)).error
    assert not notebook.told("could not be replaced")


@simulated(seeds=5, hosts=2, ranks=1)
def test_the_end_of_a_process_that_another_host_has_replaced_does_not_count_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    for spare in world.find("spare", "h1"):
        spare.signal(9)
    world.pass_time(1.5)
    world.when("agent replaces", notebook.kill, after=0.1)
    world.after(0.2, world.kill_rank, 0)
    notebook.dies_in(work(seconds=0.5, sets=1))
    world.pass_time(3)
    world.kill_rank(1)
    world.pass_time(1)
    assert world.new_notebook().attach(notebook)


@simulated(seeds=5)
def test_a_rank_that_has_saved_its_variables_before_its_end_has_them_in_the_next_notebook(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.when("heal", notebook.kill, after=world.chance.uniform(0, 0.2))
    notebook.dies_in({**work(sets=1), "ends": [0]})
    assert world.new_notebook().attach(notebook)
    assert world.rank(0).vars.get("x") == 1
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=10)
def test_two_ends_of_a_rank_that_come_again_leave_the_process_that_is_to_replace_it(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def end_first() -> None:
        world.jobs[-1].joining.signal(9)
        world.when("agree", end_kernel, after=0.0)

    def end_kernel() -> None:
        world.kill_rank(1)  # so the second one cannot join yet
        world.after(0.02, notebook.kill)

    notebook.start()
    notebook.stay()
    world.when("agree", end_first, after=0.0)  # by then also the last host has been asked to heal
    world.after(world.chance.uniform(0, 1), world.kill_rank, 0)
    notebook.dies_in(reduce(seconds=1.0, sets=1))
    assert world.new_notebook().attach(notebook)
    world.notebook.cell(reduce(sets=2))
    assert not world.notebook.cell(reduce(sets=3)).error
    assert not world.notebook.told("could not be replaced")


@simulated(seeds=3, hosts=0, ranks=4)
def test_a_new_process_that_stands_still_makes_way_for_the_next_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def fail() -> None:
        world.find("child")[-1].freeze(6.0)  # that of rank 0 has just been forked
        world.after(1.0, world.kill_rank, 1)

    notebook.start()
    world.when("agent replaces", fail, after=0.0)
    world.after(0.2, world.kill_rank, 0)
    notebook.cell(reduce(seconds=1.0, sets=1))
    world.pass_time(6)
    assert len(world.find("rank0")) == 1
    assert not notebook.cell(reduce(sets=2)).error


@simulated(seeds=3, hosts=0, ranks=4)
def test_ranks_of_one_machine_outlive_two_kernels(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.kill()
    second = world.new_notebook()
    assert second.attach(notebook)
    assert not second.cell(reduce(sets=1)).error
    second.stay()
    second.kill()
    world.pass_time(2)
    assert world.new_notebook().attach(second)
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=3)
def test_a_host_that_returns_after_it_was_given_up_without_a_notebook_ends_its_ranks(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.kill()
    world.stall_host("h3", 60.0)
    world.pass_time(80)
    assert not [process for process in world.left() if process.host.name == "h3"]
    assert world.new_notebook().attach(notebook)


@simulated(seeds=3)
def test_a_new_start_that_fails_without_a_notebook_is_made_again_by_the_next_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    world.when("relay of h1 begins", notebook.kill, after=0.0)
    world.after(world.chance.uniform(0, 1), world.kill_on, "h3", "agent")
    notebook.dies_in(reduce(seconds=2.0, sets=2))
    world.pass_time(2)
    for mpiexec in world.find("mpiexec"):
        mpiexec.signal(9)
    world.pass_time(80)
    assert world.new_notebook().attach(notebook)
    for rank in range(4):
        assert world.rank(rank).vars["x"] in (1, 2)


@simulated(seeds=5)
def test_the_hello_of_a_rank_that_ends_is_none_of_the_next_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def lose_h3() -> None:
        world.jobs[-1].joining.freeze(1.5)  # its hello comes while h1 ends its ranks
        world.after(0.6, world.kill_on, "h3", "agent")
        world.stall("h1", "agent", 2.0)
        world.when("relay of h1 begins", begin_late, after=0.0)

    def begin_late() -> None:
        world.when("agent admitted", freeze, after=0.03)

    def freeze() -> None:
        for process in world.find("rank0"):
            process.freeze(2.0)

    notebook.start()
    world.when("agree", lose_h3, after=0.0)
    world.after(0.2, world.kill_rank, 0)
    notebook.cell(reduce(seconds=1.0, sets=1))
    assert not notebook.cell(reduce(sets=2)).error
    assert not notebook.told("did not")


@simulated(seeds=5)
def test_a_host_that_ends_its_ranks_slowly_begins_again_with_the_others(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.when("save", lambda: world.stall("h2", "agent", 1.5), after=0.0)
    world.after(world.chance.uniform(0, 1), world.kill_on, "h3", "agent")
    notebook.cell(reduce(seconds=2.0, sets=1))
    assert not notebook.cell(reduce(sets=2)).error
    assert not notebook.told("did not start")


@simulated(seeds=10)
def test_ranks_are_attached_to_while_their_connections_break(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.kill()
    for host in world.host_names:
        seconds = world.chance.uniform(0, 0.001)
        world.when(f"relay of {host} listens", partial(world.reset, host), after=seconds)
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.told("did not answer")
    assert not world.notebook.cell(reduce(sets=1)).error


@simulated(seeds=10)
def test_ranks_that_stay_in_an_interrupted_cell_are_replaced_and_the_others_keep_their_variables(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    stuck = world.chance.sample(range(6), world.chance.randrange(1, 4))
    notebook.start()
    notebook.cell({**work(sets=1), "keeps": True})
    world.after(0.5, notebook.interrupt)
    world.after(world.chance.uniform(1.0, 4.0), notebook.interrupt)
    kind = world.chance.choice([work, reduce])
    cell = notebook.cell({**kind(seconds=0.2, sets=2), "stuck": stuck})
    assert type(cell.error).__name__ == "CellInterrupted"
    assert notebook.told("did not stop, so rank")
    others = 2 if kind is work else 1  # the interrupt has ended their wait
    for rank in range(6):
        model = world.rank(rank)
        assert model is not None
        assert model.vars["x"] == (1 if rank in stuck else others)
        assert world.processes_of(rank) == (2 if rank in stuck else 1)
    assert not notebook.cell(reduce(sets=3)).error


@simulated(seeds=5, hosts=0, ranks=4)
def test_later_cells_run_if_another_rank_dies_while_one_is_replaced_that_stayed_in_a_cell(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    stuck, other = world.chance.sample(range(4), 2)
    notebook.start()
    world.after(0.5, notebook.interrupt)
    world.after(3.0, notebook.interrupt)
    world.when("heal", lambda: world.kill_rank(other), after=world.chance.uniform(0, 0.2))
    notebook.cell({**work(seconds=0.2, sets=1), "stuck": [stuck]})
    notebook.cell(work(sets=2))  # the other one may die in it
    assert not notebook.cell(work(sets=3)).error


def _check_files_after_an_attach(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    notebook.start()
    notebook.stay()
    world.when("heal", notebook.kill, after=world.chance.uniform(0, 0.2))
    world.after(0.2, world.kill_rank, world.chance.randrange(world.size))
    notebook.dies_in(reduce(seconds=1.0, sets=1))
    assert world.new_notebook().attach(notebook)
    world.pass_time(1)
    assert not world.shared_files_of_the_dead()


@simulated(seeds=5)
def test_no_file_of_a_dead_rank_is_left_by_an_attach_that_ends_its_replacement(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _check_files_after_an_attach(world, notebook)


@simulated(seeds=5, hosts=0, ranks=4)
def test_no_file_of_a_dead_rank_is_left_on_one_machine_by_an_attach_that_ends_its_replacement(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _check_files_after_an_attach(world, notebook)


@simulated(seeds=10)
def test_a_replacement_of_which_a_host_has_not_heard_goes_on_there_with_the_next_notebook(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    host = world.chance.choice(world.host_names)
    victim = next(rank for rank in range(6) if world.rank(rank).p.host.name != host)
    world.when("heal", notebook.kill, after=0.1)
    world.cut_off(host, 3.0)
    world.kill_rank(victim)
    world.pass_time(0.5)
    notebook.dies_in(work())
    world.pass_time(3.0)
    check_replacement_goes_on(world, notebook)


@simulated(seeds=5)
def test_a_new_rank_that_dies_before_a_host_that_was_cut_off_has_heard_of_it_is_replaced_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell(work(sets=1))
    world.when("heal sent to one rank", lambda: world.cut_off("h3", 3.0), after=0.0)
    world.when("join", lambda: world.jobs[-1].joining.signal(9), after=0.5)
    world.after(0.2, world.kill_rank, 0)
    notebook.cell(reduce(seconds=1.0, sets=2))
    assert not notebook.cell(reduce(sets=3)).error
    assert not notebook.told("start again")
    assert {rank: world.processes_of(rank) for rank in range(1, 6)} == dict.fromkeys(range(1, 6), 1)
