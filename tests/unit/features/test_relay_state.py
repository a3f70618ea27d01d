"""What a host's relay decides: sequences of events, and the commands that come of them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from allranks.engine.host.events import Terminated, TimeCame
from allranks.errors import WireError
from allranks.features.hosts.relay_state import (
    TICK_SECONDS,
    AgentEnded,
    AgentWrote,
    Begin,
    Begun,
    ConnectRanks,
    Disconnect,
    NotBegun,
    NotebookLost,
    NotebookWrote,
    OutliveNotebook,
    RankSent,
    RanksRead,
    ReadRanks,
    RelayState,
    RemoveFolder,
    StarterEnded,
    ToAgent,
    ToNotebook,
    ToRanks,
    TryNetwork,
)
from allranks.records.agent import BeginAgain, End, read_command, to_line
from allranks.records.config import HostAgentConfig
from allranks.records.ranks import RUNNING
from allranks.records.telemetry import Pulse
from allranks.records.wire import (
    SENDERS,
    Answer,
    Output,
    decode,
    encode,
    read_senders,
    split_messages,
)

CONFIG = HostAgentConfig(
    2, ("false",), {}, "/tmp/session", "/logs", "/work", (), "ipc://c", "ipc://e"
)
LATER = dataclasses.replace(CONFIG, relocation=1)
FOREVER = float("inf")
BEGIN_AGAIN = ToAgent(to_line(BeginAgain()))


def output(rank: int, text: str) -> list[bytes]:
    return encode(Output(rank, 1, (["out", text],), 0, 0, 9))


def answer(rank: int, *payloads: bytes) -> list[bytes]:
    return encode(Answer(1, rank, {}, ""), *payloads)


PULSE = encode(Pulse(0, 1, RUNNING, "", 0, 0, 0))


class Host:
    """A relay's state, with a clock that stands until a test moves it."""

    def __init__(self) -> None:
        self.state = RelayState()
        self.now = 1000.0

    def apply(self, *events: Any) -> list[Any]:
        return [command for event in events for command in self.state.apply(event, self.now)]

    def say(self, word: str, text: str = "", *more: bytes) -> list[Any]:
        return self.apply(NotebookWrote([word.encode(), text.encode(), *more]))

    def begin(self) -> None:
        assert self.say("config", CONFIG.to_json()) == [Begin(CONFIG)]
        assert self.apply(Begun()) == []

    def send(self, *messages: Sequence[bytes], pid: int = 0) -> list[list[list[bytes]]]:
        """What the notebook gets, message by message, after ranks have sent these at once."""
        return sent(self.apply(*(RankSent(pid, frames) for frames in messages), RanksRead()))


def sent(commands: list[Any]) -> list[list[list[bytes]]]:
    return [split_messages(list(one.frames)) for one in commands if isinstance(one, ToNotebook)]


def news(command: Any) -> dict[str, Any]:
    assert command.frames[0] == b"agent"
    found: dict[str, Any] = json.loads(command.frames[1])
    return found


@pytest.fixture
def host():
    made = Host()
    # After a silence nothing waits.
    assert made.send(output(0, "first")) == [[output(0, "first")]]
    return made


@pytest.fixture
def begun(host):
    host.begin()
    return host


def test_output_and_telemetry_wait_for_each_other_and_go_before_what_does_not_wait(host):
    assert host.send(output(0, "a"), output(1, "b")) == []
    assert host.send(PULSE, output(0, "c")) == []
    assert host.state.wake_at == host.now + TICK_SECONDS
    waited = [output(0, "a"), output(1, "b"), PULSE, output(0, "c")]
    assert host.send(answer(1, b"with", b"more")) == [[*waited, answer(1, b"with", b"more")]]
    assert host.state.wake_at == FOREVER


def test_what_waits_goes_in_time(host):
    assert host.send(output(0, "a")) == []
    assert host.apply(TimeCame()) == []
    host.now = host.state.wake_at
    assert sent(host.apply(TimeCame())) == [[output(0, "a")]]
    assert host.apply(TimeCame()) == []


def test_what_is_large_keeps_nothing_waiting(host):
    large = answer(1, bytes(1 << 20))
    assert host.send(output(0, "a"), large, output(0, "b"), answer(0)) == [
        [output(0, "a")],
        [large],
        [output(0, "b"), answer(0)],
    ]


BAD = (
    *([b"batch"], [b"batch", b"{"], [b"batch", b"[2]", b"x"], [b"batch", b"[0]"]),
    *([b"batch", b"[Infinity]", b"x"], [b"batch", b"[true]", b"x"], [b"batch", b"1", b"x"]),
    *([b"batch", b"[" * 9000, b"x"], [b"what"], [b"\xff"], [b"[1, 2]"], [b"{}"]),
)


