"""A notebook that attaches to the ranks of another one, and those that watch."""

import signal
from types import SimpleNamespace

import pytest

from allranks.cluster.failures import ProcessExit
from allranks.cluster.features import ClusterContext, NotebookHooks
from allranks.cluster.state import ClusterState, Epoch, HostLost
from allranks.errors import UsageError
from allranks.features.attach import connection, ownership
from allranks.features.attach.connection import AttachedConnection, EarlyEnds
from allranks.features.attach.notebook import NotebookAttach
from allranks.features.attach.sharing import DetachedCell, WatcherFeed
from allranks.records.agent import Replaces
from allranks.records.wire import Answer, Hello


def test_what_ends_before_a_notebook_has_attached_counts_afterwards():
    ranks = ClusterState(4)
    ranks.connect(can_replace=True, can_relocate=True)
    early, died = EarlyEnds(ranks), ProcessExit(1, -9, pid=2)
    loss = HostLost(ProcessExit(-2, host="h", why="is cut off"), (2, 3))
    for event in (died, loss, ProcessExit(-1, 1)):
        early.keep(event)
    assert early.events == [died, loss]
    assert [one.rank for one in early.ends] == [1, 2, 3]
    for replaced in (Replaces(1, 8), Replaces(3, 9)):
        early.keep(replaced)
        ranks.apply(replaced)
    assert [one.rank for one in early.ends] == [2]
    assert early.ranks == {1, 2}
    for rank in range(4):
        ranks.apply(Hello(rank, 4, 0, 1, "h", {1: 8, 3: 9}.get(rank, 1), "cpu", "e", "m", "/log"))
    ranks.set_phase("running")
    for event in early.events:
        ranks.apply(event)
    assert (list(ranks.dead), ranks.lost_hosts) == ([2], {"h": "is cut off"})


class Attaching:
    """Four ranks on two hosts, which answer at once, except rank 3. Each step is a second.

    ``events`` happen at a second; ``silent_since`` is when the host of rank 3 was last heard.
    """

    size, lost_because = 4, ""

    def __init__(self, monkeypatch, events, silent_since=1000):
        self.now, self.events, self.got = 0, events, {}
        self.roster, self.answers = ClusterState(4), dict.fromkeys(range(3), about())
        self.roster.connect(can_replace=True, can_relocate=True)
        self.early, self._agents = EarlyEnds(self.roster), ()
        self._wire = SimpleNamespace(is_in_doubt=lambda ranks: silent_since + 4 < self.now)

        class Clock:
            def __init__(clock, seconds):
                clock.until = self.now + seconds

            def left(clock):
                return clock.until - self.now

        monkeypatch.setattr(connection, "Countdown", Clock)
        monkeypatch.setattr(connection.time, "monotonic", lambda: self.now)
        AttachedConnection._reach(self, self.early, None, self.got)

    def apply(self, event):
        self.roster.apply(event)

    def send(self, ranks, ask):
        for rank in ranks:
            if rank in self.answers:
                self.got[rank] = Answer(1, rank, self.answers[rank], ""), []
        return True

    def step(self, seconds):
        self.now += 1
        self.events.get(self.now, lambda attaching: None)(self)

    def _ask_to_heal(self, got, asked):
        return AttachedConnection._ask_to_heal(self, got, asked)


def about(**changed):
    return {"healing": False, "died": [], "epoch": 1, "heal": {"epoch": 1}} | changed


def lose_host(attaching):
    attaching.early.keep(HostLost(ProcessExit(-2, why="is cut off", host="h2"), (3,)))


@pytest.mark.parametrize("silent_since", [0, 12])
def test_who_attaches_waits_until_a_silent_host_is_lost(silent_since, monkeypatch):
    assert Attaching(monkeypatch, {32: lose_host}, silent_since).now == 32


def test_a_rank_that_does_not_answer_is_named_if_its_host_is_there(monkeypatch):
    with pytest.raises(UsageError, match="rank 3 did not answer within 20 s"):
        Attaching(monkeypatch, {2000: lose_host})


def begin_to_replace(attaching):
    # The last notebook has asked for it; process 8 takes the place of process 7.
    attaching.early.keep(ProcessExit(3, code=-9, pid=7))
    for apply in (attaching.early.keep, attaching.roster.apply):
        apply(Replaces(3, 8))
    attaching.answers |= {rank: about(healing=True, died=[3]) for rank in range(3)}
    attaching.got.clear()


def test_a_rank_whose_replacement_failed_without_a_notebook_is_dead(monkeypatch):
    def fail(attaching):
        attaching.answers |= {rank: about(died=[3]) for rank in range(3)}

    attaching = Attaching(monkeypatch, {1: begin_to_replace, 5: fail})
    assert [end.pid for end in attaching.early.ends] == [7]
    assert attaching.now < 10
    assert attaching.got.keys() == {0, 1, 2}


