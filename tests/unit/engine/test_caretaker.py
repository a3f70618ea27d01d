"""What the caretaker makes of the news of hosts while no notebook has their ranks."""

import json
from types import SimpleNamespace

import pytest

from allranks.engine.host import caretaker
from allranks.engine.host.caretaker import Caretaker, KeptHost
from allranks.records.config import CaretakerConfig, HostAgentConfig


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(caretaker.time, "monotonic", lambda: made.now)
    return made


@pytest.fixture
def care(clock):
    ranks = json.loads(HostAgentConfig(2, (), {}, "", "", "", (), "", "", heals=True).to_json())
    made = Caretaker(CaretakerConfig("", ranks, "", "", 30.0, (0, 0)))
    made._state = {"hosts": [["h1", 1], ["h2", 1]], "starts_again": False, "ended": [], "dead": []}
    made._hosts = {"h1": KeptHost(b""), "h2": KeptHost(b"")}
    yield made
    made._context.destroy(0)


def say(care, host, **event):
    care._take_event(host, json.dumps(event).encode())


def test_the_end_of_a_process_that_was_replaced_leaves_its_rank_alive(care):
    # The notebook had these two events before, and could not confirm them.
    say(care, "h1", event="exit", rank=0, pid=7)
    say(care, "h2", event="replaces", rank=0, pid=8)
    say(care, "h2", event="exit", rank=1, pid=9)
    assert not care._is_over
    say(care, "h2", event="exit", rank=0, pid=8)
    assert care._is_over


def test_a_replacement_that_the_notebook_had_begun_leaves_its_rank_alive(care, monkeypatch):
    state = care._state | {"dead": [{"rank": 0, "pid": 7}], "replaced": [[0, 8]]}
    said = f"state {json.dumps(state)}\n".encode()
    monkeypatch.setattr(caretaker.os, "read", lambda descriptor, most: said)
    care._hear()
    monkeypatch.undo()
    say(care, "h2", event="exit", rank=1, pid=9)
    assert not care._is_over
    say(care, "h2", event="exit", rank=0, pid=8)
    assert care._is_over


def test_time_in_which_the_caretaker_stood_still_costs_no_host(care, clock):
    clock.now += 1000
    care._find_silent_hosts()
    assert all(host.is_up for host in care._hosts.values())
    for _ in range(31):
        clock.now += 1
        care._hosts["h2"].silent_seconds = 0.0
        care._find_silent_hosts()
    assert [host.is_up for host in care._hosts.values()] == [False, True]
