"""The step between two cells: what takes long is shown, interrupted, and ended at last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster import renewal
from allranks.cluster.renewal import Renewal
from allranks.cluster.sockets import InterruptRequested
from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.ranks import BETWEEN, Activity
from allranks.records.wire import BETWEEN_CELLS, Answer, Interrupt

ENDS_GROUPS = "ending torch's groups"
WAITS = "waiting for the other ranks"
WAITED_FOR = "the new cell waits for that, or interrupt to end it"


class Ranks:
    """Three ranks; rank 1 answers when it is free. Each step is a second."""

    size, closed = 3, False

    def __init__(self, events: dict[int, Callable[[Ranks], object]], can_replace: bool) -> None:
        self.roster = SimpleNamespace(dead={}, ends=[], needs={}, can_replace=can_replace)
        self.inbox = SimpleNamespace(hearing_interrupts=nullcontext)
        self.now, self._events = 0.0, events
        self.sent: list[tuple[list[int], Any]] = []
        self.ended: list[tuple[int, str]] = []
        self.doing = {0: WAITS, 1: ENDS_GROUPS, 2: WAITS}
        self.requests: tuple[int, ...] = ()
        self.left_out: list[int] = []

    @contextmanager
    def asking(self, ranks: Any, name: str, arguments: Any) -> Iterator[dict[int, Any]]:
        assert (name, arguments) == (requests.RENEW, {"epoch": 7})
        self.got: dict[int, Any] = {}
        yield self.got

    def answer(self, problem: str = "") -> None:
        for rank in range(self.size):
            said = problem if rank == 1 else ""
            self.got[rank] = Answer(1, rank, {"needs": -1}, said), []

    def step(self, seconds: float) -> list[InterruptRequested]:
        self.now += 1
        event = self._events.get(int(self.now))
        found = event(self) if event is not None else None
        return [InterruptRequested()] if found == "press" else []

    def ask_soon(self, name: str, _: Any, deliver: Callable[[Answer], None], ranks: Any) -> None:
        assert name == requests.STATUS
        self.deliver = deliver
        for rank in ranks:
            if rank in self.doing:
                request = {"client": "theirs"} if rank in self.requests else None
                doing = Activity(BETWEEN, self.doing[rank])
                deliver(Answer(2, rank, {"doing": doing, "request": request}, ""))

    def send(self, ranks: list[int], record: Any) -> None:
        self.sent.append((ranks, record))

    @property
    def hooks(self) -> SimpleNamespace:
        return SimpleNamespace(command=self._command)

    def _command(self, name: str, *arguments: Any) -> str:
        held = sorted(arguments[-1])
        if name == "held_text":
            return f"{held} are held"
        assert (name, arguments[0]) == ("leave_held_cell", self)
        self.left_out = held
        return "it goes on"

    def end_rank(self, rank: int, why: str) -> None:
        self.ended.append((rank, why))
        self.roster.dead[rank] = object()


@pytest.fixture
def renew(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ranks, Renewal, list[str]]]:
    def run(
        events: dict[int, Any], can_replace: bool = True, **changed: Any
    ) -> tuple[Ranks, Renewal, list[str]]:
        ranks, told = Ranks(events, can_replace), list[str]()
        vars(ranks).update(changed)

        class Clock:
            def __init__(self, seconds: float) -> None:
                self._until = ranks.now + seconds

            def left(self) -> float:
                return self._until - ranks.now

        monkeypatch.setattr(renewal, "Countdown", Clock)
        made = Renewal(ranks, told.append)  # type: ignore[arg-type]
        made.make(7)
        return ranks, made, told

    return run


def press(_: Ranks) -> str:
    return "press"


def test_what_takes_longer_than_a_second_is_shown(renew):
    _, made, told = renew({5: Ranks.answer})
    assert told == [f"rank 1 is still ending torch's groups; {WAITED_FOR}"]
    assert not made.pressed


def test_what_ends_within_a_second_is_not_shown(renew):
    assert renew({1: Ranks.answer})[2] == []


def test_a_rank_that_does_not_answer_is_shown_too(renew):
    _, _, told = renew({5: Ranks.answer}, doing={0: WAITS, 2: WAITS})
    assert told == [f"rank 1 has not answered since the last cell; {WAITED_FOR}"]


def test_what_a_rank_does_is_shown_also_where_its_answer_comes_late(renew):
    def tell(ranks):
        ranks.deliver(Answer(2, 1, {"doing": Activity(BETWEEN, ENDS_GROUPS)}, ""))

    _, _, told = renew({4: tell, 6: Ranks.answer}, doing={})
    first, second = (f"{text}; {WAITED_FOR}" for text in (
        "ranks 0–2 have not answered since the last cell",
        "rank 1 is still ending torch's groups",
    ))  # fmt: skip
    assert told == [first, second]


def test_an_interrupt_reaches_the_rank_that_is_busy_and_no_other(renew):
    ranks, made, _ = renew({3: press, 4: Ranks.answer})
    assert ranks.sent == [([1], Interrupt(BETWEEN_CELLS))]
    assert made.pressed
    assert not ranks.ended


def test_a_rank_that_an_interrupt_does_not_free_is_ended_and_no_other(renew):
    ranks, _, _ = renew({3: press})
    assert ranks.ended == [(1, "it was ending torch's groups between cells")]
    assert ranks.now == 8


def test_a_second_interrupt_ends_it_at_once(renew):
    ranks, _, _ = renew({3: press, 4: press})
    assert [rank for rank, _ in ranks.ended] == [1]
    assert ranks.now == 4


def test_without_a_user_it_is_interrupted_after_a_while(renew):
    ranks, made, _ = renew({31: Ranks.answer})
    assert ranks.sent == [([1], Interrupt(BETWEEN_CELLS))]
    assert not made.pressed


def test_a_request_of_a_client_is_waited_for_without_an_end(renew):
    def ends(ranks):
        ranks.requests = ()

    ranks, _, told = renew({99: ends, 153: Ranks.answer}, requests=(1,))
    assert told == ["[1] are held"]
    # Only what follows the request is interrupted.
    assert ranks.sent == [([1], Interrupt(BETWEEN_CELLS))]


def test_an_interrupt_leaves_a_request_of_a_client_to_itself(renew):
    seen = []

    def press(ranks):
        seen.append(ranks)
        return "press"

    with pytest.raises(KeyboardInterrupt, match="it goes on"):
        renew({1: press}, requests=(1,))  # before it is known what the rank does
    (ranks,) = seen
    assert ranks.left_out == [1]
    assert not ranks.ended
    assert all(record == Interrupt(BETWEEN_CELLS) for _, record in ranks.sent)


def test_ranks_that_cannot_be_replaced_are_not_ended_without_a_user(renew):
    with pytest.raises(UsageError, match="rank 1 is still ending torch's groups after 30 s"):
        renew({}, can_replace=False)


def test_no_rank_needs_another_one_once_a_renewal_has_ended_what_it_needed_it_for(renew):
    def answer(ranks):
        ranks.roster.needs = {0: 0, 1: 0}
        ranks.answer()

    ranks, *_ = renew({1: answer})
    assert set(ranks.roster.needs.values()) == {-1}


def test_the_problem_of_a_rank_is_raised(renew):
    with pytest.raises(UsageError, match="no thread"):
        renew({1: lambda ranks: ranks.answer("no thread")})
