"""Which ranks have left a cell: sequences of replies, deaths, replacements and new cells."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster.failures import ProcessExit
from allranks.cluster.state import (
    AllEnded,
    Came,
    CellState,
    ClusterState,
    Deaths,
    DiedBefore,
    HostLost,
    Left,
    NotJoined,
    NotRecovered,
    Replaced,
    Seating,
    StartsAgain,
    TookPlaces,
)
from allranks.records.agent import Replaces
from allranks.records.wire import Died, EpochBegun, EpochEnded, Hello, Output, Reply, RunCell


def reply(rank: int, status: str = "ok", cell: int = 7) -> Reply:
    return Reply(rank, cell, status, 0.1, False, False, "", None)


def hello(rank: int, pid: int = 1) -> Hello:
    return Hello(rank, 4, 0, 1, "h", pid, "cpu", "e", "m", "/log")


def run(cell: int, *ranks: int) -> RunCell:
    return RunCell(cell, "", cell, ranks, f"In[{cell}]", False, 0)


def died(rank: int) -> Died:
    return Died(rank, "was killed")


def test_ranks_leave_a_cell_with_the_status_of_their_reply_or_lost():
    cell = CellState(7, range(4))
    assert cell.apply(reply(2, "error")) == (Left(2, "error"),)
    assert cell.apply(ProcessExit(0, -9)) == (Left(0, "lost"),)
    assert cell.apply(died(3)) == (Left(3, "lost"),)
    assert cell.pending == (1,)
    assert list(cell.left.items()) == [(2, "error"), (0, "lost"), (3, "lost")]
    assert cell.replies.keys() == {2}


@pytest.mark.parametrize("again", [reply(1, "error"), died(1), ProcessExit(1, -9)])
def test_a_rank_leaves_a_cell_once(again):
    cell = CellState(7, range(2))
    cell.apply(reply(1))
    assert cell.apply(again) == ()
    assert (cell.left, cell.replies) == ({1: "ok"}, {1: reply(1)})


def test_a_reply_that_comes_after_the_death_of_its_rank_is_kept():
    cell = CellState(7, range(2))
    cell.apply(died(1))
    assert cell.apply(reply(1)) == ()
    assert (cell.left, cell.replies) == ({1: "lost"}, {1: reply(1)})


@pytest.mark.parametrize("other", [reply(0, cell=6), reply(5), died(5), Replaced(0)])
def test_events_of_other_cells_and_ranks_change_nothing(other):
    cell = CellState(7, range(2))
    assert cell.apply(other) == ()
    assert (cell.pending, cell.left, cell.replies) == ((0, 1), {}, {})


def test_if_all_have_ended_those_that_have_not_replied_are_lost():
    cell = CellState(7, range(3))
    cell.apply(reply(1))
    assert cell.apply(AllEnded()) == (Left(0, "lost"), Left(2, "lost"))
    assert cell.pending == cell.apply(AllEnded()) == ()


def test_a_rank_is_replaced_after_it_has_left():
    cell = CellState(7, range(2))
    cell.apply(died(1))
    assert cell.apply(Replaced(1)) == (Left(1, "replaced"),)
    assert cell.apply(Replaced(1)) == ()
    assert cell.left == {1: "replaced"}


@pytest.mark.parametrize("event", [Output(0, 7, (), 0, 0, 0), None, "Reply"])
def test_what_is_no_event_is_refused(event):
    with pytest.raises(TypeError, match="expected an event of"):
        CellState(7, range(2)).apply(event)


# The processes of the ranks.


def connected(size: int = 4, can_replace: bool = True, relocates: bool = True) -> ClusterState:
    """Ranks of which none has come yet."""
    ranks = ClusterState(size)
    ranks.connect(can_replace, relocates)
    ranks.set_phase("running")
    return ranks


def up(size: int = 4, can_replace: bool = True, relocates: bool = True) -> ClusterState:
    """Ranks that have all come, as processes 1, 2 …"""
    ranks = connected(size, can_replace, relocates)
    for rank in range(size):
        assert ranks.apply(hello(rank, 1 + rank)) == (Came(hello(rank, 1 + rank)),)
    return ranks


def end(rank: int, pid: int = 0, **more: Any) -> ProcessExit:
    return ProcessExit(rank, -9, at=0.0, pid=pid or 1 + rank, **more)


def lost(host: str = "h") -> ProcessExit:
    return ProcessExit(-2, at=0.0, host=host, why="is cut off")


def test_a_rank_dies_and_the_others_are_left():
    ranks = up()
    assert ranks.apply(end(2)) == (Deaths((end(2),)),)
    assert (ranks.alive, ranks.dead, ranks.ends) == ((0, 1, 3), {2: end(2)}, [])
    assert 2 not in ranks.new


def test_with_its_last_rank_a_cluster_has_ended():
    ranks = up(2)
    ranks.apply(end(1))
    assert ranks.apply(end(0)) == (Deaths((end(0),)),)
    assert ranks.ends == [end(1), end(0)]


def test_the_end_of_a_process_that_comes_again_is_no_other_death():
    ranks = up()
    ranks.apply(end(2, host="h"))
    assert ranks.apply(end(2, host="h")) == ()
    assert ranks.apply(end(2, 9, host="h")) == (Deaths((end(2, 9, host="h"),), again=True),)
    assert ranks.died_again == {2: end(2, 9, host="h")}


@pytest.mark.parametrize(
    ("ranks", "event"),
    [
        (up(can_replace=False), end(2)),
        (up(), end(2, by_launcher=True)),
        (up(), ProcessExit(-1, 1)),
        (connected(), end(2)),
        (up(relocates=False), HostLost(lost(), (2, 3))),
    ],
    ids=["not spared", "killed by the launcher", "the launcher", "not all have come", "a host"],
)
def test_an_end_that_cannot_be_replaced_ends_the_cluster(ranks, event):
    assert ranks.apply(event) == ()
    first = event.end if isinstance(event, HostLost) else event
    assert ranks.ends == [first]
    later = end(3)
    ranks.apply(later)
    assert (ranks.ends, ranks.dead) == ([first, later], {})


def test_the_ranks_of_a_lost_host_die_together_without_those_that_had_died():
    ranks = up()
    ranks.apply(end(3))
    (deaths,) = ranks.apply(HostLost(lost(), (2, 3)))
    assert [(each.rank, each.why) for each in deaths.ends] == [(2, "is cut off")]
    assert (ranks.alive, ranks.lost_hosts) == ((0, 1), {"h": "is cut off"})
    assert ranks.apply(ProcessExit(-1, 1)) == ()  # MPI ends with it
    assert ranks.ends == []


def test_a_rank_that_dies_in_a_cell_has_left_it():
    ranks = up()
    ranks.begin_cell(7, (1, 2), thread=5)
    assert (ranks.busy, ranks.cells, ranks.thread) == (True, 7, 5)
    assert ranks.apply(end(2)) == (Deaths((end(2),)),)
    assert ranks.apply(end(3)) == (Deaths((end(3),)),)
    assert ranks.running is not None
    assert (ranks.running.pending, ranks.running.left) == ((1,), {2: "lost"})


def test_a_cell_for_which_no_thread_waits_leaves_the_ranks_idle_but_counts_for_their_epoch():
    ranks = up()
    ranks.begin_cell(7, (1, 2), thread=5)
    ranks.abandoned = True
    assert (ranks.busy, ranks.running) == (False, None)
    assert ranks.cell is not None
    ranks.cell.apply(reply(1))
    ranks.end_cell()
    assert (ranks.cell, ranks.epoch.dirty) == (None, True)


def test_ranks_that_a_cell_ends_have_saved_their_variables():
    ranks = up()
    ranks.begin_cell(7, (1, 2), thread=5)
    assert ranks.cell is not None
    ranks.cell.apply(replace(reply(1), ends="it forked"))
    assert ranks.ending == {1: "it forked"}
    ranks.end_cell()
    assert (ranks.saved, ranks.ending) == ({1}, {})


def test_ranks_that_left_a_cell_or_do_not_run_it_survive_those_that_are_killed_in_it():
    ranks = up()
    ranks.begin_cell(7, (0, 1, 2), thread=5)
    assert ranks.cell is not None
    ranks.cell.apply(reply(0))
    assert ranks.survivors(ranks.cell.pending) == (0, 3)
    ranks.apply(end(3))
    assert ranks.survivors(ranks.cell.pending) == (0,)
    assert ranks.survivors((0, 1, 2)) == ()
    assert ranks.why_no_survivors((0, 1, 2)) == ""


def test_a_rank_does_not_survive_the_one_that_it_needs_until_that_is_replaced():
    ranks = up()
    ranks.begin_cell(7, (1, 2), thread=5)
    assert ranks.cell is not None
    ranks.cell.apply(replace(reply(1), needs=0))
    assert (ranks.survivors((0,)), ranks.survivors((2,))) == ((2, 3), (0, 1, 3))
    ranks.end_cell()
    assert ranks.survivors((0, 2, 3)) == ()
    assert ranks.why_no_survivors((0, 2, 3)) == "rank 1 cannot run without rank 0"
    ranks.apply(end(0))
    ranks.apply(TookPlaces((0,)))
    assert ranks.survivors((0, 2, 3)) == (1,)


@pytest.mark.parametrize("how", ["not replaced", "reserved", "replacing is off", "another end"])
def test_no_rank_survives_where_dead_ones_are_not_replaced(how):
    ranks = up(can_replace=how != "not replaced")
    if how == "reserved":
        ranks.reserve("testing", 5)
    elif how == "another end":
        ranks.apply(ProcessExit(-1, 1))
    elif how == "replacing is off":
        ranks.replacing = "off"
    assert ranks.survivors((1,)) == ()


@pytest.mark.parametrize(
    "begin", [lambda ranks: ranks.set_phase("starting"), lambda ranks: ranks.reserve("testing", 5)]
)
def test_a_death_costs_all_ranks_where_others_cannot_go_on(begin):
    ranks = up()
    begin(ranks)
    assert ranks.apply(end(2)) == ()
    assert ranks.ends == [end(2)]


def test_other_ranks_begin_without_what_the_ones_before_did():
    ranks = up()
    ranks.replacing = "off"
    ranks.begin_cell(7, (1, 2), thread=5)
    ranks.apply(end(2))
    ranks.connect(can_replace=True)
    assert (ranks.phase, ranks.ends, ranks.cell) == ("starting", [], None)
    assert (ranks.cells, ranks.replacing) == (7, "off")


def test_a_host_that_is_lost_while_ranks_start_is_noted():
    ranks = connected()
    assert ranks.apply(HostLost(lost(), (2, 3))) == ()
    assert (ranks.dead, ranks.lost_hosts) == ({}, {"h": "is cut off"})


def test_only_the_last_process_that_was_started_for_a_place_counts():
    ranks = up()
    ranks.apply(end(2))
    ranks.apply(Seating())
    ranks.apply(Replaces(2, 8))
    ranks.apply(Replaces(2, 9))
    assert ranks.apply(hello(2, 8)) == ranks.apply(end(2, 8)) == ()
    assert ranks.replaced == ()
    assert ranks.apply(hello(2, 9)) == (Came(hello(2, 9)),)
    assert ranks.new == {2}
    assert ranks.replaced == (2,)
    ranks.apply(TookPlaces([2]))
    assert (ranks.dead, ranks.hellos[2].pid) == ({}, 9)


def test_a_replacement_that_has_died_before_it_has_joined_is_dead():
    ranks = up()
    ranks.apply(end(2))
    ranks.apply(Replaces(2, 9))
    ranks.apply(end(2, 9))
    ranks.apply(TookPlaces([2]))
    assert ranks.dead == {2: end(2, 9)}


def test_a_place_that_no_process_has_taken_is_that_of_the_rank_that_died():
    ranks = ClusterState(2)
    ranks.apply(Replaces(1, 9))
    assert ranks.is_outdated(end(1))
    ranks.apply(NotJoined([1]))
    assert not ranks.is_outdated(end(1))
    ranks.apply(DiedBefore(hello(1, 2)))
    ranks.apply(DiedBefore(hello(1, 3)))
    assert ranks.hellos == {1: hello(1, 2)}


def test_of_a_place_that_no_process_has_taken_one_end_counts_and_that_of_the_process_to_take_it():
    ranks = up()
    ranks.hellos.pop(1)
    ranks.apply(Replaces(1, 9))
    ranks.apply(NotJoined([1]))
    ranks.apply(DiedBefore(hello(1, 8)))
    assert ranks.apply(end(1, 8)) == (Deaths((end(1, 8),)),)
    # Those of the processes before come again, with the one before that.
    for event in (end(1, 2), Replaces(1, 8), end(1, 8), Replaces(1, 9)):
        assert ranks.apply(event) == ()
    assert ranks.apply(end(1, 2)) == ()
    assert ranks.died_again == {}
    assert ranks.apply(end(1, 9)) == (Deaths((end(1, 9),), again=True),)


def test_ranks_that_are_started_again_begin_without_deaths_but_with_losses_of_their_hosts():
    ranks = up()
    ranks.apply(HostLost(lost("h1"), (3,)))
    ranks.apply(lost("h2"))
    ranks.apply(StartsAgain(["h", "h2"]))
    assert ranks.lost_hosts == {"h2": "is cut off"}
    assert (ranks.missing, ranks.dead, ranks.ends) == ([0, 1, 2, 3], {}, [])


def test_the_latest_epochs_of_requests_are_kept_until_the_ranks_are_started_again():
    ranks = up()
    for event in (EpochBegun(0, 3), EpochBegun(1, 2), EpochEnded(2, 3), EpochEnded(3, 1)):
        assert ranks.apply(event) == ()
    assert (ranks.begun_epoch, ranks.ended_epoch) == (3, 3)
    ranks.apply(StartsAgain())
    assert (ranks.begun_epoch, ranks.ended_epoch) == (0, -1)


def test_what_cannot_be_replaced_ends_a_cluster_that_has_not_ended_before():
    ranks = up()
    ranks.apply(NotRecovered([end(2)]))
    ranks.apply(NotRecovered([end(3)]))
    assert ranks.ends == [end(2)]


def test_an_unknown_event_of_a_cluster_is_refused():
    with pytest.raises(TypeError, match="expected an event of a cluster, found 'x'"):
        up().apply("x")  # type: ignore[arg-type]


class Processes:
    """Processes of four ranks on two hosts that come, die and are replaced in any order."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.chance, self.counts = random.Random(seed), counts
        self.ranks, self.pid = connected(), 0
        self.events: list[Any] = [hello(rank, self.next()) for rank in range(4)]

    def next(self) -> int:
        self.pid += 1
        return self.pid

    def event(self) -> Any:
        chance, ranks = self.chance, self.ranks
        if self.events and chance.random() < 0.7:
            return self.events.pop(0)
        rank, host = chance.randrange(4), chance.choice(["h", "h2"])
        dead = sorted(ranks.dead)
        last = ranks.hellos[rank].pid if rank in ranks.hellos else self.next()
        kind = chance.choices(range(10), [9, 1, 1, 1, 1, 4 * len(dead), len(dead), 2, 2, 4])[0]
        if kind == 0:
            return end(rank, chance.choice([last, last, self.next()]), host="h")
        if kind == 5:
            new = [(each, self.next()) for each in dead]
            for each, pid in new:
                self.events += [Replaces(each, pid), hello(each, pid)]
            self.events.append(TookPlaces(dead))
            return Seating()
        if kind == 7:
            self.events = [hello(each, self.next()) for each in range(4)]
            return StartsAgain(chance.sample(["h", "h2"], chance.randrange(3)))
        if kind == 4:
            return ProcessExit(chance.choice([-1, -2]), at=0.0)
        if kind == 8:
            self.events.append(lambda: ranks.release(self.next()))
            return lambda: ranks.reserve("testing", self.next())
        if kind == 9:
            return self.use_ranks
        there = {"h": (0, 1), "h2": (2, 3)}[host]
        return {
            1: HostLost(lost(host), there),
            2: NotJoined([rank]),
            3: DiedBefore(hello(rank, last)),
            6: NotRecovered(list(ranks.dead.values())),
        }[kind]

    def use_ranks(self) -> None:
        """What this notebook does with the ranks: begins a cell, or ends the one that runs."""
        chance, ranks = self.chance, self.ranks
        if ranks.cell is None and not ranks.reserved:
            ranks.begin_cell(self.next(), ranks.alive, thread=self.pid)
            return
        if ranks.cell is not None and ranks.cell.pending and chance.random() < 0.7:
            ranks.cell.apply(reply(chance.choice(ranks.cell.pending), cell=ranks.cell.cell))
        if chance.random() < 0.5:
            ranks.end_cell()
        else:
            ranks.abandoned = True

    def step(self) -> None:
        ranks, event = self.ranks, self.event()
        self.counts[type(event).__name__] += 1
        alive, over = ranks.alive, bool(ranks.ends)
        for found in event() or () if callable(event) else ranks.apply(event):
            self.counts[type(found).__name__] += 1
            if isinstance(found, Deaths):
                died = {each.rank for each in found.ends}
                # Each death is told once, and none once all has ended.
                assert not over
                assert died <= ranks.dead.keys()
                assert found.again == (not died <= set(alive))
        if ranks.cell is not None:
            assert not ranks.dead.keys() & set(ranks.cell.pending)
            assert ranks.busy == (bool(ranks.reserved) or not ranks.abandoned)
        assert {*ranks.alive, *ranks.dead} == {*range(4)}
        assert ranks.alive or ranks.ends
        assert ranks.new <= ranks.hellos.keys()
        assert isinstance(event, StartsAgain) or not over or ranks.ends
        if isinstance(event, ProcessExit) and not ranks.ends:
            assert ranks.apply(event) == ()


def test_random_events_keep_what_is_true_of_ranks():
    counts: Counter[str] = Counter()
    for seed in range(100):
        world = Processes(seed, counts)
        for _ in range(1000):
            world.step()
    assert len(counts) == 14
    assert min(counts.values()) >= 500, counts


def test_ranks_are_unsettled_where_a_cell_was_left_or_another_epoch_is_due_or_has_begun():
    def after(happens):
        ranks = ClusterState(2)
        happens(ranks)
        return ranks.unsettled

    assert not after(lambda ranks: None)
    assert after(lambda ranks: ranks.begin_cell(1, (0, 1), 1))
    assert after(lambda ranks: setattr(ranks.epoch, "dirty", True))
    assert after(lambda ranks: ranks.apply(EpochEnded(0, ranks.epoch.number)))
    assert after(lambda ranks: ranks.apply(EpochBegun(0, ranks.epoch.number + 1)))
