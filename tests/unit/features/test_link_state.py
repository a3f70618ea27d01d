"""What the link of a relay to the notebook decides: sequences of events, and the commands."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.engine.host.events import TimeCame
from allranks.features.hosts.link_state import (
    Connected,
    Greet,
    Interrupted,
    LinkState,
    NotebookSent,
    Obey,
    Post,
    Probe,
    Refused,
    RelaySends,
)
from allranks.records.limits import BEAT_SECONDS
from allranks.records.numbered import BEGIN

LEASE = 30.0
COMMANDS, EVENTS = Connected(of_commands=True), Connected(of_commands=False)
#: How long before its end an interruption has been found.
FOUND_AFTER = 4.0


class Link:
    """A connection's state, with a clock that stands until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.state = LinkState("h1", LEASE, self.now)

    def apply(self, *events: Any) -> list[Any]:
        return [command for event in events for command in self.state.apply(event, self.now)]

    def look(self, seconds: float = 0.0) -> list[Any]:
        """What comes of the time, without heartbeats."""
        self.now += seconds
        found = self.apply(TimeCame())
        return [each for each in found if not isinstance(each, Post)]

    def send(self, *texts: bytes) -> list[Post]:
        return self.apply(*(RelaySends([text]) for text in texts))

    def say(self, *frames: bytes) -> list[Any]:
        return self.apply(NotebookSent(frames))


def post(number: int, text: bytes) -> Post:
    return Post([b"host", b"h1", b"%d" % number, text])


@pytest.fixture
def link():
    made = Link()
    assert made.apply(COMMANDS, EVENTS) == [Greet([b"0", b""]), Post([BEGIN, b"h1", b"", b"1"])]
    return made


def test_messages_are_sent_again_on_a_new_connection_until_they_are_confirmed(link):
    assert link.send(b"a", b"b", b"c") == [post(1, b"a"), post(2, b"b"), post(3, b"c")]
    assert link.say(b"", b"1") == []
    begin = Post([BEGIN, b"h1", b"", b"2"])
    assert link.apply(EVENTS) == [begin, post(2, b"b"), post(3, b"c")]
    link.say(b"", b"3")
    assert link.apply(EVENTS) == [Post([BEGIN, b"h1", b"", b"4"])]


def test_a_command_that_comes_twice_is_obeyed_once_and_none_is_left_out(link):
    assert link.say(b"1", b"say", b"x") == [Obey([b"say", b"x"])]
    assert link.say(b"1", b"say", b"x") == []
    assert link.say(b"3", b"say", b"z") == []
    assert link.say(b"2", b"say", b"y") == [Obey([b"say", b"y"])]
    assert link.apply(COMMANDS) == [Greet([b"2", b""])]


def test_another_notebook_counts_from_1_again_and_gets_what_the_last_one_has_not_confirmed(link):
    link.say(b"1", b"say", b"x")
    link.send(b"a")
    assert link.say(BEGIN, b"next") == [Post([BEGIN, b"h1", b"next", b"1"]), post(1, b"a")]
    assert link.say(b"1", b"reconnect", b"") == [Obey([b"reconnect", b""])]
    assert link.say(BEGIN, b"next")[0] == Post([BEGIN, b"h1", b"next", b"1"])
    assert link.say(b"1", b"reconnect", b"") == []  # a second greeting changes nothing


def test_a_heartbeat_is_sent_when_it_is_due(link):
    beat = Post([b"beat", b"h1", b"0", b""])
    assert link.apply(TimeCame(), TimeCame()) == [beat]
    link.now += BEAT_SECONDS
    assert link.apply(TimeCame()) == [beat]


def test_an_interruption_is_over_in_time_or_with_it_the_link(link):
    link.apply(Interrupted())
    assert link.look(LEASE - FOUND_AFTER - 1) == [Probe()]
    link.apply(COMMANDS)
    assert link.look(LEASE) == []
    link.apply(Interrupted(), Interrupted())
    link.look(LEASE - FOUND_AFTER - 1)
    link.apply(Interrupted())  # it is the same one
    assert not link.state.over
    assert link.look(1) == []
    assert link.state.over == "it was interrupted for 30 s"
    link.apply(Refused())
    assert link.state.over == "it was interrupted for 30 s"


def test_a_notebook_that_cannot_be_reached_at_first_has_the_whole_lease():
    link = Link()
    assert link.look(LEASE - 1) == [Probe()]
    link.look(1)
    assert link.state.over == "it was interrupted for 30 s"


def test_a_notebook_that_has_ended_is_found_at_once_unless_its_ranks_stay(link):
    link.apply(Interrupted())
    assert link.look() == [Probe()]
    assert link.look() == []
    assert link.look(BEAT_SECONDS) == [Probe()]
    link.state.stays = True
    assert link.look(BEAT_SECONDS) == []
    link.apply(Refused())
    assert link.state.over == "the notebook's port was closed"
    link.look(LEASE)
    assert link.state.over == "the notebook's port was closed"


def test_the_connection_of_events_may_be_interrupted_alone(link):
    assert link.look(2 * LEASE) == []
    assert not link.state.over
