"""Faults at named steps: a lost host, a dead kernel or a dead rank while something goes on."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks.errors import UsageError
from tests.simulated.scenarios import check_replacement_goes_on, reduce, simulated, work

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


def _dies_before_it_reports_a_death(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    notebook.start()
    notebook.stay()
    victim = world.chance.randrange(world.size)
    world.when("run", lambda: notebook.process.freeze(60), after=0.1)
    world.when("run", lambda: world.kill_rank(victim), after=world.chance.uniform(0.1, 1.2))
    world.when("run", notebook.kill, after=1.3)
    notebook.dies_in({**reduce(seconds=1.0, sets=1), "late": (victim,)})
    world.pass_time(5)
    busy = [rank for rank in range(world.size) if (model := world.rank(rank)) and model.is_busy]
    assert not busy, f"ranks {busy} still wait for rank {victim}"
    assert world.new_notebook().attach(notebook)
    assert world.notebook.told("RankLost")
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=10)
def test_a_cell_ends_where_its_kernel_dies_before_it_has_reported_a_death(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _dies_before_it_reports_a_death(world, notebook)


@simulated(seeds=5, hosts=0, ranks=4)
def test_a_cell_on_one_machine_ends_where_its_kernel_dies_before_it_has_reported_a_death(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    _dies_before_it_reports_a_death(world, notebook)


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


@simulated(seeds=5)
def test_a_cell_that_a_dying_kernel_has_not_sent_to_a_host_is_interrupted_on_the_others(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    world.cut_off("h1", 2.5)
    world.when("run", notebook.kill, after=0.0)
    notebook.dies_in(reduce(sets=2))
    assert world.new_notebook().attach(notebook)
    shown = world.notebook.told("its notebook ended before ranks 0–1 received this cell")
    assert shown or world.notebook.told("s ok")  # it may have been on its way
    assert not world.notebook.cell(reduce(sets=3)).error


@simulated(seeds=10)
def test_the_next_notebook_says_which_ranks_have_no_variables_after_a_replacement(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    victim = world.chance.randrange(6)
    step, most = world.chance.choice([("heal", 0.05), ("restore", 0.002)])
    world.when(step, notebook.kill, after=world.chance.uniform(0, most))
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


@simulated(seeds=5)
def test_a_rank_that_dies_while_a_new_one_takes_back_what_was_kept_is_replaced_at_once(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    victim, other = world.chance.sample(range(6), 2)

    def die() -> None:
        world.rank(victim).p.freeze(1.0)
        world.kill_rank(other)

    notebook.start()
    world.when("settle", die, after=0.0)
    world.after(0.2, world.kill_rank, victim)
    notebook.cell(reduce(seconds=1.0, sets=1))
    assert not notebook.cluster.roster.dead
    assert not notebook.cell(reduce(sets=2)).error


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


@simulated(seeds=10)
def test_ranks_whose_kernel_dies_while_it_starts_them_again_have_their_variables_at_last(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    step = world.chance.choice(["save", "relay of h1 begins", "load", "settle"])
    world.when(step, notebook.kill, after=world.chance.uniform(0, 0.1))
    world.after(world.chance.uniform(0, 1), world.kill_on, "h3", "agent")
    notebook.dies_in(reduce(seconds=2.0, sets=2))
    world.pass_time(world.chance.choice([0.0, 2.0, 15.0]))
    assert world.new_notebook().attach(notebook)
    for rank in range(4):
        assert world.rank(rank).vars["x"] in (1, 2)
    world.notebook.cell(reduce(sets=3))
    assert not world.notebook.cell(reduce(sets=4)).error
    assert world.notebook.was_told_of([4, 5])


@simulated(seeds=4)
def test_a_notebook_that_looks_for_ranks_while_these_are_ended_disturbs_nothing(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay(3.0)
    notebook.kill()
    world.cut_off("h3", 6.0)  # which cannot end at once
    world.pass_time(3.5)
    assert not world.new_notebook().attach(notebook)


@simulated(seeds=5, hosts=0, ranks=4)
def test_only_one_notebook_at_a_time_has_the_ranks_of_a_machine(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.after(world.chance.uniform(0, 1), notebook.kill)
    world.after(world.chance.uniform(0, 1), world.fault, "kill_rank")
    notebook.dies_in(reduce(seconds=0.5, sets=1))
    assert world.new_notebook().attach(notebook)
    second = world.notebook
    assert second.is_refused()
    second.cell(reduce(sets=2))
    world.pass_time(1.0)  # until both faults are over
    second.cell(reduce(sets=3))
    assert not second.cell(reduce(sets=4)).error


@simulated(seeds=5, hosts=4)
def test_a_late_answer_to_an_earlier_new_start_does_not_count(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def lose_another() -> None:
        world.cut_off("h1", 2.5)
        world.kill_on("h3", "agent")

    notebook.start()
    world.when("relay of h1 begins", lose_another, after=0.0)
    world.after(world.chance.uniform(0, 1), world.kill_on, "h4", "agent")
    notebook.cell(reduce(seconds=2.0, sets=1))
    assert not notebook.cell(reduce(sets=2)).error
    assert not notebook.told("did not start")


@simulated(seeds=5)
def test_a_new_rank_that_a_loss_has_kept_from_its_variables_is_named_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell(work(sets=1))
    world.when("settle", lambda: world.kill_on("h3", "relay"), after=0.0)
    world.after(world.chance.uniform(0, 1), world.kill_rank, 0)
    notebook.cell(reduce(seconds=2.0, sets=2))
    notebook.cell(reduce(sets=3))
    assert notebook.told("ranks 0, 4–5 started again without variables")


@simulated(seeds=3)
def test_ranks_stay_without_a_notebook_for_longer_than_a_host_may_be_silent(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    notebook.kill()
    world.pass_time(60)
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.cell(reduce(sets=2)).error


@simulated(seeds=5, hosts=2, ranks=1)
def test_ranks_that_died_one_after_the_other_without_a_notebook_are_not_all_dead(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    asked: list[bool] = []
    world.when("agent replaces", notebook.kill, after=0.0)
    world.when("heal", lambda: asked.append(True), after=0.0)
    world.after(0.2, world.kill_rank, 0)
    notebook.dies_in(work(seconds=0.5, sets=1))
    world.pass_time(3)
    world.kill_rank(1)
    world.pass_time(1)
    # If the kernel had not asked rank 1 yet, the new process has never become a rank.
    assert world.new_notebook().attach(notebook) == bool(asked)


@simulated(seeds=3, hosts=2, ranks=1)
def test_ranks_of_which_the_last_one_died_before_it_was_asked_to_replace_another_have_ended(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    world.when("join", notebook.kill, after=0.0)
    world.cut_off("h2", 3.0)
    world.kill_rank(0)
    world.pass_time(0.5)
    notebook.dies_in(work(seconds=0.5, sets=1))
    world.pass_time(1)
    world.kill_rank(1)
    world.pass_time(3)
    assert not world.new_notebook().attach(notebook)
    assert world.notebook.told("the ranks have just ended")


@simulated(seeds=5)
def test_a_spare_process_that_a_dead_kernel_has_used_is_not_used_again(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.when("agent replaces", notebook.kill, after=0.0)
    world.after(0.2, world.kill_rank, 0)
    notebook.dies_in(reduce(seconds=1.0, sets=1))
    assert world.new_notebook().attach(notebook)
    world.after(0.2, world.kill_rank, 1)
    world.notebook.cell(reduce(seconds=1.0, sets=2))
    assert not world.notebook.cell(reduce(sets=3)).error
    assert not world.notebook.told("could not be replaced")


@simulated(seeds=5)
def test_the_late_news_of_a_lost_host_is_none_of_the_new_ranks(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def lose_h3() -> None:
        world.cut_off("h3", 9.0)
        world.kill_on("h3", "prted")
        world.after(0.05, world.kill_rank, 4)

    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    world.after(world.chance.uniform(0, 1), lose_h3)
    notebook.cell(reduce(seconds=2.0, sets=2))
    assert not notebook.cell(reduce(seconds=10.0, sets=3)).error


@simulated(seeds=5)
def test_the_death_of_a_process_whose_rank_is_started_again_does_not_count(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def die() -> None:
        world.stall("h2", "agent", 2.0)
        world.after(1.0, world.kill_rank, 2)

    notebook.start()
    world.when("save", die, after=0.0)
    world.after(world.chance.uniform(0, 1), world.kill_on, "h3", "agent")
    notebook.cell(reduce(seconds=2.0, sets=1))
    assert not notebook.cell(reduce(seconds=5.0, sets=2)).error


@simulated(seeds=10)
def test_the_last_lines_of_a_rank_come_before_the_news_of_its_death(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    world.after(world.chance.uniform(0.2, 1), world.fault, "kill_rank")
    assert not notebook.cell(work(seconds=1.5, lines=100)).view.after_end


@simulated(seeds=2)
def test_a_cell_that_prints_nothing_for_longer_than_a_host_may_be_silent_ends_well(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    assert not notebook.cell(work(seconds=80.0, lines=1)).error


@simulated(seeds=3)
def test_nothing_but_relays_is_left_once_the_ranks_are_stopped(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell(reduce(sets=1))
    notebook.stop()
    assert {process.name for process in world.left()} <= {"relay"}


@simulated(seeds=3, hosts=4)
def test_a_host_agent_that_starts_its_ranks_again_keeps_nothing_open_of_the_ones_before(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def opened_beside_ranks() -> list[int]:
        ranks = notebook.cluster.cells.connection.agent.hosts()
        agents = {host: world.find("agent", host)[0] for host in ("h1", "h2")}
        return [len(agent.fds) - len(ranks[host]) for host, agent in agents.items()]

    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    before = opened_beside_ranks()
    for host in ("h4", "h3"):
        world.after(0.1, world.kill_on, host, "relay")
        notebook.cell(reduce(seconds=1.0, sets=2))
        assert not notebook.cell(reduce(sets=3)).error
        assert all(map(operator.le, opened_beside_ranks(), before))


@simulated(seeds=3)
def test_a_stop_waits_for_a_relay_that_has_to_kill_its_host_agent_and_the_launcher(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    for name in ("agent", "mpiexec"):
        world.stall("h1", name, 60.0)
    notebook.stop()
    assert {process.name for process in world.left()} <= {"relay"}


@simulated(seeds=5)
def test_a_caretaker_that_dies_at_its_start_is_not_waited_for(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def kill_it() -> None:
        if found := world.find("caretaker"):
            found[0].signal(9)
        else:
            world.after(0.0001, kill_it)

    notebook.start()
    began = world.now
    world.after(0.0, kill_it)
    with suppress(UsageError):
        notebook.stay()
    assert world.now < began + 10
    assert not notebook.cell(reduce(sets=1)).error


@simulated(seeds=5)
def test_a_connection_that_breaks_after_another_notebook_has_attached_costs_nothing(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.kill()
    assert world.new_notebook().attach(notebook)
    world.notebook.cell(reduce(sets=1))
    world.after(world.chance.uniform(0, 1), world.reset, "h2")
    for sets in range(2, 5):
        assert not world.notebook.cell(reduce(seconds=0.5, sets=sets)).error


@simulated(seeds=3)
def test_what_a_rank_writes_after_its_cell_is_shown_with_the_next_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.cell({**work(lines=5), "later": 2})
    world.pass_time(2)
    shown = notebook.cell(work()).view.lines
    for rank in range(world.size):
        assert shown[rank][:2] == [f"1.{rank}.5", f"1.{rank}.6"]


@simulated(seeds=5)
def test_a_notebook_that_attaches_during_a_replacement_waits_for_its_end(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    def die() -> None:
        world.find("spare", "h3")[-1].freeze(6.0)
        world.kill_rank(0)

    notebook.start()
    notebook.stay()
    world.when("heal", notebook.kill, after=0.1)
    world.after(0.2, die)
    notebook.dies_in(reduce(seconds=1.0, sets=1))
    assert world.new_notebook().attach(notebook)
    assert not world.notebook.cell(reduce(sets=2)).error
    assert world.processes_of(0) == 2


@simulated(seeds=3)
def test_ranks_are_attached_to_of_which_some_were_not_asked_to_replace_one(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    world.when("heal", notebook.kill, after=0.1)
    world.cut_off("h3", 3.0)
    world.kill_rank(0)
    world.pass_time(0.5)
    notebook.dies_in(work())
    assert world.new_notebook().attach(notebook)
    world.notebook.cell(reduce(sets=2))
    assert not world.notebook.cell(reduce(sets=3)).error


@simulated(seeds=10)
def test_a_replacement_of_which_a_dying_kernel_has_told_one_rank_only_goes_on_with_all(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    world.when("heal sent to one rank", notebook.kill, after=0.0)
    world.after(0.2, world.kill_rank, world.chance.randrange(6))
    notebook.dies_in(reduce(seconds=1.0, sets=2))
    world.pass_time(world.chance.uniform(0, 2))
    check_replacement_goes_on(world, notebook)


@simulated(seeds=3)
def test_the_doctor_waits_for_slow_hosts_and_names_the_one_that_is_lost(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    slow, gone = world.chance.sample(world.host_names, 2)
    world.cut_off(slow, 3.0)
    world.after(world.chance.uniform(0.01, 1), world.kill_on, gone, "relay")
    began = world.now
    found = {one.about: one for one in notebook.examine_hosts()}
    assert world.now < began + 15
    assert [name for name in world.host_names if found[name].state != "ok"] == [gone]
    assert found[gone].found.startswith("was lost")


@simulated(seeds=3)
def test_the_doctor_names_hosts_that_cannot_connect_to_each_other(
    world: ClusterWorld, notebook: SimulatedNotebook
) -> None:
    world.partition("h1", "h2", 100.0)
    began = world.now
    found = [one.found for one in notebook.examine_hosts() if one.about == "network"]
    assert world.now < began + 8
    assert sorted(text.split(" (")[0] for text in found) == [
        "h1 cannot connect to h2",
        "h2 cannot connect to h1",
    ]
