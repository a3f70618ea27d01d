"""What ranks of one host tell goes to the notebook as few messages, whole and in order."""

import os

import pytest
import zmq

from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.launcher import ANY_PORTS, LOOPBACK
from allranks.cluster.sockets import Event, EventQueue, FromRank, ListeningSockets, RankSockets
from allranks.engine.host import relay
from allranks.engine.host.relay import Batching
from allranks.errors import WireError
from allranks.records.telemetry import Pulse
from allranks.records.wire import Answer, Output, encode, join_messages, split_messages
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
    texts = [bytes(frame) for frames in sent for frame in frames if bytes(frame).startswith(b'["O')]
    assert texts == output(1, "b") * len(bad)


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
