"""What ranks of one host tell goes to the notebook as few messages, whole and in order."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.sockets import Event, EventQueue, FromRank, ListeningSockets, RankSockets
from allranks.errors import WireError
from allranks.records.agent import Command, End, read_command
from allranks.records.wire import Answer, Output, encode, join_messages, read_senders, with_senders
from tests.kernel import wait_until


def output(rank: int, text: str) -> list[bytes]:
    return encode(Output(rank, 1, (["out", text],), 0, 0, 9))


def answer(rank: int, *payloads: bytes) -> list[bytes]:
    return encode(Answer(1, rank, {}, ""), *payloads)


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

    def note(place: str, command: Command) -> None:
        assert isinstance(command, End)
        said.append(f"{place} " + (f"pid {command.pid}" if command.pid else f"rank {command.rank}"))

    def send(host: str, word: str, line: str) -> None:
        note(host, read_command(line.encode()))

    error = WireError("bad")
    error.host, error.pid, error.rank = host, pid, 1
    ranks: Any = SimpleNamespace(
        size=2,
        _agents=[SimpleNamespace(say=lambda command: note("*", command))],
        _wire=SimpleNamespace(host_of={0: "h1", 1: "h2"}, command=send),
    )
    ranks._say_end = partial(Connection._say_end, ranks)
    assert Connection._end_sender(ranks, error) == bool(ends)
    assert said == ends


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
