"""Waits of the notebook for its ranks, and interrupts meanwhile."""

import threading
from types import SimpleNamespace

import pytest

from allranks.cluster import connection, sockets
from allranks.cluster.connection import Connection
from allranks.cluster.failures import ProcessExit
from allranks.cluster.sockets import EventQueue, FromHostAgent, InterruptRequested, RankSockets
from allranks.cluster.state import ClusterState, HostLost
from allranks.errors import UsageError
from allranks.records import limits
from allranks.records.agent import Notice, Replaces
from allranks.records.wire import Answer


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


def test_the_errors_of_events_that_come_together_are_all_raised_each_once():
    inbox, handled = EventQueue(), []

    def handle(event):
        handled.append(event.host)
        raise ValueError(f"cannot show {event.host}")

    for host in ("a", "b", "b"):
        inbox.put(FromHostAgent(Notice("text"), host))
    inbox.put(InterruptRequested())
    ranks = SimpleNamespace(inbox=inbox, _handle=handle)
    with pytest.raises(ValueError, match="cannot show a") as failed:
        Connection.step(ranks, 0)
    assert failed.value.__notes__ == ["ValueError: cannot show b"]
    assert handled == ["a", "b", "b"]
    assert Connection.step(ranks, 0) == [InterruptRequested()]


class Attaching:
    """Four ranks on two hosts, which answer at once, except rank 3. Each step is a second.

    ``events`` happen at a second; ``silent_since`` is when the host of rank 3 was last heard.
    """

    size, lost_because = 4, ""

    def __init__(self, monkeypatch, events, silent_since=1000):
        self.now, self.events, self.got = 0, events, {}
        self.roster, self.answers = ClusterState(4), dict.fromkeys(range(3), about())
        self.roster.connect(can_heal=True, can_relocate=True)
        self.roster.set_phase("attaching")
        self._agents = ()
        self._wire = SimpleNamespace(is_in_doubt=lambda ranks: silent_since + 4 < self.now)

        class Clock:
            def __init__(clock, seconds):
                clock.until = self.now + seconds

            def left(clock):
                return clock.until - self.now

        monkeypatch.setattr(connection, "Countdown", Clock)
        monkeypatch.setattr(connection.time, "monotonic", lambda: self.now)
        Connection._reach(self, None, self.got)

    def send(self, ranks, ask):
        for rank in ranks:
            if rank in self.answers:
                self.got[rank] = Answer(1, rank, self.answers[rank], ""), []
        return True

    def step(self, seconds):
        self.now += 1
        self.events.get(self.now, lambda attaching: None)(self)

    def _ask_to_heal(self, got, asked):
        return Connection._ask_to_heal(self, got, asked)


def about(**changed):
    return {"healing": False, "died": [], "epoch": 1, "heal": {"epoch": 1}} | changed


def lose_host(attaching):
    attaching.roster.apply(HostLost(ProcessExit(-2, why="is cut off", host="h2"), (3,)))


@pytest.mark.parametrize("silent_since", [0, 12])
def test_who_attaches_waits_until_a_silent_host_is_lost(silent_since, monkeypatch):
    assert Attaching(monkeypatch, {32: lose_host}, silent_since).now == 32


def test_a_rank_that_does_not_answer_is_named_if_its_host_is_there(monkeypatch):
    with pytest.raises(UsageError, match="rank 3 did not answer within 20 s"):
        Attaching(monkeypatch, {2000: lose_host})


def begin_to_replace(attaching):
    # The last notebook has asked for it; process 8 takes the place of process 7.
    attaching.roster.apply(ProcessExit(3, code=-9, pid=7))
    attaching.roster.apply(Replaces(3, 8))
    attaching.answers |= {rank: about(healing=True, died=[3]) for rank in range(3)}
    attaching.got.clear()


def test_a_rank_whose_replacement_failed_without_a_notebook_is_dead(monkeypatch):
    def fail(attaching):
        attaching.answers |= {rank: about(died=[3]) for rank in range(3)}

    attaching = Attaching(monkeypatch, {1: begin_to_replace, 5: fail})
    assert [end.pid for end in attaching.roster.early_ends] == [7]
    assert attaching.now < 10
    assert attaching.got.keys() == {0, 1, 2}


