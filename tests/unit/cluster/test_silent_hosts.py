"""A host that says nothing any longer is noticed, whatever else the notebook hears or does."""

import json
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from allranks.cluster import sockets
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from tests.kernel import wait_until

SECONDS = 60
LEASE = 2.0
Talk = Callable[..., threading.Event]


class Told:
    """A wire, and what it tells of hosts."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        listening = sockets.ListeningSockets.open(LOOPBACK, ANY_PORTS)
        self.wire = sockets.RankSockets(
            sockets.EventQueue(), NotebookHooks(()), listening, lease_seconds=LEASE
        )
        self.wire.listen()
        self.wire.deliver_host = self.deliver

    def deliver(self, host: str, line: bytes) -> None:
        self.lines.append((host, json.loads(line)["event"]))

    def wait_for(self, *line: str) -> None:
        wait_until(lambda: line in self.lines, lambda: f"{line} after {self.lines[-3:]}")


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(sockets, "_LOOK_SECONDS", 0.1)
    heard = Told()
    yield heard
    heard.wire.close()


@pytest.fixture
def host(told):
    """Makes hosts that talk for ever: ``host(name)``; what is returned makes one silent."""
    ends: list[tuple[threading.Event, threading.Thread]] = []

    def talk(name: str, end: threading.Event) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.curve_serverkey = told.wire.key.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(told.wire.events_url)
            number = 0
            while not end.wait(0.01):
                number += 1
                head = [b"host", name.encode(), b"%d" % number]
                socket.send_multipart([*head, b"agent", b'{"event": "talks"}'])

    def make(name: str) -> threading.Event:
        end = threading.Event()
        ends.append((end, threading.Thread(target=talk, args=(name, end))))
        ends[-1][1].start()
        told.wait_for(name, "talks")
        return end

    yield make
    for end, thread in ends:
        end.set()
        thread.join()


@pytest.mark.leases
def test_a_silent_host_is_noticed_while_another_talks_without_end(told, host):
    host("h1")
    host("h2").set()
    told.wait_for("h2", "host_silent")
    assert ("h1", "host_silent") not in told.lines


@pytest.mark.leases
def test_no_host_is_taken_for_silent_because_the_notebook_has_stood_still(told, host):
    host("h1")
    host("h2")
    stood = threading.Event()

    def stand_still(name: str, line: bytes) -> None:
        time.sleep(1.5 * LEASE)
        told.wire.deliver_host = told.deliver
        stood.set()

    told.wire.deliver_host = stand_still
    assert stood.wait(SECONDS)
    stood_until = told.wire._now
    wait_until(lambda: told.wire._now >= stood_until + LEASE + 0.2)
    assert {event for _, event in told.lines} == {"talks"}
