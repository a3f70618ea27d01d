"""``Cluster.map``: a function on each of many items, each on the next free rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allranks.cluster.cluster import Cluster
from allranks.cluster.options import check_timeout
from allranks.ensemble.member import FAILED, FINISHED, Member, short
from allranks.ensemble.runner import EnsemblePlan, EnsembleRunner
from allranks.ensemble.runs import Runs
from allranks.ensemble.view import bar_view
from allranks.errors import MapFailed, MapInterrupted, UsageError

_SOURCE = "result = function(*arguments)"
_SHOWN = 3


def map_items(
    cluster: Cluster, function: Any, items: tuple[Iterable[Any], ...], timeout: float | None
) -> list[Any]:
    if not callable(function) or not items:
        raise UsageError(
            f"expected a function and a list of items, found {function!r} and {len(items)} "
            "lists. Type for example: ranks.map(train, [0.1, 0.01])"
        )
    check_timeout(timeout)
    calls = list(zip(*items, strict=False))
    members = [
        Member(number, {"function": function, "arguments": call})
        for number, call in enumerate(calls)
    ]
    # With a named metric, no item is searched for one.
    mapping = _Mapping(
        cluster,
        Runs(members, _SOURCE, ("result", True)),
        EnsemblePlan(_SOURCE, 0, timeout=timeout),
        bar_view(len(members), getattr(function, "__name__", "function")),
    )
    if members:
        mapping.run()
    return mapping.results()


class _Mapping(EnsembleRunner):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._read: dict[int, Any] = {}

    def results(self) -> list[Any]:
        return [self._read.get(member.number) for member in self.runs]

    def _raise_outcome(self) -> None:
        if self.ledger.problem is not None:
            raise self.ledger.problem
        failed = {m.number: m.traceback or m.error for m in self.runs if m.state == FAILED}
        for member in self.runs:
            if member.problem:
                failed[member.number] = f"its result could not be sent: {member.problem}"
            elif member.state == FINISHED:
                try:
                    self._read[member.number] = member.result
                except UsageError as error:
                    failed[member.number] = str(error)
        if self._interrupts:
            lost = self.cluster.state == "lost"
            why = f"{self.cluster.lost_because}\n" if lost else "interrupted: "
            message = f"{why}{self.ledger.counts()}. What has finished is in its .results"
            raise MapInterrupted(message, message, self.results(), failed)
        if failed:
            raise MapFailed(self._headline(failed), self._text(failed), self.results(), failed)

    def _headline(self, failed: dict[int, str]) -> str:
        first = self.runs[min(failed)]
        return (
            f"{len(failed)} of {len(self.runs)} items failed; the first, "
            f"{_named(first)}: {first.error or failed[first.number]}"
        )

    def _text(self, failed: dict[int, str]) -> str:
        parts = [self._headline(failed)]
        for number in sorted(failed)[:_SHOWN]:
            parts.append(f"{_named(self.runs[number])}\n{failed[number]}")
        if len(failed) > _SHOWN:
            others = ", ".join(str(number) for number in sorted(failed)[_SHOWN:])
            parts.append(f"and items {others}")
        parts.append(
            "The error's .failed has each item's report, .results what the others returned."
        )
        return "\n\n".join(parts)


def _named(member: Member) -> str:
    return f"item {member.number} ({', '.join(map(short, member.values['arguments']))})"
