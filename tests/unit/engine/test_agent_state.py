"""What a host agent decides: sequences of events, and the commands that come of them."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from allranks.engine.host.agent_state import (
    AgentState,
    AwaitNotebook,
    ControllerComplete,
    ControllerEnded,
    ControllerPlanned,
    EndStub,
    Fork,
    ForkController,
    Forked,
    KeepStub,
    Kill,
    LauncherEnded,
    LeaveStub,
    NotebookCame,
    NotebookLeft,
    NoteDeath,
    NoteFiles,
    OpenDoor,
    OpenGate,
    ProcessEnded,
    StartLauncher,
    StubCame,
    StubLeft,
    Tell,
    TellController,
    Wake,
)
from allranks.engine.host.events import NotebookSaid, Terminated
from allranks.records.agent import (
    Admitted,
    BeginAgain,
    Clients,
    Command,
    Controller,
    ControllerExit,
    End,
    Exit,
    Join,
    LauncherExit,
    RanksUp,
    Registered,
    Replaces,
    ReportDeath,
    SeatSpares,
    Serve,
    SpareExit,
    Stop,
)
from allranks.records.config import HostAgentConfig

HERE = HostAgentConfig(2, (), {}, "", "", "", (), "", "", can_replace=True)
#: The second of two hosts, whose two ranks have a spare process each.
THERE = dataclasses.replace(
    HERE, size=3, local_size=2, head=False, interface="tcp", spares=2, seats=(0, -1, 1, 2, -1, -1)
)
KILLED = -9


class Agent:
    """A host agent's state; the process of the launcher's number n is 100 + n."""

    def __init__(self, config: HostAgentConfig) -> None:
        self.state = AgentState(config)

    def apply(self, *events: Any) -> list[Any]:
        return [command for event in events for command in self.state.apply(event)]

    def say(self, *commands: Command) -> list[Any]:
        return self.apply(*map(NotebookSaid, commands))

    def fork(self, number: int, replaced: Sequence[int] = (), pid: int = 0) -> list[Any]:
        *before, fork = self.apply(StubCame(number, replaced, {}))
        assert isinstance(fork, Fork)
        return [*before, *self.apply(Forked(pid or 100 + number, fork))]

    def told(self, *events: Any) -> list[Any]:
        commands = self.apply(*events)
        return [command.event for command in commands if isinstance(command, Tell)]


@pytest.fixture
def here():
    made = Agent(HERE)
    made.fork(0)
    made.fork(1)
    return made


@pytest.fixture
def there():
    made = Agent(THERE)
    made.say(Join({"port": 1}), Serve("prted"))
    for number in range(2, 5):
        assert OpenGate() not in made.fork(number)
    assert made.fork(5) == [OpenGate()]
    return made


def variables(rank: int, local_rank: int) -> dict[str, str]:
    """Those of a host with two of three ranks."""
    numbers = {"RANK": rank, "SIZE": 3, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(each) for name, each in numbers.items()}


def test_processes_begin_when_the_last_one_is_there():
    agent = Agent(HERE)
    assert agent.fork(1) == [Tell(Admitted(1))]
    assert agent.fork(0) == [Tell(Admitted(0)), OpenGate()]
    assert agent.state.ranks == {101: 1, 100: 0}


def test_ranks_and_spare_processes_have_the_seats_of_the_configuration(there):
    assert there.state.ranks == {102: 1, 103: 2}
    assert there.state.spares == {104: 4, 105: 5}


def test_programs_find_their_rank_in_variables_though_the_launcher_counts_spare_processes():
    agent = Agent(THERE)
    forks = [agent.apply(StubCame(n, (), {"OMPI_COMM_WORLD_RANK": str(n)}))[-1] for n in (2, 3)]
    assert [fork.variables for fork in forks] == [variables(1, 0), variables(2, 1)]
    agent.apply(*(Forked(100 + fork.number, fork) for fork in forks))
    agent.fork(4)
    agent.apply(ProcessEnded(103, KILLED))
    [_, wake] = agent.say(SeatSpares(1, [2], [(4, 2)]))
    assert wake.variables == variables(2, 1)


def test_a_process_that_replaces_a_rank_has_the_variables_of_the_first_one():
    agent, first = Agent(HERE), {"OMPI_COMM_WORLD_RANK": "1"}
    assert agent.apply(StubCame(1, (), first))[-1].variables == {}
    assert agent.apply(StubCame(0, [1], {"OMPI_COMM_WORLD_RANK": "0"}))[-1].variables == first


def test_what_is_said_twice_is_done_once():
    agent = Agent(THERE)
    assert agent.say(Join({"port": 1})) == []
    assert agent.say(Serve("prted")) == [StartLauncher("prted"), OpenDoor()]
    assert agent.say(Join({"port": 2}), Serve("prted")) == []
    assert agent.state.engine == {"port": 1}
    assert agent.say(Clients(), Clients()) == [ForkController()]


def test_the_door_opens_once_launcher_and_controller_are_known_in_either_order():
    agent = Agent(THERE)
    assert agent.say(Serve("prted")) == [StartLauncher("prted")]
    assert agent.say(Join({"port": 1})) == [OpenDoor()]


def test_a_rank_that_ends_is_replaced_by_a_process_of_the_launcher(here):
    assert here.apply(ProcessEnded(101, KILLED, "out of memory")) == [
        Tell(Exit(1, 101, KILLED, False, "out of memory")),
        TellController(1, 101),
        NoteDeath(1, KILLED),
        EndStub(101, 0),
    ]
    assert here.apply(ProcessEnded(101, KILLED)) == []
    assert here.fork(2, [1], pid=201) == [Tell(Admitted(1)), Tell(Replaces(1, 201))]
    assert here.state.ranks == {100: 0, 201: 1}
    assert here.say(RanksUp()) == [NoteFiles(sweeps=True)]


def test_the_last_process_of_the_launcher_is_kept_for_later_replacements(here):
    here.apply(ProcessEnded(100, KILLED))
    assert here.apply(ProcessEnded(101, KILLED))[-1] == KeepStub(101)
    here.fork(2, [1], pid=201)
    assert here.apply(ProcessEnded(201, KILLED))[-1] == EndStub(201, 0)


@pytest.mark.parametrize(("code", "shown"), [(0, 1), (3, 3), (KILLED, KILLED)])
def test_where_ranks_are_not_replaced_the_launcher_learns_of_each_end(code, shown):
    agent = Agent(dataclasses.replace(HERE, can_replace=False))
    agent.fork(0)
    assert agent.apply(ProcessEnded(100, code))[-1] == EndStub(100, shown)


def test_a_rank_that_the_launcher_has_ended_is_named_so(here):
    assert here.apply(StubLeft(100)) == [LeaveStub(100), Kill(100)]
    assert here.told(ProcessEnded(100, KILLED)) == [Exit(0, 100, KILLED, True)]


def test_on_several_hosts_a_rank_outlives_the_launcher_which_may_have_lost_a_host(there):
    assert there.apply(StubLeft(102)) == [LeaveStub(102)]
    assert there.apply(StubLeft(104)) == [LeaveStub(104), Kill(104)]


def test_a_rank_is_ended_with_its_reason(here):
    why = "it has sent nonsense"
    assert here.say(End(why, pid=101), End(why, rank=0)) == [Kill(101), Kill(100)]
    assert here.say(End(why, pid=999)) == []
    [ended] = here.told(ProcessEnded(101, KILLED, "unused"))
    assert ended.reason == f"ended by allranks, because {why}"
    crash = -signal.SIGSEGV  # before it was killed
    assert here.told(ProcessEnded(100, crash)) == [Exit(0, 100, crash, False)]


def test_spare_processes_take_the_places_of_dead_ranks_and_all_others_hear_of_it(there):
    there.apply(ProcessEnded(102, KILLED))
    first, wake, other = there.say(SeatSpares(1, [1], [(5, 1)]))
    assert isinstance(first, Wake)
    assert (first.pid, first.rank, first.variables) == (104, -1, {})
    assert wake == Tell(Replaces(1, 105))
    assert (other.pid, other.rank, other.dead) == (105, 1, [1])
    assert other.variables == variables(1, 0)
    assert there.state.ranks == {103: 2, 105: 1}
    assert [wake.pid for wake in there.say(SeatSpares(2, [0], []))] == [104]  # the other is a rank
    assert there.told(ProcessEnded(105, KILLED)) == [Exit(1, 105, KILLED, False)]
    assert there.told(ProcessEnded(104, KILLED)) == [SpareExit(4, KILLED)]


def test_on_several_hosts_the_launcher_loses_each_process_that_has_ended(there):
    ends = [there.apply(ProcessEnded(pid, KILLED)) for pid in (102, 103, 104, 105)]
    freed = [each for commands in ends for each in commands if isinstance(each, EndStub)]
    assert freed == [EndStub(pid, 0) for pid in (102, 103, 104, 105)]


def test_a_process_of_an_attempt_that_failed_makes_way_for_the_next_one(there):
    there.say(SeatSpares(1, [1], [(5, 1)]))
    assert Kill(105) in there.say(SeatSpares(2, [1], [(4, 1)]))


def test_a_seat_that_is_given_twice_changes_nothing(there):
    there.apply(ProcessEnded(102, KILLED))
    there.say(SeatSpares(1, [1], [(5, 1)]))
    before = dict(there.state.ranks)
    again = there.say(SeatSpares(2, [1], [(5, 1)]))
    assert [each for each in again if isinstance(each, Kill)] == []
    assert there.state.ranks == before


def test_spare_processes_are_woken_once_if_the_next_notebook_repeats_it(there):
    seats = SeatSpares(1, [1], [(5, 1)])
    assert [each.pid for each in there.say(seats) if isinstance(each, Wake)] == [104, 105]
    assert there.say(seats) == []


def test_ranks_stay_for_the_next_notebook_which_gets_the_earlier_events(here):
    planned, registered = Controller({"c": 1}, {"e": 1}), Registered({"c": 1}, {"e": 1})
    assert here.told(ControllerPlanned({"c": 1}, {"e": 1})) == [planned]
    assert here.told(ControllerComplete()) == [registered]
    assert here.apply(NotebookLeft(True), NotebookLeft(True)) == [AwaitNotebook()]
    [ended] = here.told(ProcessEnded(101, KILLED))
    assert not here.state.stopping
    assert here.told(NotebookCame()) == [planned, registered, ended]
    here.fork(2, [1], pid=201)
    assert here.told(NotebookCame()) == [planned, registered]
    assert here.told(LauncherEnded(0)) == [LauncherExit(0)]
    assert not here.state.stopping  # a notebook has them


def test_the_late_end_of_a_process_whose_place_another_has_is_not_told_again(here):
    here.apply(ProcessEnded(101, KILLED))
    here.fork(2, [1], pid=201)
    here.fork(3, [1], pid=301)
    here.apply(ProcessEnded(201, KILLED), NotebookLeft(True))
    assert not [event for event in here.told(NotebookCame()) if isinstance(event, Exit)]


@pytest.mark.parametrize(
    "event",
    [NotebookLeft(False), LauncherEnded(0), ProcessEnded(101, KILLED), Terminated()],
    ids=type,
)
def test_ranks_without_a_notebook_end_with_the_last_one_or_the_launcher_or_in_time(here, event):
    here.apply(ProcessEnded(100, KILLED), NotebookLeft(True))
    assert not here.state.stopping
    here.apply(event)
    assert here.state.stopping
    assert here.state.abandoned


@pytest.mark.parametrize(("config", "stays"), [(HERE, False), (THERE, True)])
def test_ranks_that_do_not_stay_end_with_their_notebook_or_relay(config, stays):
    agent = Agent(config)
    assert agent.apply(NotebookLeft(stays)) == []
    assert agent.state.stopping
    assert agent.state.abandoned


def test_a_notebook_with_ranks_may_lose_the_launcher_and_all_ranks(here):
    assert here.told(LauncherEnded(1), ControllerEnded(KILLED)) == [
        LauncherExit(1),
        ControllerExit(KILLED),
    ]
    here.apply(ProcessEnded(100, KILLED), ProcessEnded(101, KILLED))
    assert not here.state.stopping


@pytest.mark.parametrize("command", [Stop(), BeginAgain()])
def test_a_notebook_ends_the_ranks_and_may_begin_others(here, command):
    assert here.say(command) == []
    assert here.state.stopping
    assert here.state.begins_again == (command == BeginAgain())
    assert here.apply(NotebookLeft(True)) == []
    assert not here.state.abandoned


def test_sigterm_ends_the_ranks(here):
    here.apply(Terminated())
    assert here.state.stopping
    assert not here.state.abandoned  # the notebook may have ended this process


def test_the_controller_hears_of_deaths_on_other_hosts(here):
    assert here.say(ReportDeath(5, 7)) == [TellController(5, 7)]


class OfAFeature(Command):
    """A command that no feature has taken."""


def test_a_command_for_another_process_is_an_error(here):
    with pytest.raises(ValueError, match=r"expected a command for a host agent, found <.*OfAF"):
        here.say(OfAFeature())