def test_a_rank_that_was_replaced_without_a_notebook_is_waited_for(monkeypatch):
    def succeed(attaching):
        attaching.answers |= {rank: about() for rank in range(3)}

    def come(attaching):
        attaching.answers[3] = about()

    attaching = Attaching(monkeypatch, {1: begin_to_replace, 5: succeed, 9: come})
    assert attaching.roster.early_ends == []
    assert attaching.got.keys() == {0, 1, 2, 3}


def test_ranks_that_mpi_does_not_free_from_a_replacement_can_be_attached_to(monkeypatch):
    attaching = Attaching(monkeypatch, {1: begin_to_replace})
    assert [end.pid for end in attaching.roster.early_ends] == [7]
    assert attaching.got.keys() == {0, 1, 2}


def test_a_host_is_in_doubt_from_a_few_missed_heartbeats_until_its_ranks_are_known_to_be_lost():
    wire = SimpleNamespace(host_of={0: "h1", 1: "h2", 2: "h3"})
    late = 100 - limits.LATE_SECONDS
    wire._now, wire._last_signs = 100, {"h1": late, "h2": late + 1, "h3": None}
    assert [RankSockets.is_in_doubt(wire, [rank]) for rank in range(3)] == [True, False, True]
    assert not RankSockets.is_in_doubt(wire, [3])  # on this machine alone


@pytest.mark.parametrize(
    ("unread", "done"),
    [
        (["h1", "h2", "h1", "h1"], ["h1", "h2", "look", "h1", "h1"]),
        (["h1"], ["h1", "look"]),
        ([], ["look"]),
    ],
)
def test_hosts_are_looked_at_after_what_came_of_each_while_the_notebook_stood_still(
    monkeypatch, unread, done
):
    found = []

    class Poller:
        def register(self, source, kind):
            pass

        def poll(self, left_ms):
            now[0] += 1.0  # as much as counts
            if unread:
                return [("events", 1)]
            return [("stop", 1)] if "look" in found else []

    monkeypatch.setattr(sockets.zmq, "Poller", Poller)
    now = [0.0]
    hosts = {"h1": 0, "h2": 0}
    wire = SimpleNamespace(_events="events", _stop_reader="stop", _hosts=hosts, listening=hosts)
    wire._now, wire._next_look, wire._clock = 0.0, 0.5, SimpleNamespace(now=lambda: now[0])
    wire._receive, wire._take = lambda: unread.pop(0), found.append

    def look():
        found.append("look")
        wire._next_look = 99.0

    wire._find_silent_hosts = look
    RankSockets._read(wire)
    assert found == done


def test_the_time_that_a_host_was_silent_before_a_notebook_attached_counts_for_its_lease():
    wire = SimpleNamespace(_hosts={}, _last_signs={}, _unattached=set(), _now=3.0)
    wire.listening, wire._lock = SimpleNamespace(owner=b"b"), threading.RLock()
    wire._send = wire.command = lambda *_: None
    RankSockets.attach(wire, {"h1": 0.0, "h2": 10.0})
    assert wire._last_signs == {"h1": 3.0, "h2": -7.0}


def test_an_announcement_on_a_connection_that_was_replaced_names_no_host():
    came = [[b"\0\x01\x02\x03\xe9", b"3", b"a"], [b"h1", b"4", b"a"]]
    confirmed = []
    messages = SimpleNamespace(
        confirm=lambda *words: None,
        confirmation=None,
        on_connection=lambda last, owner: confirmed.append(last) or [],
    )
    wire = SimpleNamespace(_closed=False, _lock=threading.RLock(), _last_signs={"h1": None})
    wire._messages_of = {"h1": messages}.__getitem__
    wire._commands = SimpleNamespace(poll=lambda _: bool(came), recv_multipart=lambda: came.pop(0))
    RankSockets._confirm(wire, "h1", 1, b"a")
    assert confirmed == [4]
