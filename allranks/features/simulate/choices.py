"""A schedule that begins with given choices, and finds which other ones are to be tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from allranks.features.simulate.events import PostedReceive, SimulatedMessage
from allranks.features.simulate.scheduler import SeededSchedule
from allranks.features.simulate.tokens import EAGER, Action, Start

_EARLY_TESTS = 2
"""How often each rank's tests answer no although they could answer yes, or could wait for that."""
_GOES_ON = "goes on"


class ChosenSchedule(SeededSchedule):
    """Begins as ``start``, and collects in ``others`` how schedules with other matches begin.

    Matches on different ranks are independent: either order gives the same state. So after one of
    two such orders, the other one is not tried (sleep sets).
    """

    tries_orders = True

    def __init__(self, start: Start) -> None:
        super().__init__(start.seed, 0)
        self._start = start
        self._asleep = start.asleep if not start.choices else frozenset()
        self._early: Counter[int] = Counter()
        self._matched: Counter[int] = Counter()
        self.choices: list[int] = []
        self.others: list[Start] = []
        self.has_sent = False
        """Whether the mode of sends mattered."""
        self.is_redundant = False
        """Whether it was ended: it differs from another one only by the order of independent
        matches."""
        self.misfits = False
        """Whether a choice of the start was not possible."""

    @property
    def done(self) -> Start:
        """The schedule that was run."""
        return Start(self._start.mode, self._start.seed, tuple(self.choices))

    def _choose(self, actions: Sequence[Action]) -> int:
        given, at, chosen = self._start.choices, len(self.choices), 0
        if len(actions) > 1 and at < len(given):
            chosen = min(given[at], len(actions) - 1)
            self.misfits = self.misfits or chosen != given[at]
            self.choices.append(chosen)
            if at == len(given) - 1:
                self._asleep = self._start.asleep
            return chosen
        if at >= len(given):
            awake = [one for one, action in enumerate(actions) if action not in self._asleep]
            if not awake:
                self.is_redundant = True
                raise KeyboardInterrupt  # ends all ranks
            chosen = awake[0]
            tried = self._asleep
            for last, one in pairwise(awake):
                tried |= {actions[last]}
                start = (*self.choices, one)
                asleep = _independent(tried, actions[one])
                self.others.append(Start(self._start.mode, self._start.seed, start, asleep))
            self._asleep = _independent(self._asleep, actions[chosen])
        if len(actions) > 1:
            self.choices.append(chosen)
        return chosen

    def choose_match(
        self,
        matches: Iterator[tuple[PostedReceive, list[SimulatedMessage]]],
        polling: Sequence[int],
    ) -> tuple[PostedReceive, SimulatedMessage] | int:
        """One of all that are possible; a test may end before, as what follows can change them."""
        found = [(receive, one) for receive, messages in matches for one in messages]
        early = sorted(rank for rank in polling if self._early[rank] < _EARLY_TESTS)
        actions: list[Action] = [
            (
                receive.rank,
                (self._matched[receive.rank], receive.group.number, receive.tag, one.source),
            )
            for receive, one in found
        ]
        chosen = self._choose(actions + [(rank, _GOES_ON) for rank in early])
        if chosen >= len(found):
            rank = early[chosen - len(found)]
            self._early[rank] += 1
            return rank
        receive, message = found[chosen]
        self._matched[receive.rank] += 1
        return receive, message

    def choose_message(self, receive: PostedReceive, found: Sequence[SimulatedMessage]) -> int:
        """One of all."""
        return self._choose([(receive.rank, ("probe", one.source)) for one in found])

    def choose_completed(self, rank: int, count: int) -> int:
        """One of all."""
        return self._choose([(rank, ("completed", one)) for one in range(count)])

    def has_completed(self, rank: int, title: str) -> bool:
        """Both, but no only some times on each rank: a loop of tests would not end."""
        if self._early[rank] == _EARLY_TESTS:
            return True
        late = bool(self._choose([(rank, (title, answer)) for answer in (True, False)]))
        self._early[rank] += late
        return not late

    def is_buffered(self, message: SimulatedMessage) -> bool:
        """All messages, or none."""
        self.has_sent = True
        return self._start.mode == EAGER


def _independent(actions: frozenset[Action], chosen: Action) -> frozenset[Any]:
    # What a test finds depends on every other rank.
    if chosen[1] == _GOES_ON:
        return frozenset()
    return frozenset(one for one in actions if one[0] != chosen[0] and one[1] != _GOES_ON)
