"""Which hosts can be connected to is found out, for all at the same time."""

import itertools
import socket

from allranks import countdown
from allranks.features.hosts.port_test import Target, listen, unreachable

LOOPBACK = "127.0.0.1"


def test_each_port_that_cannot_be_connected_to_is_named_with_the_reason():
    with listen(LOOPBACK) as open_one, socket.socket() as closed:
        # Nothing listens there, and no other program can.
        closed.bind((LOOPBACK, 0))
        port = closed.getsockname()[1]
        # Addresses of TEST-NET-1 are never answered, or have no route.
        targets = [
            Target("h1", LOOPBACK, open_one.getsockname()[1]),
            Target("h2", LOOPBACK, port),
            Target("h3", "192.0.2.1", 9),
        ]
        found = unreachable(targets, seconds=0.5)
    assert found.keys() == {"h2", "h3"}
    assert found["h2"] == "Connection refused"


def test_a_process_that_stands_still_looks_again_before_it_names_another_host(monkeypatch):
    now = itertools.count(0.0, 3.5)
    monkeypatch.setattr(countdown.time, "monotonic", lambda: next(now))
    with listen(LOOPBACK) as there:
        assert unreachable([Target("h1", LOOPBACK, there.getsockname()[1])], seconds=2.5) == {}
