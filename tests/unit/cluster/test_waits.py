"""Waits of the notebook for its ranks, and interrupts meanwhile."""

import signal
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest

from allranks.cluster import sockets
from allranks.cluster.connection import Connection
from allranks.cluster.driver import Driver
from allranks.cluster.features import NotebookHooks
from allranks.cluster.sockets import (
    EventQueue,
    FromHostAgent,
    FromRank,
    InterruptRequested,
    RankSockets,
)
from allranks.cluster.state import ClusterState
from allranks.records import limits
from allranks.records.agent import Exit, Notice
from allranks.records.wire import Ends


def test_an_interrupt_stays_for_the_next_wait_and_does_not_end_each_step_of_this_one():
    inbox, steps = EventQueue(), []

    def step(seconds):
        steps.append(inbox.wait(0))
        return steps[-1]

    inbox.put(InterruptRequested())
    ranks = SimpleNamespace(inbox=inbox, step=step)
    ranks._put_back = partial(Connection._put_back, ranks)
    Connection.wait_until(ranks, lambda: len(steps) == 3, 60)
    assert steps == [[InterruptRequested()], [], [], []]
    assert inbox.wait(0) == [InterruptRequested()]


def test_the_errors_of_events_that_come_together_are_all_raised_each_once():
    inbox, handled = EventQueue(), []

    def handle(event):
        handled.append(event.host)
        raise ValueError(f"cannot show {event.host}")

    for host in ("a", "b", "b"):
        inbox.put(FromHostAgent(Notice("text"), host))
    inbox.put(InterruptRequested())
    ranks = SimpleNamespace(
        inbox=inbox,
        roster=ClusterState(1),
        turns=SimpleNamespace(is_of_another=False),
        _wire=SimpleNamespace(lock=threading.RLock()),
        _unhandled=deque(),
        _handle=handle,
    )
    ranks._next = partial(Connection._next, ranks)
    with pytest.raises(ValueError, match="cannot show a") as failed:
        Connection.step(ranks, 0)
    assert failed.value.__notes__ == ["ValueError: cannot show b"]
    assert handled == ["a", "b", "b"]
    assert Connection.step(ranks, 0) == [InterruptRequested()]


def test_events_of_a_cell_that_another_thread_begins_meanwhile_stay_for_that_one():
    class Roster(ClusterState):
        begins = False

        @property
        def thread(self):
            found = self._thread
            if self.begins:  # just when this thread has read whose the last cell was
                self.begins = False
                self.begin_cell(2, (0,), found + 1)
            return found

        @thread.setter
        def thread(self, thread):
            self._thread = thread

    inbox, roster = EventQueue(), Roster(1)
    roster.begin_cell(1, (0,), threading.get_ident())
    roster.end_cell()
    inbox.put(InterruptRequested())
    ranks = SimpleNamespace(
        inbox=inbox,
        roster=roster,
        turns=SimpleNamespace(is_of_another=True, await_own=list),
        _wire=SimpleNamespace(lock=threading.RLock()),
        _unhandled=deque(),
    )
    ranks._next = partial(Connection._next, ranks)
    roster.begins = True
    assert Connection.step(ranks, 0) == []
    assert (roster.cell.cell, inbox.wait(0)) == (2, [InterruptRequested()])


def test_a_rank_that_ends_for_a_reason_has_it_in_its_report():
    driver, ends = Driver(ClusterState(2)), []
    driver.wire, driver.apply = SimpleNamespace(lock=threading.RLock()), ends.append
    driver.begin()
    driver.put(FromRank(Ends(1, "a client has shut it down"), []))
    for rank in (0, 1):
        driver.put(FromHostAgent(Exit(rank, 10 + rank, 0, by_launcher=False)))
    assert [end.how() for end in ends] == [
        "ended with exit code 0",
        "ended with exit code 0: a client has shut it down",
    ]


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
            return [("wake", 1)] if "look" in found else []

    monkeypatch.setattr(sockets.zmq, "Poller", Poller)
    now = [0.0]
    hosts = {"h1": 0, "h2": 0}
    wire = SimpleNamespace(_events="events", _wake_reader="wake", _hosts=hosts, listening=hosts)
    wire._now, wire._next_look, wire._clock = 0.0, 0.5, SimpleNamespace(now=lambda: now[0])
    wire._receive, wire._take = lambda: unread.pop(0), found.append
    wire._make_posted_calls = lambda: True

    def look():
        found.append("look")
        wire._next_look = 99.0

    wire._find_silent_hosts = look
    RankSockets._read(wire)
    assert found == done


def test_the_time_that_a_host_was_silent_before_a_notebook_attached_counts_for_its_lease():
    wire = SimpleNamespace(_hosts={}, _last_signs={}, _of_last_notebook=set(), _now=3.0)
    wire.listening, wire.lock = SimpleNamespace(owner=b"b"), threading.RLock()
    wire._send = wire.command = lambda *_: None
    RankSockets.take_over(wire, {"h1": 0.0, "h2": 10.0})
    assert wire._last_signs == {"h1": 3.0, "h2": -7.0}


def test_an_announcement_on_a_connection_that_was_replaced_names_no_host():
    came = [[b"\0\x01\x02\x03\xe9", b"3", b"a"], [b"h1", b"4", b"a"]]
    confirmed = []
    messages = SimpleNamespace(
        confirm=lambda *words: None,
        confirmation=None,
        on_connection=lambda last, owner: confirmed.append(last) or [],
    )
    wire = SimpleNamespace(_closed=False, lock=threading.RLock(), _last_signs={"h1": None})
    wire._messages_of = {"h1": messages}.__getitem__
    wire._commands = SimpleNamespace(poll=lambda _: bool(came), recv_multipart=lambda: came.pop(0))
    RankSockets._confirm(wire, "h1", 1, b"a")
    assert confirmed == [4]


def fail():
    raise OSError("a feature cannot end")


@pytest.mark.parametrize(
    ("end", "raised"),
    [(fail, OSError), (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt)],
)
def test_ranks_that_are_released_have_no_notebook_although_a_part_of_it_does_not_end(end, raised):
    done, roster = [], ClusterState(2)
    ranks = SimpleNamespace(
        roster=roster,
        hooks=NotebookHooks(()),
        _agents=[SimpleNamespace(let_go=lambda: done.append("released"))],
        _wire=SimpleNamespace(close=lambda: done.append("closed")),
        _of_features=SimpleNamespace(close=end),
        _finalizer=SimpleNamespace(detach=lambda: done.append("not ended")),
    )
    with pytest.raises(raised):
        Connection.release(ranks, "detached")
    assert done == ["not ended", "closed", "released"]
    assert (roster.phase, roster.lost_because) == ("stopped", "detached")
