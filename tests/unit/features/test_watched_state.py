"""What a watching notebook knows: sequences of replies, deaths, replacements and cells."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from allranks.cluster.failures import ProcessExit
from allranks.cluster.state import AllEnded, Left, Replaced
from allranks.features.attach.sharing import WatchedState
from allranks.records.wire import Died, Hello, Output, Reply, RunCell
from tests.unit.cluster.test_state import died, hello, reply, run


def test_a_cell_without_ranks_is_for_all_that_have_come():
    state = WatchedState()
    for rank in (1, 0):
        state.apply(hello(rank))
    state.apply(run(7))
    assert state.cell is not None
    assert state.cell.ranks == (0, 1)
    state.apply(run(8, 1))
    assert (state.cell.cell, state.cell.ranks) == (8, (1,))


def test_a_cell_that_is_told_again_keeps_its_replies():
    state = WatchedState()
    state.apply(run(7, 0, 1))
    state.apply(reply(1))
    assert state.apply(run(7, 0, 1)) == ()
    assert state.cell is not None
    assert state.cell.pending == (0,)


def test_a_process_that_replaces_a_rank_is_not_in_the_cell():
    state = WatchedState()
    state.apply(run(7, 0, 1))
    assert state.apply(died(1)) == (Left(1, "lost"),)
    state.apply(hello(1, pid=2))
    assert not state.dead
    assert state.cell is not None
    assert state.cell.pending == (0,)
    state.apply(run(8, 0, 1))
    assert state.cell.pending == (0, 1)


def test_a_rank_that_has_died_before_is_not_in_the_next_cell():
    state = WatchedState()
    state.apply(died(1))
    assert state.apply(run(7, 0, 1)) == (Left(1, "lost"),)


@pytest.mark.parametrize("event", [Output(0, 7, (), 0, 0, 0), None, "Reply"])
def test_what_is_no_event_is_refused(event):
    with pytest.raises(TypeError, match="expected an event of"):
        WatchedState().apply(event)


# Random sequences.

_SIZE, _STATUSES = 5, ("ok", "error", "waiting", "interrupted")


class World:
    """Events of five ranks in any order, also twice and late, and what must be true after each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.state = WatchedState()
        self.cell, self.pid = 0, 0
        self.counts: Counter[str] = Counter()
        self.last: Any = None
        self.out: dict[int, str] = {}

    def event(self) -> Any:
        chance = self.chance
        kind = chance.choices(
            ["Reply", "Died", "Hello", "RunCell", "ProcessExit", "Replaced", "AllEnded", "again"],
            [8, 3, 3, 2, 2, 2, 0.3, 2],
        )[0]
        rank = chance.randrange(_SIZE)
        if kind == "again" and self.last is not None:
            return self.last
        if kind == "Reply":
            return reply(
                rank, chance.choice(_STATUSES), max(1, self.cell - chance.randrange(3) % 2)
            )
        if kind == "RunCell":
            self.cell += 1
            return run(self.cell, *sorted(chance.sample(range(_SIZE), chance.randrange(_SIZE + 1))))
        if kind == "Hello":
            self.pid += 1
            return hello(rank, self.pid)
        others = {"Died": died(rank), "ProcessExit": ProcessExit(rank), "Replaced": Replaced(rank)}
        return others.get(kind, AllEnded())

    def step(self) -> None:
        event, state = self.event(), self.state
        self.counts[type(event).__name__] += 1
        known = isinstance(event, Hello | RunCell | Reply | Died)
        left = state.apply(event) if known else ()
        if not known and state.cell is not None:
            left = state.cell.apply(event)
        cell = state.cell
        if isinstance(event, RunCell) and event != self.last:
            self.out = {}
        for one in left:
            # Once with the way in which it has left, and once as replaced.
            before = self.out.get(one.rank)
            assert before is None or before != one.status == "replaced"
            self.out[one.rank] = one.status
        if cell is not None:
            assert cell.left == self.out
            assert set(cell.pending) | cell.left.keys() == set(cell.ranks)
            assert not set(cell.pending) & cell.left.keys()
            assert cell.replies.keys() <= cell.left.keys()
            assert all(each.cell == cell.cell for each in cell.replies.values())
            assert not known or not state.dead.keys() & set(cell.pending)
            # Twice is as once.
            assert (state if known else cell).apply(event) == ()  # type: ignore[arg-type]
            assert cell.left == self.out
        self.last = event


def test_random_events_keep_what_is_true_of_a_cell():
    counts: Counter[str] = Counter()
    for seed in range(100):
        world = World(seed)
        for _ in range(1000):
            world.step()
        counts += world.counts
    assert sum(counts.values()) == 100_000
    assert min(counts.values()) >= 500
    assert len(counts) == 7
