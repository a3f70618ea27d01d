"""What the caretaker decides: sequences of events, and the commands that come of them."""

import json
from typing import Any

import pytest

from allranks.engine.host.events import NotebookSaid, Terminated, TimeCame
from allranks.features.attach.caretaker_state import (
    CaretakerState,
    CloseDoor,
    HandOver,
    HostGreeted,
    HostSent,
    Listen,
    NobodyCame,
    NotebookAttached,
    OwnerLeft,
    SetStay,
    ShowRunning,
    ToHost,
)
from allranks.features.attach.records import CaretakerConfig, HostRuns, Keep, Running, Stay
from allranks.records.agent import (
    Admitted,
    Event,
    Exit,
    HostDown,
    HostEnds,
    HostSilent,
    LauncherExit,
    LauncherText,
    Replaces,
    SeatSpares,
    Stop,
    to_line,
)
from allranks.records.config import HostAgentConfig
from allranks.records.limits import BEAT_SECONDS, STOP_SECONDS
from allranks.records.numbered import BEGIN

LEASE, OWNER, FOREVER = 30.0, b"caretaker", float("inf")
KNOWN = {
    **{"hosts": [["h1", 1], ["h2", 1]], "ended": [], "starts_again": False},
    **{"dead": [], "replaced": []},
}


class Care:
    """A caretaker's state, with a clock that stands until a test moves it."""

    def __init__(self, heals: bool = True, **known: Any) -> None:
        ranks = HostAgentConfig(2, (), {}, "", "", "", (), "", "", can_replace=heals)
        fields = json.loads(ranks.to_json())
        self.state = CaretakerState(CaretakerConfig("", fields, "", "", LEASE, (0, 0)))
        self.now = 1000.0
        self._numbers = {"h1": 0, "h2": 0}
        assert self.apply(NotebookSaid(Keep(KNOWN | known))) == []

    def apply(self, *events: Any) -> list[Any]:
        return [command for event in events for command in self.state.apply(event, self.now)]

    def take_over(self, stays: bool = True) -> list[Any]:
        commands = self.apply(OwnerLeft(stays, OWNER))
        for host in self._numbers:
            self.send(host, BEGIN, OWNER, b"1")
        return commands

    def send(self, host: str, kind: bytes, *rest: bytes) -> list[Any]:
        return self.apply(HostSent([kind, host.encode(), *rest]))

    def tell(self, host: str, event: Event, again: bool = False) -> list[Any]:
        self._numbers[host] += not again
        number = b"%d" % self._numbers[host]
        return self.send(host, b"host", number, b"agent", to_line(event))

    def hand_over(self) -> HandOver:
        [found] = self.apply(NotebookAttached())
        assert isinstance(found, HandOver)
        return found


def told(commands: list[Any]) -> list[tuple[str, str]]:
    """Returns the hosts that are told something, and the words."""
    return [(to.name.decode(), to.frames[1].decode()) for to in commands if isinstance(to, ToHost)]


STOPS = [("h1", "stop"), ("h2", "stop")]


@pytest.fixture
def care():
    made = Care()
    made.take_over()
    return made


def test_a_notebook_that_has_the_ranks_only_says_what_it_knows():
    care = Care()
    stay = Stay(60, {"a": 1})
    assert care.apply(NotebookSaid(stay)) == [SetStay(stay)]
    assert care.apply(NotebookSaid(HostRuns("h1", 7))) == [ShowRunning(7)]
    assert care.apply(NotebookSaid(HostRuns("h2", 3))) == [ShowRunning(7)]
    assert care.state.wake_at == FOREVER
    assert care.apply(HostSent([b"beat", b"h1", b"1", b""]), TimeCame()) == []
    with pytest.raises(ValueError, match="expected a command for a caretaker, found Seat"):
        care.apply(NotebookSaid(SeatSpares(1, [], [])))


@pytest.mark.parametrize("event", [NotebookSaid(Stop()), Terminated()])
def test_a_notebook_that_has_the_ranks_ends_them_itself(event):
    care = Care()
    assert care.apply(event) == []
    assert care.state.has_ended
    assert care.apply(OwnerLeft(True, OWNER)) == []


