"""A host that says nothing any longer is noticed, whatever else the notebook hears or does."""

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import zmq

from allranks import countdown
from allranks.cluster import sockets
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from tests.kernel import wait_until

SECONDS = 60
LEASE = 2.0
Talk = Callable[..., threading.Event]


class Told:
    """A wire, and what it tells of hosts. Its clock stands until a test lets time pass."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
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

    def pass_time(self, *hosts: str) -> None:
        """Lets a part of the lease pass, after which each of these hosts talks."""
        self.clock.seconds += LEASE / 4
        before = [self.lines.count((host, "talks")) for host in hosts]
        # The first line may have been read before.
        wait_until(
            lambda: all(
                self.lines.count((host, "talks")) >= count + 2
                for host, count in zip(hosts, before, strict=True)
            )
        )


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(sockets, "_LOOK_SECONDS", 0.1)
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr(countdown, "time", clock)
    heard = Told(clock)
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


def test_a_silent_host_is_noticed_while_another_talks_without_end(told, host):
    host("h1")
    host("h2").set()
    for _ in range(20):  # the last that it has said may come late
        told.pass_time("h1")
    assert ("h2", "host_silent") in told.lines
    assert ("h1", "host_silent") not in told.lines


def test_no_host_is_taken_for_silent_because_the_notebook_has_stood_still(told, host):
    host("h1")
    host("h2")
    stood = threading.Event()

    def stand_still(name: str, line: bytes) -> None:
        told.clock.seconds += 1.5 * LEASE
        told.wire.deliver_host = told.deliver
        stood.set()

    told.wire.deliver_host = stand_still
    assert stood.wait(SECONDS)
    for _ in range(10):
        told.pass_time("h1", "h2")
    assert {event for _, event in told.lines} == {"talks"}
