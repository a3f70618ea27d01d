"""One result for each test, of the reports of all its ranks."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from allranks.cluster.failures import plain
from allranks.errors import Report
from allranks.features.pytest.records import Phase, RankOutcome
from allranks.records.ranks import label

_WHEN = ("setup", "call", "teardown")


@dataclass
class RanksOfTest:
    """How a test has ended on its ranks.

    ``outcomes`` lacks the ranks that have died; ``reports`` has allranks' texts about the ranks
    that did not finish, ``text`` the whole of it; ``first`` is the rank that failed first;
    ``limit`` is the time limit in seconds.
    """

    size: int
    outcomes: Mapping[int, RankOutcome]
    reports: Mapping[int, Report]
    first: int | None
    text: str
    limit: float | None
    timed_out: bool = False

    @property
    def dead(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.outcomes]

    @property
    def late(self) -> str:
        """That it has exceeded its time limit, in words; "" if it has not."""
        return f"the test exceeded its timeout of {self.limit:g} s" if self.timed_out else ""


def failed_at_start(item: pytest.Item, text: str) -> pytest.TestReport:
    return _own_report(item, "setup", text)


def failed_at_end(item: pytest.Item, text: str) -> pytest.TestReport:
    return _own_report(item, "teardown", text)


def reports(config: pytest.Config, item: pytest.Item, test: RanksOfTest) -> list[pytest.TestReport]:
    """Returns the reports of a test: its setup, its call and its teardown."""
    phases: dict[str, dict[int, Phase]] = {when: {} for when in _WHEN}
    for rank, outcome in test.outcomes.items():
        for phase in outcome.phases:
            phases[phase.report["when"]][rank] = phase
    found: list[dict[str, Any]] = []
    for when in _WHEN:
        ended = phases[when]
        # A rank that has died did so in the setup only if no other rank went on.
        in_setup = bool(phases["setup"]) and not phases["call"]
        died = test.dead if when == ("setup" if in_setup else "call") else []
        failed = any(data["outcome"] != "passed" for data in found)
        if not (ended or died) or (when == "call" and failed):
            continue
        data = _merged(config, item, test, when, ended, died)
        if data is None or (when == "teardown" and failed and _waited_only(ended)):
            continue
        found.append(data)
    hook = config.hook.pytest_report_from_serializable
    return [hook(config=config, data=data) for data in found]


def _waited_only(ended: Mapping[int, Phase]) -> bool:
    failed = [phase for phase in ended.values() if phase.report["outcome"] == "failed"]
    return bool(failed) and all(phase.waiting for phase in failed)


def _kind(phase: Phase) -> str:
    outcome = str(phase.report["outcome"])
    expected = "wasxfail" in phase.report
    return (
        {"skipped": "xfailed", "passed": "xpassed"}.get(outcome, outcome) if expected else outcome
    )


def _merged(
    config: pytest.Config,
    item: pytest.Item,
    test: RanksOfTest,
    when: str,
    ended: Mapping[int, Phase],
    died: list[int],
) -> dict[str, Any] | None:
    waiting = {
        rank
        for rank, phase in ended.items()
        if phase.report["outcome"] != "passed" and _waits(test, rank, phase)
    }
    kinds = {rank: _kind(phase) for rank, phase in ended.items() if rank not in waiting}
    failed = [rank for rank, kind in kinds.items() if kind == "failed"]
    if died:
        text = _of_the_dead(test, died)
        data = _data(config, _own_report(item, when, text))
        return _with_others(item, test, data, ended, set(ended), waiting)
    if failed or (waiting and not kinds.keys() - {r for r in kinds if kinds[r] == "passed"}):
        among = failed or sorted(waiting)
        cause = test.first if test.first in among else among[0]
        return _of_cause(item, test, ended, cause, waiting)
    if len(set(kinds.values())) == 1 and not (waiting and "skipped" in kinds.values()):
        return _same(ended, next(iter(kinds)), kinds)
    text = _differences(ended, kinds, waiting)
    data = _data(config, _own_report(item, when, text))
    return _with_sections(data, ended, list(ended))


def _waits(test: RanksOfTest, rank: int, phase: Phase) -> bool:
    # Libraries raise errors of their own when allranks ends a wait in them.
    report = test.reports.get(rank)
    return phase.waiting or (report is not None and report.waiting)


def _of_the_dead(test: RanksOfTest, died: list[int]) -> str:
    lines = []
    for rank in died:
        report = test.reports.get(rank)
        if report is None:
            continue
        where = f"\n  {report.source_line}" if report.source_line else ""
        line = f", last seen at line {report.line}" if report.line else ""
        lines.append(f"rank {rank} of {test.size} died: {report.message}{line}{where}")
        lines += map(plain, report.traceback)
    return "\n".join(filter(None, [test.late, *lines])) if lines else plain(test.text)


def _own_report(item: pytest.Item, when: str, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,  # type: ignore[arg-type]
    )


def _data(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
    return data


def _of_cause(
    item: pytest.Item,
    test: RanksOfTest,
    ended: Mapping[int, Phase],
    cause: int,
    waiting: set[int],
) -> dict[str, Any]:
    """Returns the report of the rank that is the cause, with a line for each of the others."""
    data = copy.deepcopy(ended[cause].report)
    alike = [r for r, phase in ended.items() if _summary(phase) == _summary(ended[cause])]
    alike = alike if cause in alike else [cause]
    who = f"{label(alike)} of {test.size}" if test.size > 1 else label(alike)
    late = test.late
    title = f"{who}: {late}" if late else who
    longrepr = data["longrepr"]
    if isinstance(longrepr, dict):
        entry = {"type": "ReprEntryNative", "data": {"lines": [f"{title}\n"], "style": "native"}}
        first = longrepr["chain"][0][0] if longrepr.get("chain") else longrepr["reprtraceback"]
        first["reprentries"].insert(0, entry)
        crash = longrepr["chain"][-1][1] if longrepr.get("chain") else longrepr["reprcrash"]
        for one in filter(None, (crash, longrepr["reprcrash"])):
            if not one["message"].startswith(f"{who}: "):
                one["message"] = f"{who}: {late or one['message']}"
    else:
        data["longrepr"] = f"{title}\n{longrepr}"
    message, *_ = _summary(ended[cause])
    return _with_others(item, test, data, ended, set(ended) - set(alike), waiting, message)


def _summary(phase: Phase) -> tuple[str, str, int]:
    """Returns the message and the place of an error; for all ranks that failed alike the same."""
    longrepr = phase.report["longrepr"]
    crash = longrepr["reprcrash"] if isinstance(longrepr, dict) else None
    if crash is None:
        return str(longrepr or ""), "", 0
    return crash["message"], crash["path"], crash["lineno"]


def _with_others(
    item: pytest.Item,
    test: RanksOfTest,
    data: dict[str, Any],
    ended: Mapping[int, Phase],
    others: set[int],
    waiting: set[int],
    cause: str = "",
) -> dict[str, Any]:
    lines = defaultdict[str, list[int]](list)
    for rank in sorted(others):
        phase = _ended_in(test, rank, ended[rank])
        if phase.report["outcome"] == "failed" or "wasxfail" in phase.report:
            message, path, lineno = _summary(phase)
            place = f"{os.path.relpath(path, item.config.rootpath)}:{lineno}" if path else ""
            if rank in waiting or phase.waiting:
                said = f"waited at {place}" if place else "waited"
            else:
                first, *_ = message.splitlines() or [""]
                alike = message == cause
                said = "failed" + " alike" * alike + (f" at {place}" if place else "")
                said += "" if alike else f": {first}"
            lines[said].append(rank)
        else:
            lines[phase.report["outcome"]].append(rank)
    if lines:
        text = "\n".join(f"{label(ranks)} {said}" for said, ranks in lines.items())
        if isinstance(data["longrepr"], dict):
            data["longrepr"]["sections"] = [
                *data["longrepr"]["sections"],
                ("other ranks", text, "-"),
            ]
        else:
            data["longrepr"] = f"{data['longrepr']}\n{text}"
    return _with_sections(data, ended, [r for r in ended if r not in others] + sorted(others))


def _ended_in(test: RanksOfTest, rank: int, phase: Phase) -> Phase:
    """Returns the phase in which a rank has ended, which may be later than that of the cause."""
    phases = test.outcomes[rank].phases
    later = phases[phases.index(phase) :]
    return next((one for one in later if one.report["outcome"] == "failed"), phase)


def _same(ended: Mapping[int, Phase], of: int, kinds: Mapping[int, str]) -> dict[str, Any]:
    return _with_sections(dict(ended[of].report), ended, sorted(kinds))


def _with_sections(
    data: dict[str, Any], ended: Mapping[int, Phase], order: Iterable[int]
) -> dict[str, Any]:
    """Adds the captured output and the properties of all ranks, each once, and the longest time."""
    printed = defaultdict[tuple[str, str], list[int]](list)
    properties = dict[Any, None]()
    for rank in order:
        report = ended[rank].report
        for name, content in report["sections"]:
            printed[name, content].append(rank)
        properties |= dict.fromkeys(map(tuple, report["user_properties"]))
    data["sections"] = [
        (name if len(ended) == 1 else f"{name}, {label(ranks)}", content)
        for (name, content), ranks in printed.items()
    ]
    data["user_properties"] = list(properties)
    data["duration"] = max((phase.report["duration"] for phase in ended.values()), default=0.0)
    return data


def _differences(ended: Mapping[int, Phase], kinds: Mapping[int, str], waiting: set[int]) -> str:
    by_kind = defaultdict[str, list[int]](list)
    for rank, kind in kinds.items():
        by_kind[kind].append(rank)
    if waiting:
        by_kind["waiting"] = sorted(waiting)
    found = ", ".join(f"{kind} on {label(ranks)}" for kind, ranks in by_kind.items())
    why = []
    for kind, ranks in by_kind.items():
        reason = _reason(ended[ranks[0]])
        if kind in ("skipped", "xfailed") and reason:
            why.append(f"{label(ranks)}: {reason}")
    advice = "Skip a test, or expect its failure, on all ranks or on none."
    return "\n".join([f"expected one outcome on all ranks, found {found}. {advice}", *why])


def _reason(phase: Phase) -> str:
    longrepr = phase.report["longrepr"]
    if "wasxfail" in phase.report:
        return str(phase.report["wasxfail"])
    return str(longrepr[2]) if isinstance(longrepr, tuple | list) else ""