def test_a_notebook_that_ends_before_it_knows_its_hosts_has_nothing_to_care_for():
    ranks = json.loads(HostAgentConfig(2, (), {}, "", "", "", (), "", "").to_json())
    state = CaretakerState(CaretakerConfig("", ranks, "", "", LEASE, (0, 0)))
    assert state.apply(OwnerLeft(True, OWNER), 1.0) == []
    assert state.has_ended


def test_ranks_that_stay_are_disconnected_and_given_to_the_next_notebook():
    care = Care(ended=["h3"])
    commands = care.take_over()
    assert commands[0] == Listen()
    assert told(commands) == [("h1", "disconnect"), ("h2", "disconnect")]
    assert care.take_over() == []  # its input and its process end, both
    care.now += 5
    exit_ = Exit(0, 7, -9, False)
    care.tell("h1", exit_)
    assert care.tell("h1", Running(4)) == [ShowRunning(4)]
    care.tell("h2", LauncherText("text"))
    found = care.hand_over()
    assert found.state == KNOWN | {"ended": ["h3"]}
    assert found.news == [("h1", to_line(exit_).decode())]
    assert found.silent == {"h1": 0.0, "h2": 0.0, "h3": 5.0}
    assert care.state.wake_at == FOREVER
    care.apply(NotebookSaid(Keep(KNOWN)))
    care.take_over()
    assert care.hand_over().news == []


def test_ranks_that_do_not_stay_are_ended():
    care = Care()
    commands = care.take_over(stays=False)
    assert commands[0] == Listen()
    assert told(commands)[2:] == STOPS
    assert not care.state.has_ended


def test_what_happens_to_ranks_that_the_next_notebook_starts_once_more_is_no_news():
    care = Care(starts_again=True)
    care.take_over()
    lost = HostEnds("its daemon has ended")
    for event in (Exit(0, 7, -9, False), Running(3), lost):
        care.tell("h1", event)
    assert care.hand_over().news == [("h1", to_line(lost).decode())]


def test_a_host_that_connects_again_gets_what_it_has_not_confirmed(care):
    first = told(care.apply(HostGreeted([b"h1", b"0", b"another"])))
    assert first == [("h1", OWNER.decode()), ("h1", "disconnect")]
    assert told(care.apply(HostGreeted([b"h1", b"0", OWNER]))) == [("h1", "disconnect")]
    assert care.apply(HostGreeted([b"h1", b"1", OWNER])) == []
    assert care.apply(HostGreeted([b"h9", b"0", OWNER])) == []


def test_an_event_that_comes_twice_changes_nothing(care):
    for again in (False, True):
        care.tell("h1", Exit(0, 7, -9, False), again)
    assert len(care.hand_over().news) == 1


@pytest.mark.parametrize(
    "known", [{"replaced": [[0, 8]]}, {"replaced": [[0, 8]], "dead": [{"rank": 0, "pid": 7}]}]
)
def test_the_end_of_a_process_that_was_replaced_leaves_its_rank_alive(known):
    care = Care(**known)
    care.take_over()
    care.tell("h1", Exit(0, 7, -9, False))  # the notebook had it, and could not confirm it
    care.tell("h2", Exit(1, 9, -9, False))
    assert told(care.tell("h2", Exit(0, 8, -9, False))) == STOPS


def test_ranks_end_when_the_last_one_has_died_for_which_no_other_process_has_come(care):
    care.tell("h1", Exit(0, 7, -9, False))
    care.tell("h2", Replaces(0, 8))
    care.tell("h1", Exit(0, 7, -9, False))
    assert told(care.tell("h2", Exit(1, 9, -9, False))) == []
    care.tell("h2", Admitted(1))
    assert told(care.tell("h2", Exit(0, 8, -9, False))) == []
    care.tell("h1", Replaces(0, 10))
    assert told(care.tell("h1", Exit(1, 11, -9, False))) == []
    assert told(care.tell("h1", Exit(0, 10, -9, False))) == STOPS


