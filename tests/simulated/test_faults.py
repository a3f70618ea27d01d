"""Faults at named steps: a lost host, a dead kernel or a dead rank while something goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulated.scenarios import reduce, simulated, work

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld
    from tests.simulated.notebook import SimulatedNotebook


@simulated(seeds=10)
def test_a_host_that_is_lost_while_a_rank_is_replaced_costs_only_its_own_variables(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    kind = world.chance.choice(["kill_host", "kill_agent", "kill_relay"])
    world.when("heal", lambda: world.fault(kind))
    notebook.start()
    world.after(world.chance.uniform(0, 2), world.kill_rank, world.chance.randrange(6))
    for sets in (1, 2):
        notebook.cell(reduce(seconds=1.5, sets=sets))
    notebook.cell(work(sets=3))
    assert notebook.state == "running"


@simulated(seeds=10)
def test_ranks_can_be_attached_to_after_a_kernel_and_a_rank_died_in_a_replacement(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    victim, other = world.chance.sample(range(6), 2)
    world.when("heal", notebook.kill, after=world.chance.uniform(0, 0.2))
    world.when("heal", lambda: world.kill_rank(other), after=world.chance.uniform(0, 0.4))
    world.after(0.2, world.kill_rank, victim)
    notebook.dies_in(reduce(seconds=1.0, sets=1))
    world.pass_time(1)
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=10)
def test_ranks_can_be_attached_to_while_one_of_their_hosts_loses_power(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(seconds=3.0, sets=1))
    notebook.kill()
    if world.chance.random() < 0.5:
        world.fault("kill_host")
    else:
        world.when("attach", lambda: world.fault("kill_host"), after=0.0)
    world.pass_time(world.chance.uniform(0, 2))
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.told("did not answer")


@simulated(seeds=10)
def test_events_that_a_dead_kernel_had_handled_do_no_harm_when_they_come_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.after(world.chance.uniform(0, 0.2), notebook.kill)
    notebook.dies_in(work(seconds=2.0, sets=1))
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=10)
def test_a_cell_that_a_dying_kernel_has_sent_to_some_ranks_ends(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(seconds=3.0, sets=1))
    world.when("run", notebook.kill, after=world.chance.uniform(0, 0.002))
    notebook.dies_in(reduce(seconds=0.5, sets=2))
    assert world.new_notebook().attach(notebook)


@simulated(seeds=10)
def test_the_next_notebook_says_which_ranks_have_no_variables_after_a_replacement(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    victim = world.chance.randrange(6)
    world.when("heal", notebook.kill, after=world.chance.uniform(0, 0.05))
    world.after(0.2, world.kill_rank, victim)
    notebook.dies_in(reduce(seconds=1.0, sets=2))
    told = notebook.told("no variables")
    second = world.new_notebook()
    assert second.attach(notebook)
    second.cell(reduce(sets=3))
    replaced = world.processes_of(victim) > 1
    assert not replaced or told or second.was_told_of([victim]), (
        f"nothing was said of rank {victim}"
    )


@simulated(seeds=10, hosts=4)
def test_a_second_host_that_is_lost_while_ranks_start_again_costs_only_its_own_variables(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell(work(sets=1))
    world.when(world.chance.choice(["save", "load"]), lambda: world.fault("kill_agent"))
    world.after(world.chance.uniform(0, 1), world.fault, "kill_agent")
    notebook.cell(reduce(seconds=2.0, sets=2))
    notebook.cell(reduce(sets=3))
    assert notebook.state == "running"


@simulated(seeds=10)
def test_a_rank_that_dies_while_ranks_start_again_costs_only_its_own_variables(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell(work(sets=1))
    world.when(world.chance.choice(["save", "load"]), lambda: world.fault("kill_rank"))
    world.after(world.chance.uniform(0, 1), world.fault, "kill_agent")
    notebook.cell(reduce(seconds=2.0, sets=2))
    notebook.cell(reduce(sets=3))
    assert notebook.state == "running"


@simulated(seeds=10)
def test_a_death_is_reported_while_the_launcher_writes_much(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.after(world.chance.uniform(0, 1), world.flood, "h1")
    notebook.cell(reduce(seconds=4.0, sets=1))
    notebook.cell(reduce(sets=2))


@simulated(seeds=10)
def test_an_interrupt_while_ranks_load_their_variables_lets_the_notebook_wait(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.when("load", notebook.interrupt, after=0.01)
    world.after(world.chance.uniform(0, 1), world.fault, "kill_agent")
    notebook.cell(reduce(seconds=2.0, sets=1))
    notebook.cell(work(sets=2))
    assert notebook.state == "running"


@simulated(seeds=10)
def test_a_host_that_stands_still_during_the_test_of_the_network_is_no_firewall(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    slow, still = world.chance.sample(world.host_names, 2)
    world.when(f"relay of {slow} begins", lambda: world.stall(slow, "agent", 12.0), after=0.0)
    world.when(
        "listens", lambda: world.stall_host(still, 3.5), after=world.chance.uniform(0, 0.008)
    )
    notebook.start()
    assert notebook.state == "running"


@simulated(seeds=10)
def test_a_death_without_a_spare_process_costs_only_the_variables_of_its_rank(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start(ALLRANKS_SPARES="1")
    for number in range(5):
        notebook.cell(work(sets=2 * number + 1))
        world.after(0.1, world.kill_rank, world.chance.randrange(6))
        notebook.cell(reduce(seconds=0.5, sets=2 * number + 2))
    assert notebook.state == "running"
