"""``Cluster.map``: a function on each of many items, as members of an ensemble."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from allranks.cluster.cluster import Cluster
from allranks.cluster.options import check_timeout
from allranks.errors import MapFailed, MapInterrupted, UsageError
from allranks.features.ensemble.grid import Options
from allranks.features.ensemble.member import FAILED, FINISHED, Member, short
from allranks.features.ensemble.runner import EnsembleRunner
from allranks.features.ensemble.runs import Runs
from allranks.features.ensemble.view import bar_view

_SOURCE = "result = function(*arguments)"
_SHOWN = 3
#: The frame of this source in a traceback, which is above those of the function.
_FRAME = re.compile(r"(?m)^[^\n]*Cell[^\n]*In\[0\][^\n]*\n(?:[^\n]+\n)+\n")


def map_items(
    cluster: Cluster, function: Any, items: tuple[Iterable[Any], ...], timeout: float | None
) -> list[Any]:
    if not callable(function) or not items:
        raise UsageError(
            f"expected a function and a list of items, found {function!r} and {len(items)} "
            "lists. Type for example: ranks.map(train, [0.1, 0.01])"
        )
    check_timeout(timeout)
    members = [
        Member(number, {"function": function, "arguments": call})
        for number, call in enumerate(zip(*items, strict=False))
    ]
    # With a named metric, no item is searched for one.
    mapping = _Mapping(
        cluster,
        Runs(members, _SOURCE, ("result", True)),
        Options(timeout=timeout),
        bar_view(len(members), getattr(function, "__name__", "function")),
        _SOURCE,
    )
    if members:
        mapping.run()
    return mapping.outcome[0]


class _Mapping(EnsembleRunner):
    @cached_property
    def outcome(self) -> tuple[list[Any], dict[int, str]]:
        # All results, and the reports of the failed items. Read once all have ended.
        results: dict[int, Any] = {}
        ended = [one for one in self.runs if one.state == FAILED]
        failed = {one.number: without_call(one.traceback or one.error) for one in ended}
        for member in self.runs:
            if member.problem:
                failed[member.number] = f"its result could not be sent: {member.problem}"
            elif member.state == FINISHED:
                try:
                    results[member.number] = member.result
                except UsageError as error:
                    failed[member.number] = str(error)
        return [results.get(number) for number in range(len(self.runs))], failed

    def _interrupted(self, said: str) -> MapInterrupted:
        message = f"{said} its .results"
        return MapInterrupted(message, message, *self.outcome)

    def _raise_failures(self) -> None:
        failed = self.outcome[1]
        if not failed:
            return
        numbers = sorted(failed)
        first = self.runs[numbers[0]]
        headline = (
            f"{len(failed)} of {len(self.runs)} items failed; the first, "
            f"{_named(first)}: {first.error or failed[first.number]}"
        )
        parts = [headline]
        parts += [f"{_named(self.runs[number])}\n{failed[number]}" for number in numbers[:_SHOWN]]
        if len(failed) > _SHOWN:
            parts.append(f"and items {', '.join(map(str, numbers[_SHOWN:]))}")
        parts.append(
            "The error's .failed has each item's report, .results what the others returned."
        )
        raise MapFailed(headline, "\n\n".join(parts), *self.outcome)


def without_call(report: str) -> str:
    """Returns the report of an item without the cell that calls the function, which is ours."""
    return _FRAME.sub("", report.replace(f" at line 1: {_SOURCE}", ""), count=1)


def _named(member: Member) -> str:
    return f"item {member.number} ({', '.join(map(short, member.values['arguments']))})"