@pytest.mark.parametrize("frames", BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_ends_its_rank_and_takes_nothing_along(begun, frames):
    commands = begun.apply(
        RankSent(7, output(0, "a")), RankSent(8, frames), RankSent(9, answer(1)), RanksRead()
    )
    end, batch = commands
    assert (ended := read_command(end.line)) == End(ended.why, 8)  # type: ignore[attr-defined]
    senders, pids, *rest = batch.frames
    assert (senders, read_senders(pids)) == (SENDERS, [7, 9])
    assert split_messages(rest) == [output(0, "a"), answer(1)]


@pytest.mark.parametrize("frames", BAD, ids=range(len(BAD)))
def test_what_an_unknown_process_sends_and_cannot_be_read_is_reported_by_the_notebook(host, frames):
    """As on a system that does not name the process at the other end of a socket."""
    [[bad, good]] = host.send(frames, answer(1))
    assert good == answer(1)
    with pytest.raises(WireError):
        decode(bad)


def test_messages_of_a_rank_come_before_the_news_of_its_death_which_may_come_in_pieces(begun):
    begun.send(output(0, "last"))
    assert begun.apply(AgentWrote(b'{"event": "ex')) == []
    batch, one, two = begun.apply(AgentWrote(b'it"}\n{"event": "notice"}\n{'))
    assert sent([batch]) == [[output(0, "last")]]
    assert [news(one)["event"], news(two)["event"]] == ["exit", "notice"]


def test_commands_reach_ranks_and_agent(begun):
    assert begun.say("ranks", "[0, 2]", b"x", b"y") == [ToRanks([0, 2], (b"x", b"y"))]
    assert begun.say("say", "seat 1") == [ToAgent(b"seat 1")]
    assert begun.say("listen", "n") == [TryNetwork("listen", "n")]
    assert begun.say("connect", "[]") == [TryNetwork("connect", "[]")]


@pytest.mark.parametrize("frames", [[b"what", b""], [b"what"], []])
def test_what_is_no_command_is_told_and_ends_no_rank(begun, frames):
    [told] = begun.apply(NotebookWrote(frames))
    assert news(told)["text"].startswith("expected a command for the ranks of a host, found b'")
    assert not begun.state.why


def test_before_the_agent_is_there_nothing_is_said_to_it(host):
    assert host.say("say", "seat 1") == []
    assert host.apply(RankSent(8, [b"what"]), RanksRead()) == []


def test_a_host_begins_again_when_its_agent_has_ended_the_ranks(begun):
    assert begun.say("stay", "for 60 s") == [OutliveNotebook(), ToAgent(b"for 60 s")]
    assert begun.say("again", LATER.to_json()) == [BEGIN_AGAIN]
    begun.send(output(0, "late"))
    assert begun.say("say", "seat 1") == []  # that is for then
    assert begun.apply(RankSent(8, [b"what"])) == []  # ends with the others
    batch, again, read = begun.apply(AgentWrote(b'{"event": "again"}\n'))
    assert sent([batch]) == [[output(0, "late")]]
    assert news(again) == {"event": "again"}
    assert read == ReadRanks()
    batch, *rest, told, begin = begun.apply(RankSent(0, output(1, "later")), RanksRead())
    assert sent([batch]) == [[output(1, "later")]]
    assert rest == [Disconnect(), RemoveFolder("/tmp/session")]
    assert news(told) == {"event": "host_again", "relocation": 1}
    assert begin == Begin(LATER)
    assert begun.apply(Begun()) == [ToAgent(b"for 60 s"), ToAgent(b"seat 1")]
    assert begun.say("say", "seat 2") == [ToAgent(b"seat 2")]


def test_of_two_requests_to_begin_again_the_last_counts(begun):
    last = dataclasses.replace(LATER, relocation=2)
    assert begun.say("again", LATER.to_json()) == [BEGIN_AGAIN]
    begun.say("say", "seat 1")
    assert begun.say("again", last.to_json()) == []
    begun.apply(AgentWrote(b'{"event": "again"}\n'))
    assert begun.apply(RanksRead())[-1] == Begin(last)
    assert begun.apply(Begun()) == []


def test_an_agent_that_ends_instead_of_beginning_again_has_a_successor(begun):
    begun.say("again", LATER.to_json())
    assert begun.apply(AgentEnded()) == [ReadRanks()]
    assert begun.apply(RanksRead())[-1] == Begin(LATER)
    assert not begun.state.why


@pytest.mark.parametrize("again", [False, True])
def test_a_host_that_cannot_begin_says_why_and_ends(host, again):
    if again:
        host.begin()
        host.say("again", LATER.to_json())
        host.apply(AgentEnded(), RanksRead())
    else:
        host.say("config", CONFIG.to_json())
    [told] = host.apply(NotBegun("no room"))
    assert news(told) == {"event": "host_refused", "problem": "no room"}
    assert host.state.why == ("could not begin again" if again else "could not begin")
    assert host.apply(RanksRead()) == []


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (NotebookWrote([b"stop", b""]), "was told to stop"),
        (NotebookLost("its port"), "lost the connection to the notebook: its port"),
        (StarterEnded(), "was lost: its launcher has ended"),
        (Terminated(), "was ended by SIGTERM"),
        (AgentEnded(), "was lost: its host agent has ended"),
    ],
)
def test_the_first_reason_for_the_end_is_told_and_then_nothing_waits(begun, event, why):
    assert begun.apply(event) == []
    assert begun.state.why == why
    begun.apply(Terminated())
    assert begun.state.why == why
    assert begun.send(output(0, "last words")) == [[output(0, "last words")]]


def test_a_host_that_ends_does_not_begin_again(begun):
    begun.say("again", LATER.to_json())
    begun.apply(Terminated())
    assert ReadRanks() not in begun.apply(AgentWrote(b'{"event": "again"}\n'))
    assert begun.apply(AgentEnded()) == []


def test_ranks_that_stay_outlive_the_launcher_and_are_for_the_next_notebook(begun):
    begun.say("stay", "60")
    assert begun.apply(StarterEnded()) == []
    assert not begun.state.why
    begun.send(output(0, "nobody reads this"))
    assert begun.say("disconnect") == [Disconnect()]
    assert begun.say("reconnect") == [Disconnect(), ConnectRanks(), ToNotebook([b"reconnected"])]
    begun.now += TICK_SECONDS
    assert begun.apply(TimeCame()) == []  # what waited was for the notebook before
