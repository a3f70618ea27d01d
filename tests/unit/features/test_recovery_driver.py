"""What passes between a recovery and the connection: deaths, lost hosts, requests, new ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster.failures import ProcessExit
from allranks.cluster.features import NotebookHooks
from allranks.cluster.sockets import InterruptRequested
from allranks.cluster.state import ClusterEvent, ClusterState, HostLost
from allranks.errors import ClusterLost
from allranks.features.heal import recovery_driver, requests
from allranks.features.heal.recovered import text_of
from allranks.features.heal.recovery import RecoveryState
from allranks.features.heal.recovery_driver import RecoveryDriver, start_again
from allranks.records.wire import Answer, Hello

HOSTS = {"h1": [0, 1], "h2": [2, 3], "h3": [4, 5]}
ANSWERS = {
    requests.HEAL: {},
    requests.SAVE: {"sets": {}, "goes_on": 0, "left": {}, "new": False},
    requests.LOAD: {"problem": ""},
    requests.SETTLE: {"goes_on": 0, "version": 1, "new": False},
    requests.RESTORE: {"names": [], "seconds": 0.0},
}
SAVED = ANSWERS[requests.SAVE]
Event = Callable[["Ranks"], object]


class Ranks:
    """Six ranks on three hosts. Each request, and each start, is a step with a name; ``events``
    happen at the first, second … step of a name, in place of what ranks do by themselves.
    """

    size, log_dir, can_relocate, inbox = 6, "/logs", True, SimpleNamespace()
    inbox.hearing_interrupts, hooks, listeners = nullcontext, NotebookHooks(()), {}

    def __init__(self, events: dict[str, list[Event | None]]) -> None:
        self.roster, self.events = ClusterState(6), events
        self.roster.connect(can_replace=True, can_relocate=True)
        self.roster.set_phase("running")
        self.places, self.agent = {host: list(ranks) for host, ranks in HOSTS.items()}, self
        self.loaded: list[list[int]] = []
        self.asked: list[tuple[str, set[int]]] = []
        self.record: dict[str, Any] = {}
        #: How many requests there were at each record.
        self.noted: list[int] = []
        self.problem, self.is_up, self.state = "", False, "running"
        self._now: Callable[[], object] = lambda: None
        self.got: dict[int, Any] = {}
        #: Answers that the next step takes.
        self.untaken: dict[int, Any] = {}
        self._come()

    def _come(self) -> None:
        for host, ranks in self.places.items():
            for rank in ranks:
                self.roster.apply(Hello(rank, 6, 0, 2, host, 1, "cpu", "e", "m", "/none"))

    def apply(self, event: ClusterEvent) -> None:
        self.roster.apply(event)

    def _begin(self, name: str, usual: Callable[[], object]) -> None:
        events = self.events.get(name, [])
        event = events.pop(0) if events else None
        self._now = usual if event is None else (lambda: event(self))

    def step(self, seconds: float) -> list[InterruptRequested]:
        self.got |= self.untaken
        self.untaken.clear()
        return [InterruptRequested()] if seconds and self._now() == "press" else []

    @contextmanager
    def asking(self, ranks: Any, name: str, arguments: Any) -> Iterator[dict[int, Any]]:
        self.got = {}
        if name == requests.LOAD:
            self.loaded.append(arguments["saved"])
        self.asked.append((name, set(ranks)))
        self._begin(name, lambda: self.do(ranks, name, arguments))
        yield self.got

    def do(self, ranks: Any, name: str, arguments: Any) -> None:
        self.answer(ranks, ANSWERS[name])
        if name == requests.HEAL:
            self.roster.new |= set(arguments["dead"])

    def answer(self, ranks: Any, content: Any, problem: str = "") -> None:
        self.got |= {rank: (Answer(1, rank, content, problem), []) for rank in ranks}

    def relocate(self, decided: Callable[[dict[str, list[int]]], object]) -> bool:
        for host in self.roster.lost_hosts:
            moved = self.places.pop(host)
            if self.places:
                next(iter(self.places.values())).extend(moved)
        if self.places:
            decided(self.places)
        self._begin("start", self._come)
        return bool(self.places)

    def hosts(self) -> dict[str, list[int]]:
        return self.places

    def seat_spares(self, dead: list[int]) -> str:
        return self.problem

    def note(self, record: dict[str, Any]) -> None:
        self.record = json.loads(json.dumps(record))
        self.noted.append(len(self.asked))

    def all_up(self) -> None:
        self.is_up = True

    def loss_text(self, shown: bool = False) -> str:
        return "lost"

    def close(self, state: str, why: str) -> None:
        self.state = state


def dies(rank: int) -> Event:
    def event(ranks: Ranks) -> None:
        ranks.roster.apply(ProcessExit(rank, code=-9, pid=1))

    return event


def loses(host: str) -> Event:
    def event(ranks: Ranks) -> None:
        end = ProcessExit(-2, host=host, why="is cut off")
        ranks.roster.apply(HostLost(end, tuple(ranks.places[host])))

    return event


def press(ranks: Ranks) -> str:
    return "press"


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    class Looks:
        """A time limit that counts looks."""

        def __init__(self, seconds: float) -> None:
            self._left = 50

        def left(self) -> int:
            self._left -= 1
            return self._left

    monkeypatch.setattr(recovery_driver, "Countdown", Looks)


def recover(ranks: Ranks) -> RecoveryState:
    hosts = {rank: host for host, there in HOSTS.items() for rank in there}
    done = RecoveryState(hosts, can_start_again=ranks.can_relocate)
    RecoveryDriver(ranks, done, lambda text: None).run()  # type: ignore[arg-type]
    return done


def lose_a_host(first: str = "h3", **events: list[Event | None]) -> tuple[Ranks, RecoveryState]:
    ranks = Ranks(events)
    loses(first)(ranks)
    return ranks, recover(ranks)


@pytest.mark.parametrize("step", ["start", "load"])
def test_a_second_host_that_is_lost_costs_its_own_ranks_alone(step):
    ranks, moved = lose_a_host(**{step: [loses("h2")]})
    assert ranks.is_up
    assert moved.gone.keys() == {2, 3, 4, 5}
    assert ranks.loaded[-1] == [0, 1]
    assert "ranks 0–1 have their variables again" in text_of(moved, 1.0)


@pytest.mark.parametrize("step", ["start", "load"])
def test_a_rank_that_dies_while_all_start_again_loads_what_it_had_saved(step):
    ranks, moved = lose_a_host(**{step: [dies(1)]})
    assert ranks.is_up
    assert moved.gone.keys() == {4, 5}
    assert ranks.loaded[-1] == [0, 1, 2, 3]


@pytest.mark.parametrize("is_over", [False, True])
def test_the_loss_of_a_host_just_when_all_start_again_is_known(is_over):
    hosts = {"h1": [0, 1], "h2": [2, 3]}
    roster = ClusterState(4)
    roster.lost_hosts["h3"] = "is cut off"

    def relocate(decided: Callable[[dict[str, list[int]]], object]) -> bool:
        if is_over:
            roster.ends.append(ProcessExit(-2, host="h2", why="is cut off"))
        else:
            roster.lost_hosts["h2"] = "is cut off"
        decided(hosts)
        return True

    agents = SimpleNamespace(relocate=relocate, hosts=lambda: hosts)
    parts = {"hooks": NotebookHooks(()), "listeners": {}, "agent": agents}
    step = list[InterruptRequested]
    ranks = SimpleNamespace(**parts, roster=roster, step=lambda seconds: step(), apply=roster.apply)
    assert start_again(ranks) == hosts
    assert roster.lost_hosts == {"h2": "is cut off"}
    assert not roster.ends


def test_a_rank_that_its_variables_end_starts_without_them():
    ranks, moved = lose_a_host(load=[dies(1), dies(1)])
    assert ranks.loaded == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3]]
    assert moved.gone.keys() == {1, 4, 5}


def test_ranks_that_do_not_start_are_started_once_more():
    ranks, _ = lose_a_host(start=[lambda ranks: None])
    assert ranks.is_up


def test_ranks_that_cannot_start_are_lost_after_some_tries():
    with pytest.raises(ClusterLost, match="could not be started again: ranks 0–5 did not start"):
        lose_a_host(start=[lambda ranks: None] * 9)


def test_two_interrupts_end_all_ranks_also_while_they_load():
    with pytest.raises(ClusterLost, match="you have interrupted it twice"):
        lose_a_host(load=[press])


def test_two_interrupts_end_all_ranks_also_while_they_save():
    with pytest.raises(ClusterLost, match="could not be started again: you have interrupted it"):
        lose_a_host(save=[press])


def test_what_was_saved_outlives_the_end_of_mpiexec():
    def save(ranks: Ranks) -> None:
        ranks.answer(range(4), SAVED)
        ranks.roster.ends.append(ProcessExit(-1, code=1))

    ranks, moved = lose_a_host(save=[save])
    assert ranks.is_up
    assert moved.gone.keys() == {4, 5}
    assert ranks.loaded == [[0, 1, 2, 3]]


def test_answers_that_no_step_has_taken_before_the_end_of_mpiexec_count():
    def save(ranks: Ranks) -> None:
        ranks.untaken |= {rank: (Answer(1, rank, SAVED, ""), []) for rank in range(4)}
        ranks.roster.ends.append(ProcessExit(-1, code=1))

    ranks, moved = lose_a_host(save=[save])
    assert ranks.is_up
    assert moved.gone.keys() == {4, 5}
    assert ranks.loaded == [[0, 1, 2, 3]]


def test_a_rank_without_its_variables_does_not_count_as_one_that_has_them():
    def save(ranks: Ranks) -> None:
        ranks.answer(range(4), SAVED)
        ranks.answer([1], SAVED | {"new": True})

    ranks, moved = lose_a_host(save=[save])
    assert moved.gone.keys() == {1, 4, 5}
    assert ranks.loaded == [[0, 2, 3]]


def replace(ranks: Ranks) -> RecoveryState:
    dies(3)(ranks)
    return recover(ranks)


def test_a_dead_rank_is_replaced():
    ranks = Ranks({})
    done = replace(ranks)
    assert ranks.is_up
    assert not ranks.roster.dead
    assert "rank 3 was replaced and has no variables; ranks 0–2, 4–5 kept theirs" in text_of(
        done, 0
    )


def test_a_rank_that_dies_while_a_new_one_restores_is_replaced_by_the_same_recovery():
    ranks = Ranks({"settle": [dies(1)]})
    assert replace(ranks).gone.keys() == {1, 3}
    assert not ranks.roster.dead
    assert (requests.HEAL, {0, 2, 3, 4, 5}) in ranks.asked


def test_if_a_host_is_lost_while_a_rank_is_replaced_all_start_again():
    ranks = Ranks({"heal": [loses("h1")]})
    assert replace(ranks).starts_again
    assert ranks.state == "running"


def test_without_a_spare_process_all_start_again():
    ranks = Ranks({})
    ranks.problem = "expected a spare process for rank 3, found 0"
    assert replace(ranks).starts_again
    assert ranks.state == "running"


def test_ranks_that_mpi_does_not_free_start_again():
    ranks = Ranks({"heal": [lambda ranks: ranks.answer([0, 1], {}, "another has died")]})
    moved = replace(ranks)
    assert moved.gone.keys() == {3}
    assert ranks.loaded == [[0, 1, 2, 4, 5]]
    assert "To use all hosts again" not in text_of(moved, 1.0)


def test_where_ranks_cannot_start_again_they_are_lost_with_the_last_spare_process():
    ranks = Ranks({})
    ranks.problem, ranks.can_relocate = "expected a spare process for rank 3, found 0", False
    with pytest.raises(ClusterLost, match="found 0"):
        replace(ranks)
    assert ranks.state == "lost"


def test_two_interrupts_of_a_replacement_end_all_ranks():
    ranks = Ranks({"heal": [press]})
    with pytest.raises(ClusterLost, match="interrupted twice"):
        replace(ranks)


def test_two_interrupts_end_all_ranks_also_if_a_host_is_lost_just_then():
    pressed = []

    def press_and_lose(ranks: Ranks) -> str:
        pressed.append(1)
        if len(pressed) == 2:
            loses("h3")(ranks)
        return "press"

    ranks = Ranks({"heal": [press_and_lose]})
    with pytest.raises(ClusterLost, match="you have interrupted it twice"):
        replace(ranks)


def test_a_new_rank_that_a_death_kept_from_its_variables_has_them_with_the_next_one():
    def settle(ranks: Ranks) -> None:
        for rank in range(6):
            ranks.answer([rank], ANSWERS[requests.SETTLE] | {"new": rank in (2, 3)})

    ranks = Ranks({"settle": [settle]})
    replace(ranks)
    assert ranks.asked[-2:] == [(requests.SETTLE, set(range(6))), (requests.RESTORE, {2, 3})]


def test_ranks_that_restore_do_not_wait_for_one_that_had_died_before():
    ranks = Ranks({})
    dies(1)(ranks)
    done = RecoveryState(dict.fromkeys(range(6), "h1"), replaces=False)
    driver = RecoveryDriver(ranks, done, lambda text: None)  # type: ignore[arg-type]
    driver.run(lambda: done.ranks_are_new([3]))
    assert ranks.asked == [(requests.SETTLE, {0, 2, 3, 4, 5}), (requests.RESTORE, {3})]
    assert ranks.roster.dead.keys() == {1}


class Ended(BaseException):
    """The notebook has ended."""


@pytest.mark.parametrize("step", ["start", "load"])
def test_another_notebook_goes_on_with_what_was_noted_before_the_ranks_were_started_again(step):
    def end(ranks: Ranks) -> None:
        raise Ended

    ranks = Ranks({step: [end]})
    loses("h3")(ranks)
    with pytest.raises(Ended):
        recover(ranks)
    ranks.got = {}
    loses("h2")(ranks)  # while no notebook has them
    done = RecoveryState.continued(ranks.record, ranks.places)
    RecoveryDriver(ranks, done, lambda text: None).run(done.restarted)  # type: ignore[arg-type]
    assert ranks.is_up
    assert ranks.loaded[-1] == [0, 1]
    assert "ranks 2–5 started again without variables" in text_of(done, 1.0)


def test_a_record_is_saved_before_what_it_describes_and_is_empty_at_the_end():
    settled = ANSWERS[requests.SETTLE] | {"new": True}
    ranks = Ranks({"settle": [lambda ranks: ranks.answer(range(6), settled)]})
    replace(ranks)
    heal, restore = 0, 2  # the requests before which it was saved
    assert [name for name, _ in ranks.asked] == ["heal", "settle", "restore"]
    assert ranks.noted == [heal, restore, 3]
    assert ranks.record == {"cells": 0}
