"""What ranks of one host tell goes to the notebook as few messages, whole and in order."""

import json
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.launcher import ANY_PORTS, LOOPBACK
from allranks.cluster.sockets import Event, EventQueue, FromRank, ListeningSockets, RankSockets
from allranks.engine.host import relay
from allranks.engine.host.relay import Batching
from allranks.errors import WireError
from allranks.records.telemetry import Pulse
from allranks.records.wire import (
    SENDERS,
    Answer,
    Output,
    decode,
    encode,
    join_messages,
    read_senders,
    split_messages,
    with_senders,
)
from tests.kernel import wait_until


def output(rank: int, text: str) -> list[bytes]:
    return encode(Output(rank, 1, (["out", text],), 0, 0, 9))


def answer(rank: int, *payloads: bytes) -> list[bytes]:
    return encode(Answer(1, rank, {}, ""), *payloads)


class Host:
    """A relay's part, with a socket that its ranks tell it something on, and one that sends."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.rank, self.told = self._pair("inproc://ranks")
        events, self.notebook = self._pair("inproc://notebook")
        self.batching = Batching(events.send_multipart)

    def _pair(self, url: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        near, far = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        far.bind(url)
        near.connect(url)
        return near, far

    def tell(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.rank.send_multipart(frames)
        self.batching.drain(self.told)

    def heard(self) -> list[list[list[bytes]]]:
        found = []
        while self.notebook.poll(0):
            found.append(list(split_messages(self.notebook.recv_multipart())))
        return found


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(relay, "TICK_SECONDS", 1000.0)
    made = Host()
    made.tell(output(0, "after a silence"))
    assert made.heard() == [[output(0, "after a silence")]]
    yield made
    made.context.destroy(0)


def test_output_and_telemetry_wait_for_each_other_and_go_before_what_does_not_wait(host):
    pulse = encode(Pulse(0, 1, "", "", 0, 0, 0))
    host.tell(output(0, "a"), output(1, "b"))
    host.tell(pulse, output(0, "c"))
    assert host.heard() == []
    assert 0 < host.batching.left_seconds <= 1000
    host.tell(answer(1, b"with", b"more"))
    waited = [output(0, "a"), output(1, "b"), pulse, output(0, "c")]
    assert host.heard() == [[*waited, answer(1, b"with", b"more")]]
    assert host.batching.left_seconds == float("inf")


def test_what_is_large_keeps_nothing_waiting_and_what_waits_goes_in_time(host, monkeypatch):
    large = answer(1, bytes(1 << 20))
    host.tell(output(0, "a"), large, output(0, "b"), answer(0))
    assert host.heard() == [[output(0, "a")], [large], [output(0, "b"), answer(0)]]
    host.tell(output(0, "a"))
    assert host.heard() == []
    monkeypatch.setattr(relay, "TICK_SECONDS", 0.0)
    assert host.batching.left_seconds == 0
    host.tell(output(1, "b"))
    assert host.heard() == [[output(0, "a"), output(1, "b")]]


BAD_BATCHES = [
    [b"batch"],
    [b"batch", b"{"],
    [b"batch", b"[2]", b"x"],
    [b"batch", b"[0]"],
    [b"batch", b"[Infinity]", b"x"],
    [b"batch", b"[true]", b"x"],
    [b"batch", b"[" * 100_000, b"x"],
    [b"batch", b"1", b"x"],
]


def test_what_cannot_be_read_costs_its_rank_and_nothing_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "TICK_SECONDS", 0.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rank, told = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    told.bind(f"ipc://{tmp_path}/events")
    rank.connect(f"ipc://{tmp_path}/events")
    sent: list[list[bytes]] = []
    refused: list[int] = []
    batching = Batching(sent.append, lambda pid, why: refused.append(pid))  # type: ignore[arg-type]
    bad = [*BAD_BATCHES, [b"what"], [b"\xff"], [b"[1, 2]"], [b"{}"]]
    try:
        for frames in bad:
            rank.send_multipart(frames)
            rank.send_multipart(output(1, "b"))

        def all_came() -> bool:
            batching.drain(told)
            return len(refused) == len(bad)

        wait_until(all_came)
        batching.drain(told)
        batching.send()
    finally:
        context.destroy(0)
    assert refused == [os.getpid()] * len(bad)
    for senders, pids, *frames in sent:
        assert senders == SENDERS
        assert read_senders(bytes(pids)) == [os.getpid()] * len(split_messages(frames))
    texts = [bytes(frame) for frames in sent for frame in frames if bytes(frame).startswith(b'["O')]
    assert texts == output(1, "b") * len(bad)


@pytest.mark.parametrize("frames", [[b"what"], *BAD_BATCHES])
def test_what_an_unknown_process_sends_and_cannot_be_read_is_reported_by_the_notebook(host, frames):
    """As on a system that does not name the process at the other end of a socket."""
    host.tell(frames, output(1, "b"))
    host.batching.send()
    bad, good = [message for batch in host.heard() for message in batch]
    assert good == output(1, "b")
    with pytest.raises(WireError):
        decode(bad)


@pytest.mark.parametrize(("pids", "pid"), [([7, 8], 8), ([], 0)])
def test_a_bad_record_from_another_host_is_the_senders_whatever_rank_it_names(pids, pid):
    inbox = EventQueue()
    wire = RankSockets(inbox, NotebookHooks(()), ListeningSockets.open(LOOPBACK, ANY_PORTS))
    try:
        frames = join_messages([output(0, "a"), [b'["Output", {"rank": 0}]']])
        frames = with_senders(frames, pids) if pids else frames
        wire._take([b"host", b"h1", b"1", *frames])
        good, error = [*inbox.wait(0), *inbox.wait(0)][:2]
        assert isinstance(good, FromRank)
        assert isinstance(error, WireError)
        assert (error.host, error.pid, error.rank) == ("h1", pid, 0)
    finally:
        wire.close()


@pytest.mark.parametrize("line", [b"", b"{}", b"[1.5]", b"[" * 9000, b"\xff", b"[true]"])
def test_senders_that_cannot_be_read_are_unknown(line):
    assert read_senders(line) == []


@pytest.mark.parametrize(
    ("host", "pid", "ends"),
    [
        ("", 8, ["* pid 8"]),
        ("", 0, ["* rank 1"]),
        ("h1", 8, ["h1 pid 8"]),
        ("h2", 0, ["h2 rank 1"]),
        ("h1", 0, []),  # where no rank 1 is
    ],
)
def test_only_the_host_that_has_sent_a_bad_record_ends_a_rank(host, pid, ends):
    said: list[str] = []

    def note(place: str, line: str) -> None:
        told = json.loads(line.removeprefix("end "))
        said.extend(f"{place} {name} {told[name]}" for name in ("pid", "rank") if name in told)

    error = WireError("bad")
    error.host, error.pid, error.rank = host, pid, 1
    ranks: Any = SimpleNamespace(
        size=2,
        _agents=[SimpleNamespace(say=lambda line: note("*", line))],
        _wire=SimpleNamespace(
            host_of={0: "h1", 1: "h2"}, command=lambda host, word, line: note(host, line)
        ),
    )
    ranks._say_end = partial(Connection._say_end, ranks)
    assert Connection._end_sender(ranks, error) == bool(ends)
    assert said == ends


@pytest.mark.parametrize("frames", BAD_BATCHES)
def test_a_batch_that_is_none_is_refused(frames):
    with pytest.raises(WireError):
        list(split_messages(frames))


def test_what_cannot_be_read_takes_nothing_along():
    inbox = EventQueue()
    wire = RankSockets(inbox, NotebookHooks(()), ListeningSockets.open(LOOPBACK, ANY_PORTS))
    wire.listen()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    relay = context.socket(zmq.PUSH)
    public, secret = zmq.curve_keypair()
    relay.curve_serverkey = wire.key.encode()
    relay.curve_publickey, relay.curve_secretkey = public, secret
    relay.connect(wire.events_url)
    try:
        relay.send_multipart(join_messages([output(0, "a"), [b"what"], output(1, "b")]))
        events: list[Event] = []

        def all_came() -> bool:
            events.extend(inbox.wait(0.1))
            return len(events) == 3

        wait_until(all_came)
        read = [one.record for one in events if isinstance(one, FromRank)]
        assert [record.rank for record in read if isinstance(record, Output)] == [0, 1]
        assert len([one for one in events if isinstance(one, Exception)]) == 1
    finally:
        wire.close()
        context.destroy(0)