def test_a_rank_that_was_replaced_without_a_notebook_is_waited_for(monkeypatch):
    def succeed(attaching):
        attaching.answers |= {rank: about() for rank in range(3)}

    def come(attaching):
        attaching.answers[3] = about()

    attaching = Attaching(monkeypatch, {1: begin_to_replace, 5: succeed, 9: come})
    assert attaching.early.ends == []
    assert attaching.got.keys() == {0, 1, 2, 3}


def test_ranks_that_mpi_does_not_free_from_a_replacement_can_be_attached_to(monkeypatch):
    attaching = Attaching(monkeypatch, {1: begin_to_replace})
    assert [end.pid for end in attaching.early.ends] == [7]
    assert attaching.got.keys() == {0, 1, 2}


@pytest.mark.parametrize("where", ["connect", "attach", "stay"])
def test_ranks_are_left_to_others_where_an_interrupt_ends_an_attach(where):
    def may_be_interrupted(now):
        if now == where:
            signal.raise_signal(signal.SIGINT)

    class Connected:
        closed, record = False, {}

        def attach(self):
            may_be_interrupted("attach")
            return {}

        def stay(self, stays):
            may_be_interrupted("stay")

        def release(self, why):
            self.closed = True

    def connect(kind):
        may_be_interrupted("connect")
        return ranks

    ranks, hooks = Connected(), NotebookHooks([NotebookAttach])
    cells = SimpleNamespace(connect=connect, connection=ranks, hooks=hooks, kept=None)
    cells.check_idle = lambda: None
    taken = SimpleNamespace(stays=60.0, shared=False)
    with pytest.raises(KeyboardInterrupt):
        ownership.attach(cells, taken, print)
    assert ranks.closed


def test_kept_variables_are_left_too_where_an_interrupt_comes_as_the_ranks_are_released():
    done = []

    def release(why):
        signal.raise_signal(signal.SIGINT)
        done.append("ranks")
        raise OSError("a feature cannot end")

    kept = SimpleNamespace(let_go=lambda: done.append("variables"))
    cells = SimpleNamespace(connection=SimpleNamespace(release=release), kept=kept)
    with pytest.raises(KeyboardInterrupt):
        ownership._release(cells)
    assert done == ["ranks", "variables"]


@pytest.mark.parametrize("failed", [False, True])
def test_a_notebook_that_attaches_knows_whether_the_last_cell_failed_beside_traffic(failed):
    about = {"cell": 3, "label": "In[3]", "member": False, "busy": False, "unseen": False}
    about |= {"seconds": 0.1, "epoch": 2, "dirty": False, "ranks": [0, 1]}
    sent, raised = {"traffic": True, "failed": False}, {"traffic": False, "failed": failed}
    left = DetachedCell.of({0: about | sent, 1: about | raised})
    assert left.epoch == Epoch(2, dirty=failed, traffic=True)


@pytest.mark.parametrize(("ranks", "missed"), [([], (1, 2)), ([0, 1], (1,)), ([0], ())])
def test_a_notebook_that_attaches_knows_which_ranks_never_received_the_last_cell(ranks, missed):
    about = {"cell": 3, "label": "In[3]", "member": False, "busy": True, "unseen": False}
    about |= {"seconds": 0.1, "epoch": 0, "dirty": False, "traffic": False, "failed": False}
    about |= {"ranks": ranks}
    left = DetachedCell.of({0: about, 1: about | {"cell": 2}, 2: about | {"cell": 2}})
    assert (left.ranks, left.missed) == ((0,), missed)


def test_a_cell_that_was_shown_and_those_that_have_run_at_its_end_are_not_shown_again():
    own, roster, asked = ownership.of(NotebookHooks([NotebookAttach])), ClusterState(2), []
    own.started(ClusterContext(2, lambda *_: None, starts_ranks=True, roster=roster))
    own.cell = SimpleNamespace(number=3, ask_soon=lambda *request: asked.append(request[1:]))
    roster.cells = 4  # variables were kept after it
    own.cell_finished()
    ((seen, _, ranks),) = asked
    assert (seen, tuple(ranks)) == ({"cell": 4}, (0, 1))


class Visitor:
    def send(self, part):
        return len(part)


def test_what_a_watcher_has_got_is_counted_while_no_thread_adds_to_it():
    feed, parts = WatcherFeed(ClusterState(1)), [b"message", b""]

    def sent(nbytes):
        assert nbytes == 7
        assert feed._lock.locked()

    watcher = SimpleNamespace(next=lambda state: parts.pop(0), sent=sent, waits=False)
    feed._watchers = {Visitor(): watcher}
    feed._selector = SimpleNamespace(
        get_key=lambda one: SimpleNamespace(data=None), modify=lambda *_: None
    )
    feed._send()
    assert parts == []
