"""What the notebook makes of the news of several hosts: which of them is the cause."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster.agents import HostsContext, TakenHosts
from allranks.cluster.failures import ProcessExit, describe_exits
from allranks.cluster.launchers.command import SshLauncher
from allranks.cluster.launchers.job import Host
from allranks.features.hosts.agents import MultiHostAgents
from allranks.features.hosts.network_test import NetworkTest
from allranks.records.agent import (
    Event,
    Exit,
    HostConnected,
    HostLeft,
    HostListens,
    LauncherExit,
    Notice,
    RanksUp,
    Replaces,
    ReportDeath,
    SeatSpares,
    read_command,
)
from allranks.records.config import HostAgentConfig, version

HOSTS = Host("h1", 2), Host("h2", 2), Host("h3", 2)
ABORT = {"event": "exit", "rank": 0, "pid": 1, "code": 14, "by_launcher": False, "reason": ""}
KILLED = ABORT | {"rank": 3, "code": -9}
ENDED_TOO = ABORT | {"rank": 1, "code": -15, "by_launcher": True}
BEAT, LATE = {"event": "host_beat"}, {"event": "host_late"}


class Job:
    def __init__(self, hosts: tuple[Host, ...] = HOSTS) -> None:
        self.hosts = lambda: hosts

    def waits(self) -> str:
        return ""

    def all_came(self) -> None:
        pass

    def outlives(self) -> dict[str, list[float]]:
        return {}

    def give_up(self, host: str) -> None:
        pass


class Notebook:
    """Agents without processes: news come by `say`, and ``ends`` are what they report."""

    def __init__(self, heals: bool = False) -> None:
        self.ends: list[ProcessExit] = []
        self.notices: list[str] = []
        self.asked: dict[str, SeatSpares] = {}
        self.again: list[tuple[str, str]] = []
        #: Which hosts were asked to begin, or to begin again.
        self.begun: list[str] = []
        self.died: list[tuple[str, ReportDeath]] = []
        #: What is saved for the next notebook, and how much of it before each choice of a spare
        #: process.
        self.states: list[dict[str, Any]] = []
        self.saved_before: list[int] = []
        self.wire = SimpleNamespace(
            commands_url="tcp://h0:1", events_url="tcp://h0:2", key="key", lease_seconds=30.0
        )
        self.wire.forget = lambda *_: None
        self.wire.command = self._command
        launcher = SshLauncher("h1:2,h2:2,h3:2")
        launcher.run = lambda *_: Job()  # type: ignore[assignment, method-assign, return-value]
        config = HostAgentConfig(6, (), {}, "/s", "/l", "/w", (), "", "", can_replace=heals)
        context = HostsContext(launcher, config, self.wire, self._deliver)  # type: ignore[arg-type]
        self.agents = MultiHostAgents(context)

    def _command(self, host: str, word: str, line: str) -> None:
        if word in ("config", "again"):
            self.begun.append(host)
        if word == "again":
            self.again.append((host, json.loads(line)["relocation"]))
        elif word == "say":
            match read_command(line.encode()):
                case SeatSpares() as asked:
                    self.asked[host] = asked
                    self.saved_before.append(len(self.states))
                case ReportDeath() as died:
                    self.died.append((host, died))

    def _deliver(self, event: Event, host: str) -> None:
        if isinstance(event, Exit | LauncherExit | HostLeft):
            self.ends.append(ProcessExit.of(event, host))
        elif isinstance(event, Notice):
            self.notices.append(event.text)

    def say(self, host: str, event: dict[str, Any]) -> None:
        self.wire.deliver_host(host, json.dumps(event).encode())

    def come(self, *hosts: str) -> None:
        for host in hosts:
            self.say(host, {"event": "host_up", "address": "10.0.0.1", "version": version()})
        self.agents.begin()

    def save_states(self) -> None:
        def save(state: dict[str, Any]) -> None:
            self.states.append(json.loads(json.dumps(state)))

        self.agents.stand_in = SimpleNamespace(save=save, event_came=lambda *_: None)  # type: ignore[assignment]

    @property
    def cause(self) -> str:
        return describe_exits(self.ends) if self.ends else ""


@pytest.fixture
def notebook():
    made = Notebook()
    made.come("h1", "h2", "h3")
    return made


def test_an_exit_code_is_the_cause_once_all_other_hosts_have_been_heard(notebook):
    notebook.say("h1", ABORT)
    notebook.say("h1", ENDED_TOO)
    for host in ("h2", "h3", "h2"):
        notebook.say(host, BEAT)
        assert notebook.cause == ""
    notebook.say("h3", BEAT)
    assert notebook.cause == "Rank 0 ended with exit code 14."


def test_hosts_need_not_beat_in_turns(notebook):
    notebook.say("h1", ABORT)
    for host in ("h2", "h2", "h2", "h3"):
        notebook.say(host, BEAT)
        assert notebook.cause == ""
    notebook.say("h3", BEAT)
    assert notebook.cause == "Rank 0 ended with exit code 14."


def test_a_rank_that_was_killed_comes_before_the_ranks_that_mpi_ended_for_it(notebook):
    notebook.say("h1", ENDED_TOO)
    notebook.say("h1", ABORT)
    notebook.say("h2", KILLED)
    assert notebook.cause.startswith("Rank 3 was killed by signal 9")


def test_a_host_that_falls_silent_is_the_cause_of_an_exit_code(notebook):
    notebook.say("h3", LATE)  # nothing has happened: it may come back
    assert notebook.cause == ""
    notebook.say("h1", ABORT)
    notebook.say("h3", BEAT)
    notebook.say("h2", LATE)
    assert notebook.cause == "Host h2 is cut off or has crashed: no heartbeat for 4 s."


def test_a_daemon_of_mpi_that_was_killed_is_named_with_its_host(notebook):
    notebook.say("h2", {"event": "launcher_exit", "code": 137})
    notebook.say("h1", {"event": "launcher_exit", "code": 0})
    assert (
        "Host h2 has lost Open MPI's daemon prted, which was killed by signal 9" in notebook.cause
    )


def test_only_the_host_at_fault_is_named_if_the_others_have_not_connected_yet():
    notebook = Notebook()
    notebook.agents.begin()
    assert "no connection from h1, h2, h3." in notebook.agents.where(range(6))
    notebook.say("h2", {"event": "host_down", "why": "was lost: ssh ended"})
    assert notebook.cause == "Host h2 was lost: ssh ended."
    assert "no connection" not in notebook.agents.where(range(6))


@pytest.fixture
def healing(monkeypatch):
    monkeypatch.setenv("ALLRANKS_SPARES", "1")
    made = Notebook(heals=True)
    made.come("h1", "h2", "h3")
    return made


def test_an_end_does_not_wait_for_news_of_a_host_that_is_reported_as_lost(healing):
    # Its relay ends a moment later, which is no news.
    healing.say("h2", {"event": "host_ends", "why": "was lost: its host agent has ended"})
    healing.say("h3", ENDED_TOO | {"rank": 5})
    healing.say("h2", {"event": "host_down", "why": "was lost: ssh ended"})
    for _ in range(2):
        assert [end.rank for end in healing.ends] == [-2]
        healing.say("h1", BEAT)
    assert [end.rank for end in healing.ends] == [-2, 5]


def seats(notebook: Notebook) -> dict[str, list[tuple[int, int]]]:
    return {host: asked.seats for host, asked in notebook.asked.items()}


def test_a_spare_process_of_the_same_host_takes_the_place_of_a_dead_rank(healing):
    # Of each host's three processes the last is spare: 2, 5 and 8.
    assert healing.agents.seat_spares([3]) == ""
    assert seats(healing) == {"h1": [], "h2": [[5, 3]], "h3": []}
    assert all(asked.dead == [3] for asked in healing.asked.values())


def test_a_process_that_waits_since_a_try_that_failed_is_asked_again(healing):
    healing.agents.seat_spares([3])
    assert healing.agents.seat_spares([1, 3]) == ""
    assert seats(healing) == {"h1": [[2, 1]], "h2": [[5, 3]], "h3": []}


def test_a_host_without_spare_processes_takes_one_of_another_host(healing):
    healing.agents.seat_spares([3])
    healing.say("h2", {"event": "exit", "rank": 3, "pid": 7, "code": -9, "by_launcher": False})
    healing.say("h1", {"event": "spare_exit", "place": 2, "code": -9})
    assert healing.agents.seat_spares([3]) == ""
    assert seats(healing) == {"h1": [], "h2": [], "h3": [[8, 3]]}


def test_a_spare_process_that_dies_before_it_has_its_place_makes_way_for_another_one(healing):
    healing.agents.seat_spares([3])
    healing.say("h2", {"event": "spare_exit", "place": 5, "code": -9})
    assert healing.agents.seat_spares([3]) == ""
    assert seats(healing) == {"h1": [[2, 3]], "h2": [], "h3": []}


def test_if_none_is_left_the_problem_says_how_to_have_more(healing):
    problem = healing.agents.seat_spares([0, 1, 2, 3])
    assert problem.startswith("expected a spare process for each of ranks 0–3, found 3")
    assert problem.endswith(
        "set ALLRANKS_SPARES before the start, for example: %env ALLRANKS_SPARES=2"
    )


def test_a_death_that_can_be_replaced_is_reported_at_once(healing):
    healing.say("h1", ABORT)
    assert healing.cause == "Rank 0 ended with exit code 14."


def test_deaths_of_the_ranks_of_an_earlier_relocation_are_not_reported(healing):
    healing.say("h3", {"event": "host_silent"})
    healing.agents.relocate()
    healing.say("h2", {"event": "host_silent"})
    healing.agents.relocate()
    first, last = (name for host, name in healing.again if host == "h1")
    healing.ends.clear()
    healing.say("h1", {"event": "host_again", "relocation": first})
    healing.say("h1", KILLED)
    assert healing.cause == ""
    healing.say("h1", {"event": "host_again", "relocation": last})
    healing.say("h1", KILLED)
    assert healing.cause.startswith("Rank 3 was killed by signal 9")


def test_the_first_host_begins_last_because_commands_for_the_others_follow_from_its_news(healing):
    assert healing.begun == ["h3", "h2", "h1"]
    healing.agents.relocate()
    assert healing.begun[3:] == ["h3", "h2", "h1"]


def test_ranks_cannot_start_again_without_a_host(healing):
    for host in ("h1", "h2", "h3"):
        healing.say(host, {"event": "host_silent"})
    assert not healing.agents.relocate()
    assert not healing.again


def test_the_next_notebook_gets_the_record_of_a_recovery(healing):
    healing.save_states()
    healing.agents.note({"copies": [0, 1]})
    healing.agents.relocate()
    assert healing.states[-1]["record"] == {"copies": [0, 1]}
    assert healing.states[-1]["starts_again"]


def test_a_choice_of_spare_processes_is_saved_before_they_hear_of_it(healing):
    healing.save_states()
    healing.agents.seat_spares([3])
    assert healing.states[0]["seated"] == [[3, ["h2", 5]]]
    assert min(healing.saved_before) == 1


def test_a_rank_stays_dead_for_the_next_notebook_until_its_replacement_has_joined(healing):
    healing.save_states()
    killed = KILLED | {"pid": 7}
    healing.say("h2", killed)
    healing.agents.seat_spares([3])
    healing.say("h2", {"event": "replaces", "rank": 3, "pid": 8})
    assert [end["pid"] for end in healing.states[-1]["dead"]] == [7]
    assert healing.states[-1]["replaced"] == [[3, 8]]
    healing.say("h2", killed)  # an event that another notebook could not confirm
    assert healing.states[-1]["seated"] == [[3, ["h2", 5]]]
    healing.agents.say(RanksUp())
    assert healing.states[-1]["dead"] == []
    healing.say("h2", killed | {"pid": 8})
    healing.agents.say(RanksUp())
    assert [end["pid"] for end in healing.states[-1]["dead"]] == [8]


def test_a_death_that_is_told_again_leaves_the_choice_of_its_spare_process(healing):
    healing.save_states()
    healing.say("h2", KILLED)
    healing.agents.seat_spares([3])
    healing.say("h2", KILLED)
    healing.agents.seat_spares([3])
    assert seats(healing) == {"h1": [], "h2": [[5, 3]], "h3": []}
    assert healing.states[-1]["spares_on"] == {"h1": [2], "h2": [], "h3": [8]}


def test_the_next_notebook_knows_which_processes_were_to_replace_ranks(healing):
    healing.save_states()
    healing.say("h2", KILLED | {"pid": 7})
    healing.agents.seat_spares([3])
    healing.say("h2", {"event": "replaces", "rank": 3, "pid": 8})
    found: list[Event] = []
    healing.wire.take_over = lambda hosts: None
    MultiHostAgents(
        HostsContext(
            healing.agents._launcher,
            healing.agents._config,
            healing.wire,
            lambda event, host: found.append(event),
            TakenHosts(healing.agents.stand_in, healing.states[-1], [], {}),
        )
    )
    assert found == [Exit(3, 7, -9, False), Replaces(3, 8)]


class Network:
    """Three hosts that take part in a test of the network; ``blocked`` are the hosts that do not
    reach h3, in each round.
    """

    def __init__(self, *blocked: set[str]) -> None:
        self._blocked = list(blocked)
        self._asked: list[tuple[str, str, str]] = []
        self.test = NetworkTest(dict.fromkeys(("h1", "h2", "h3"), "10.0.0.1"), self._command)
        self.test.begin()
        while self._asked:
            self._answer(*self._asked.pop(0))

    def _command(self, host: str, word: str, line: str) -> None:
        self._asked.append((host, word, line))

    def _answer(self, host: str, word: str, line: str) -> None:
        if word == "listen":
            self.test.take(HostListens(line, 7), host)
            return
        name, _ = json.loads(line)
        found = {"h3": "no answer within 2.5 s"} if host in self._blocked[0] else {}
        if host == "h3":
            self._blocked.pop(0)
        self.test.take(HostConnected(name, found), host)


def test_hosts_that_cannot_connect_twice_are_named():
    found = Network({"h1", "h2"}, {"h1"}).test
    assert found.over
    assert found.problems() == [
        "h1 cannot connect to h3 (10.0.0.1, port 7): no answer within 2.5 s"
    ]


def test_a_host_that_stood_still_during_one_test_is_not_behind_a_firewall():
    found = Network({"h1", "h2"}, set()).test
    assert found.over
    assert found.problems() == []


def test_late_answers_to_an_earlier_test_of_the_network_do_not_count(notebook):
    notebook.agents.test_network()
    early = {"event": "host_connected", "test": "of another notebook", "problems": {"h1": "-"}}
    notebook.say("h2", early)
    assert notebook.agents.test_network().problems() == []
    other = Notebook()
    other.come("h1", "h2", "h3")
    other.say("h2", early)  # it has no test
    assert not other.ends


def test_an_event_that_is_unknown_is_shown_and_ends_nothing(notebook):
    notebook.say("h1", {"event": "reboots"})
    [text] = notebook.notices
    assert "expected a known event and its fields, found 'reboots'" in text
    assert not notebook.ends


def test_ipyparallels_controller_on_the_first_host_is_told_of_deaths_elsewhere(healing):
    healing.say("h1", ABORT)
    healing.say("h2", KILLED)
    assert healing.died == [("h1", ReportDeath(3, 1))]
