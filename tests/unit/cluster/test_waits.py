"""Waits of the notebook for its ranks, and interrupts meanwhile."""

import threading
from types import SimpleNamespace

import pytest

from allranks.cluster import connection, sockets
from allranks.cluster.connection import Connection
from allranks.cluster.failures import ProcessExit
from allranks.cluster.sockets import EventQueue, InterruptRequested, RankSockets
from allranks.errors import UsageError


def test_an_interrupt_stays_for_the_next_wait_and_does_not_end_each_step_of_this_one():
    inbox, steps = EventQueue(), []

    def step(seconds):
        steps.append(inbox.wait(0))
        return steps[-1]

    inbox.put(InterruptRequested())
    ranks = SimpleNamespace(inbox=inbox, step=step)
    Connection.wait_until(ranks, lambda: len(steps) == 3, 60)
    assert steps == [[InterruptRequested()], [], []]
    assert inbox.wait(0) == [InterruptRequested()]


class Attaching:
    """Four ranks on two hosts, of which rank 3 does not answer. Each step is a second."""

    size = 4

    def __init__(self, monkeypatch, silent_since, lost_at):
        self.now, self.lost_at, self.got = 0, lost_at, {}
        self._wire = SimpleNamespace(is_in_doubt=lambda ranks: silent_since + 4 < self.now)

        class Clock:
            def __init__(clock, seconds):
                clock.until = self.now + seconds

            def left(clock):
                return clock.until - self.now

        monkeypatch.setattr(connection, "Countdown", Clock)
        Connection._reach(self, None, self.got)

    def send(self, ranks, ask):
        self.got |= {rank: "answer" for rank in ranks if rank != 3}
        return True

    def step(self, seconds):
        self.now += 1

    def _early_ends(self):
        return [ProcessExit(3, host="h2", why="is cut off")] if self.now >= self.lost_at else []


@pytest.mark.parametrize("silent_since", [0, 12])
def test_who_attaches_waits_until_a_silent_host_is_lost(silent_since, monkeypatch):
    assert Attaching(monkeypatch, silent_since, lost_at=32).now == 32


def test_a_rank_that_does_not_answer_is_named_if_its_host_is_there(monkeypatch):
    with pytest.raises(UsageError, match="rank 3 did not answer within 20 s"):
        Attaching(monkeypatch, silent_since=1000, lost_at=2000)


def test_a_host_is_in_doubt_from_a_few_missed_heartbeats_until_it_is_lost():
    wire = SimpleNamespace(host_of={0: "h1", 1: "h2", 2: "h3"})
    missed = round(sockets.LATE_SECONDS / sockets._POLL_SECONDS)
    wire._polls, wire._last_signs = 100, {"h1": 100 - missed, "h2": 101 - missed, "h3": None}
    assert [RankSockets.is_in_doubt(wire, [rank]) for rank in range(3)] == [True, False, False]
    assert RankSockets.is_in_doubt(wire, range(3))


def test_the_time_that_a_host_was_silent_before_a_notebook_attached_counts_for_its_lease():
    wire = SimpleNamespace(_hosts={}, _last_signs={}, _unattached=set(), _polls=3)
    wire.listening, wire._lock = SimpleNamespace(owner=b"b"), threading.RLock()
    wire._send = wire.command = lambda *_: None
    RankSockets.attach(wire, {"h1": 0.0, "h2": 10.0})
    assert wire._last_signs["h1"] - wire._last_signs["h2"] == 10.0 / sockets._POLL_SECONDS
