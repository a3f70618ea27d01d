"""What a person reads when a cell failed: the culprit first, the waiting last, nothing twice."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from allranks.errors import WAITING, CellTimeout, Report
from allranks.records.ranks import label

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: What a traceback calls the error: in its first line, and in its last.
_INTERRUPTED = re.compile(r"^((?:\x1b\[[0-9;]*m)*)KeyboardInterrupt\b(.*)$", re.MULTILINE)
_SHOWN_WHOLE = 3
DEATH = "death"
"""Instead of an exception's name: the rank has died."""


def plain(text: str) -> str:
    """Returns a text without colour codes."""
    return _ANSI.sub("", text)


def fold(reports: Iterable[Report]) -> list[list[Report]]:
    """Returns the reports grouped by what they say, the group of the lowest rank first.

    Ranks that waited list those that they saw waiting beside them, and a moment makes these lists
    differ: they are folded all the same, behind the one that saw the most.
    """
    groups: dict[tuple[object, ...], list[Report]] = {}
    for report in reports:
        message, traceback = report.message, plain("\n".join(report.traceback))
        if report.waiting:
            message, traceback = message.partition("\n")[0], ""
        same = (report.etype, message, report.line, traceback)
        groups.setdefault(same, []).append(report)
    for group in groups.values():
        if group[0].waiting:
            group.sort(key=lambda report: -len(report.message))
    return list(groups.values())


def as_timeout(report: Report, late: str) -> Report:
    """Returns the report of a rank that was interrupted as that of one whose time was over.

    Args:
        report: of any rank; one that raised something else stays as it is.
        late: what is said of the time.
    """
    if report.etype != KeyboardInterrupt.__name__:
        return report
    name = CellTimeout.__name__
    traceback = tuple(
        _INTERRUPTED.sub(lambda found: f"{found[1]}{name}{found[2]}", part).rstrip()
        for part in report.traceback
    )
    traceback = (*traceback[:-1], f"{traceback[-1]} {late}") if traceback else ()
    return replace(report, etype=name, message=late, traceback=traceback)


def headline(reports: Sequence[Report], size: int) -> str:
    """Returns one line: who failed, and with what."""
    failed = [report for report in reports if not report.waiting] or list(reports)
    first = failed[0]
    what = f"{first.etype}: {first.message}" if first.message else first.etype
    what = first.message if first.etype == DEATH else what
    kinds = {(report.etype, report.message) for report in failed}
    more = f" (and {len(kinds) - 1} other)" if len(kinds) > 1 else ""
    where = f" at line {first.line}" if first.line else ""
    return f"{label(r.rank for r in failed)} of {size}{where}: {what.splitlines()[0]}{more}"


def describe(reports: Sequence[Report], ran: Iterable[int]) -> str:
    """Returns the whole report of a failed cell that these ranks ran."""
    failed = [report for report in reports if not report.waiting]
    waiting = [report for report in reports if report.waiting]
    parts: list[str] = []
    places = _by_place(fold(failed))
    parts.extend(_whole_of_place(groups) for groups in places[:_SHOWN_WHOLE])
    for groups in places[_SHOWN_WHOLE:]:
        parts.extend(_in_a_line(group) for group in groups)
    if failed:
        parts.extend(
            _in_a_line(group, "was waiting" if len(group) == 1 else "were waiting")
            for group in fold(waiting)
        )
    else:
        parts.extend(_whole(group) for group in fold(waiting)[:_SHOWN_WHOLE])
    finished = sorted(set(ran) - {report.rank for report in reports})
    if finished:
        parts.append(f"{label(finished)} finished the cell.")
    return "\n\n".join(parts)


def _by_place(groups: Iterable[list[Report]]) -> list[list[list[Report]]]:
    """Returns the groups, those together whose tracebacks differ only in the message."""
    places: dict[tuple[object, ...], list[list[Report]]] = {}
    for group in groups:
        first = group[0]
        frames = plain("\n".join(first.traceback)).rstrip()
        # A bounded message differs from the one in the traceback, and then nothing is merged.
        frames = frames.removesuffix(first.message.rstrip())
        places.setdefault((first.etype, first.line, frames), []).append(group)
    return list(places.values())


def _whole_of_place(groups: Sequence[Sequence[Report]]) -> str:
    """Returns one traceback, and below it each message where there are several."""
    if len(groups) == 1:
        return _whole(groups[0])
    first = groups[0][0]
    everyone = sorted((report for group in groups for report in group), key=lambda one: one.rank)
    messages = [
        f"{label(report.rank for report in group)}: {first.etype}: "
        + group[0].message.replace("\n", "\n  ")
        for group in groups
    ]
    shown = f"The traceback of {label([first.rank])}; the messages of all:"
    return "\n".join([_whole([first, *(r for r in everyone if r is not first)]), shown, *messages])


def _whole(group: Sequence[Report]) -> str:
    first = group[0]
    places = {(report.host, report.device) for report in group}
    where = f"{first.host}, {first.device}" if len(places) == 1 else f"{len(places)} devices"
    what = "died" if first.etype == DEATH else f"raised {first.etype}"
    title = f"\x1b[1;31m{label(r.rank for r in group)}\x1b[0m ({where}) {what}"
    line = f" at line {first.line}: {first.source_line}" if first.line else ""
    return f"{title}{line}\n" + "\n".join(first.traceback)


def _in_a_line(group: Sequence[Report], verb: str = "raised") -> str:
    first = group[0]
    line = f" at line {first.line}: {first.source_line}" if first.line else ""
    if first.etype == DEATH:
        return f"{label(r.rank for r in group)} died{line}: {first.message}"
    if verb == "raised":
        return f"{label(r.rank for r in group)} raised {first.etype}{line}: {first.message}"
    return f"{label(r.rank for r in group)} {verb}{line}\n  {_without_own_place(group)}"


def _without_own_place(group: Sequence[Report]) -> str:
    """Returns why a group waited, without the list of who waits where that has its line alone."""
    first = group[0]
    why, listed, places = first.message.partition(f"\n{WAITING}\n")
    own = rf" *ranks? [\d–, ]+ at In\[\d+\]:{first.line}: {re.escape(first.source_line)}"
    return why if listed and re.fullmatch(own, places) else first.message


def ending(code: int, memory: str = "", explain: bool = True) -> str:
    """Returns how a process ended, as ``was killed by signal 9 (SIGKILL)``.

    ``memory`` says whether it was short, where that is known. ``explain`` adds
    the meaning of a SIGKILL.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ": often the system, out of memory" if name == "SIGKILL" else ""
    hint = f": {memory}" if memory else hint
    hint = hint if explain else ""
    return f"was killed by signal {-code} ({name}{hint})"


def stubborn(pending: Iterable[int], size: int) -> str:
    """Returns what is said when ranks were ended because they did not react to an interrupt."""
    return f"interrupted twice: {label(pending)} did not stop, so {ended(size)}"


def ended(size: int) -> str:
    """Returns what is said when all ranks were ended because some did not leave a cell."""
    return (
        f"all {size} ranks were killed and their variables are lost. "
        "The next cell starts a fresh cluster."
    )