@pytest.mark.parametrize("event", [NobodyCame(), Terminated()])
def test_ranks_that_end_are_not_found_any_more_and_are_gone_once_each_host_is(care, event):
    door, *stops = care.apply(event)
    assert door == CloseDoor()
    assert told(stops) == STOPS
    assert care.apply(event) == []
    assert care.tell("h1", HostDown("was told to stop")) == [ShowRunning(0)]
    assert not care.state.has_ended
    care.tell("h2", HostDown("was told to stop"))
    assert care.state.has_ended


def test_a_host_that_cannot_be_reached_is_left_to_itself(care):
    care.apply(NobodyCame())
    care.now += LEASE / 2
    assert care.state.wake_at == care.now - LEASE / 2 + STOP_SECONDS
    assert care.apply(TimeCame()) == []
    assert care.state.has_ended


def test_a_silent_host_is_lost_and_stopped_once_it_comes_back(care):
    care.now = early = care.state.wake_at - BEAT_SECONDS
    care.tell("h1", Running(4))
    assert care.apply(TimeCame()) == []
    care.now += BEAT_SECONDS
    assert care.apply(TimeCame()) == [ShowRunning(4)]
    assert care.apply(TimeCame()) == []
    assert care.state.wake_at > early + LEASE
    assert ("h2", "stop") in told(care.apply(HostGreeted([b"h2", b"0", OWNER])))
    care.tell("h2", Exit(1, 9, -9, False))  # of a lost host
    assert care.hand_over().news == [("h2", to_line(HostSilent()).decode())]


def test_a_host_that_sends_too_many_events_is_lost(care):
    large = LauncherExit(0), Exit(1, 9, -9, False, "x" * (2 << 20))
    assert care.tell("h2", large[1]) == []
    assert care.tell("h2", large[1]) == [ShowRunning(0)]
    assert care.hand_over().news[-1] == ("h2", to_line(HostSilent()).decode())


def test_ranks_without_mpis_job_end_unless_a_host_is_found_to_be_lost_meanwhile():
    for lost in (False, True):
        care = Care()
        care.take_over()
        care.tell("h2", LauncherExit(1))  # only the daemon of that host
        care.now += 5
        care.tell("h1", LauncherExit(1))
        over_at = care.now + LEASE + 2 * BEAT_SECONDS
        care.now = over_at - 1
        care.tell("h1", Running(0))
        care.tell("h2", HostDown("was lost") if lost else Running(0))
        assert care.state.wake_at == over_at
        care.now = over_at
        assert told(care.apply(TimeCame())) == ([] if lost else STOPS)
        assert care.state.wake_at > care.now


def test_the_end_of_mpis_job_on_another_host_than_the_first_ends_nothing(care):
    care.tell("h2", LauncherExit(1))
    for _ in range(3):
        care.now += LEASE
        care.tell("h1", Running(0))
        care.tell("h2", Running(0))
        assert care.apply(TimeCame()) == []


def test_ranks_that_a_notebook_starts_again_have_another_job():
    care = Care()
    care.take_over()
    care.tell("h1", LauncherExit(1))
    care.hand_over()
    for starts_again in (True, False):
        care.apply(NotebookSaid(Keep(KNOWN | {"starts_again": starts_again})))
    care.now += LEASE
    care.take_over()
    care.now += 3 * BEAT_SECONDS
    assert care.apply(TimeCame()) == []


def test_ranks_that_are_not_replaced_end_at_once_with_mpis_job():
    care = Care(heals=False)
    care.take_over()
    care.tell("h1", LauncherExit(1))
    assert care.state.wake_at <= care.now
    assert told(care.apply(TimeCame())) == STOPS


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"host", b"h1"],
        [b"host", b"h1", b"x", b"agent", b"{}"],
        [b"host", b"h1", b"1", b"agent", b'{"event": "none"}'],
        [b"host", b"h1", b"1", b"agent", b'{"event": "running", "cell": -1}'],
        [b"host", b"h1", b"1", b"agent", to_line(Exit(2, 7, -9, False))],
        [b"beat", b"\xff", b"1", b""],
    ],
)
def test_what_a_host_sends_that_cannot_be_read_changes_nothing(care, frames):
    assert care.apply(HostSent(frames)) == []
    assert care.apply(HostGreeted(frames)) == []
    assert care.hand_over().news == []
