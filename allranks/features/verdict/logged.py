"""The values that the ranks of a cell log: which of them have become NaN."""

from __future__ import annotations

import math
from array import array
from typing import Any

from allranks.features.verdict import LEAST_STEPS
from allranks.features.verdict.records import NotANumber
from allranks.features.verdict.results import NOT_NUMBERS, not_a_number_in_members
from allranks.records.telemetry import Points

#: More curves are not looked at.
_MOST_CURVES = 10_000
#: A loss that was NaN in at most this part of its steps, and has at least this many values, was
#: meant to be a number there, if it is one on other ranks. A batch that comes again may have made
#: it NaN.
_PASSING_PART, _PASSING_VALUES = 0.25, 40
#: Fewer values prove nothing, as of a metric that is measured twice at the beginning. There may be
#: a value for each epoch only.
_LEAST_VALUES = 10


class NotNumbers:
    """The curves of a cell, or of an ensemble, whose records then have the numbers of members in
    place of ranks. Filled by the receiving thread.
    """

    def __init__(self) -> None:
        self._logged: dict[tuple[int, str, str], int] = {}
        #: The last step of each.
        self._reached: dict[tuple[int, str, str], float] = {}
        #: From which step on a value is NaN, and how often it was.
        self._not_numbers: dict[tuple[int, str, str], tuple[float, int]] = {}
        #: How often in a row it was NaN before it was a number, for each that ever was one.
        self._gaps: dict[tuple[int, str, str], int] = {}
        #: Of those that were NaN and are numbers again: the first such step, and how often it was.
        self._passed: dict[tuple[int, str, str], tuple[float, int]] = {}
        #: How often it was a number.
        self._numbers: dict[tuple[int, str, str], int] = {}

    def take(self, record: Points, payload: bytes) -> None:
        pairs = array("d", payload)
        at = 0
        for name, member, count in record.series:
            steps, values = pairs[at : at + 2 * count : 2], pairs[at + 1 : at + 2 * count : 2]
            at += 2 * count
            key = record.rank, name, member
            if key not in self._logged and len(self._logged) >= _MOST_CURVES:
                continue
            self._logged[key] = self._logged.get(key, 0) + count
            self._reached[key] = max(steps, default=0.0)
            if not math.isnan(sum(values)):
                self._take_numbers(key, count)
                continue
            # The sum of opposite infinities is NaN as well.
            for step, value in zip(steps, values, strict=True):
                if math.isnan(value):
                    first, times = self._not_numbers.get(key, (step, 0))
                    self._not_numbers[key] = first, times + 1
                else:
                    self._take_numbers(key, 1)

    def forget(self, member: int) -> None:
        """The member of an ensemble runs again, from the beginning."""
        rows: list[dict[tuple[int, str, str], Any]]
        rows = [self._logged, self._reached, self._not_numbers, self._gaps, self._numbers]
        rows.append(self._passed)
        for row in rows:
            for key in [key for key in row if key[0] == member]:
                del row[key]

    def _take_numbers(self, key: tuple[int, str, str], count: int) -> None:
        self._numbers[key] = self._numbers.get(key, 0) + count
        step, times = self._not_numbers.pop(key, (0.0, 0))
        self._gaps[key] = max(times, self._gaps.get(key, 0))
        if times:
            first, before = self._passed.get(key, (step, 0))
            self._passed[key] = first, before + times

    @property
    def steps(self) -> int:
        """The most values of a curve."""
        return max(self._logged.copy().values(), default=0)

    def lasting_not_numbers(self) -> list[NotANumber]:
        """Returns where one value of the running cell is NaN, if it has been for some steps.

        A value that is NaN for fewer steps may be a number again. Ranks send their values in turns:
        none is named before all have sent the step.
        """
        lasting = {(one.name, one.member) for one in self.not_numbers(LEAST_STEPS)}
        if not lasting:
            return []
        reached: dict[tuple[str, str], float] = {}
        for (_, name, member), at in self._reached.copy().items():
            reached[name, member] = min(at, reached.get((name, member), math.inf))
        # A value may be a number again meanwhile: then its curve is missing here.
        found: dict[tuple[str, str], list[NotANumber]] = {}
        for one in self.not_numbers(1):
            found.setdefault((one.name, one.member), []).append(one)
        for curve, same in found.items():
            if curve in lasting and reached[curve] >= min(one.step for one in same):
                return same
        return []

    def never_numbers(self) -> list[NotANumber]:
        """Returns the values that were NaN in each step."""
        return [
            NotANumber(key[1], key[0], step, key[2], always=True)
            for key, (step, times) in self._not_numbers.copy().items()
            if times >= LEAST_STEPS and not self._numbers.get(key)
        ]

    def causes(self) -> list[NotANumber]:
        return self.not_numbers() or self._passing()

    def _passing(self) -> list[NotANumber]:
        """Returns the losses that were NaN in a few steps on some ranks, and not on the others.

        Other values may not be defined in each step, as a share of none; nor may a loss that is NaN
        on each rank now and then, also where it is so too often on some.
        """
        passed, now = self._passed.copy(), self._not_numbers.copy()
        always = {
            (key[1], key[2])
            for key, count in self._logged.copy().items()
            if count >= _PASSING_VALUES and key not in passed and key not in now
        }
        found = []
        for (rank, name, member), (step, before) in passed.items():
            times = before + now.get((rank, name, member), (0.0, 0))[1]
            numbers = self._numbers[rank, name, member]
            few = times <= _PASSING_PART * numbers and numbers >= _PASSING_VALUES
            if few and "loss" in name.lower() and (name, member) in always:
                found.append(NotANumber(name, rank, step, member, passing=times))
        return found

    def not_numbers(self, least: int = NOT_NUMBERS) -> list[NotANumber]:
        """Returns the values that are NaN now, ``least`` times in a row at least."""
        if not self._not_numbers or self.steps < _LEAST_VALUES:
            return []
        return [
            NotANumber(key[1], key[0], step, key[2])
            for key, (step, times) in self._not_numbers.copy().items()
            # A value that was never a number, or was NaN for as long before, may be one that is not
            # measured in each step; so may one that was measured once.
            if times >= least
            and times > self._gaps.get(key, times)
            and self._numbers.get(key, 0) > 1
        ]

    def cause_in_members(self) -> str:
        """Returns which members of an ensemble log NaN at its end; "" if none does."""
        return "".join(map(str, not_a_number_in_members(self.not_numbers())))
