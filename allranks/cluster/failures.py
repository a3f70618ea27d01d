"""How ranks ended, and the report of a failed cell.

A cell's report has the cause first and the waiting ranks last. Equal reports of several ranks are
one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import psutil

from allranks import own_files
from allranks.errors import COLOURS, WAITING, CellTimeout, Report, UsageError
from allranks.records.agent import AgentExit, Exit, HostLeft, LauncherExit
from allranks.records.code_names import FILE_OF_CELL
from allranks.records.ranks import DEAD, ENDINGS, IDLE, SILENT, STOPPED, Activity, label
from allranks.records.telemetry import Telemetry
from allranks.records.wire import Hello, Output, Reply, Result

#: What a traceback calls the error: in its first line, and in its last.
_INTERRUPTED = re.compile(r"^((?:\x1b\[[0-9;]*m)*)KeyboardInterrupt\b(.*)$", re.MULTILINE)
#: What `RankState.advice` says of a rank that has failed.
_ADVICE = re.compile(r"Correct the error of rank \d+\.")
_OF_INTERRUPTS = (KeyboardInterrupt.__name__, CellTimeout.__name__)
_SHOWN_WHOLE = 3
#: Instead of an exception's name: the rank has died.
DEATH = "death"


def plain(text: str) -> str:
    return COLOURS.sub("", text)


def fold(reports: Iterable[Report]) -> list[list[Report]]:
    """Groups equal reports, the group of the lowest rank first.

    Ranks that waited list the ranks that they saw waiting. These lists differ with the moment; such
    reports are folded all the same, behind the longest list.
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


def refused_by_all(reports: Sequence[Report], size: int) -> bool:
    """Whether all ranks have raised the same UsageError, as collectives do that compare calls."""
    found = {(report.etype, report.message, report.waiting) for report in reports}
    same = len(found) == 1 and len({report.rank for report in reports}) == size
    return same and (reports[0].etype, reports[0].waiting) == (UsageError.__name__, False)


def as_timeout(report: Report, late: str) -> Report:
    """Turns the report of an interrupted rank into that of a timeout; other reports stay."""
    if report.etype != KeyboardInterrupt.__name__:
        return report
    name = CellTimeout.__name__
    traceback = tuple(
        _INTERRUPTED.sub(lambda found: f"{found[1]}{name}{found[2]}", part).rstrip()
        for part in report.traceback
    )
    traceback = (*traceback[:-1], f"{traceback[-1]} {late}") if traceback else ()
    message = report.message if report.waiting else late
    return replace(report, etype=name, message=message, traceback=traceback)


def headline(reports: Sequence[Report], size: int) -> str:
    failed = [report for report in reports if not report.waiting] or list(reports)
    first = failed[0]
    what = f"{first.etype}: {first.message}" if first.message else first.etype
    what = first.message if first.etype == DEATH else what
    kinds = {(report.etype, report.message) for report in failed}
    more = f" (and {len(kinds) - 1} other)" if len(kinds) > 1 else ""
    where = f"{_seen(first)} at line {first.line}" if first.line else ""
    return f"{label(r.rank for r in failed)} of {size}{where}: {what.splitlines()[0]}{more}"


def describe(reports: Sequence[Report], ran: Iterable[int]) -> str:
    """Returns the whole report of a failed cell on the ranks that ran it."""
    failed = [report for report in reports if not report.waiting]
    waiting = [_advised_on_all(report, failed) for report in reports if report.waiting]
    parts: list[str] = []
    # Groups that differ in the message only are shown with one traceback.
    by_place: dict[tuple[object, ...], list[list[Report]]] = {}
    for group in fold(failed):
        first = group[0]
        frames = plain("\n".join(first.traceback)).rstrip()
        # A shortened message differs from that in the traceback; then nothing is merged.
        frames = frames.removesuffix(first.message.rstrip())
        by_place.setdefault((first.etype, first.line, frames), []).append(group)
    places = list(by_place.values())
    parts.extend(_whole_of_place(groups) for groups in places[:_SHOWN_WHOLE])
    for groups in places[_SHOWN_WHOLE:]:
        parts.extend(_in_a_line(group) for group in groups)
    if failed:
        parts.extend(map(_as_waiting, fold(waiting)))
    else:
        parts.extend(_only_waiting(fold(waiting)))
    finished = sorted(set(ran) - {report.rank for report in reports})
    if finished:
        parts.append(f"{label(finished)} finished the cell.")
    return "\n\n".join(parts)


def _advised_on_all(waiting: Report, failed: Sequence[Report]) -> Report:
    # A rank that waits ends with the first error; others may have failed at the same time.
    raised = {report.rank for report in failed if report.etype != DEATH}
    if len(raised) < 2:
        return waiting
    advice = f"Correct the errors of {label(raised)}."
    return replace(waiting, message=_ADVICE.sub(advice, waiting.message))


def _only_waiting(groups: Sequence[Sequence[Report]]) -> list[str]:
    if not groups or groups[0][0].etype not in _OF_INTERRUPTS:
        return [_whole(group) for group in groups[:_SHOWN_WHOLE]]
    # The traceback of an interrupt does not say for which ranks a call has waited.
    first, *others = groups
    lines = map(_as_waiting, others)
    return [f"{_whole(first)}\n{first[0].message}", *lines]


def _whole_of_place(groups: Sequence[Sequence[Report]]) -> str:
    if len(groups) == 1:
        return _whole(groups[0])
    first = groups[0][0]
    everyone = sorted((report for group in groups for report in group), key=lambda one: one.rank)
    # The traceback ends with the message, which is listed.
    lines = "\n".join(first.traceback).rstrip().split("\n")
    above = "\n".join(lines[: -len(first.message.rstrip().split("\n"))])
    shown = f"The traceback of {label([first.rank])}; the messages of all:"
    if not above:  # a box of a message alone
        shown = f"This is the report of {label(one.rank for one in groups[0])}. The others:"
        groups = groups[1:]
    messages = [
        f"{label(report.rank for report in group)}: {first.etype}: "
        + group[0].message.replace("\n", "\n  ")
        for group in groups
    ]
    whole = replace(first, traceback=(above,)) if above else first
    others = (report for report in everyone if report is not first)
    return "\n".join([_whole([whole, *others]), shown, *messages])


def _whole(group: Sequence[Report]) -> str:
    first = group[0]
    places = {(report.host, report.device) for report in group}
    where = f"{first.host}, {first.device}" if len(places) == 1 else f"{len(places)} devices"
    what = "died" if first.etype == DEATH else f"raised {first.etype}"
    title = f"\x1b[1m{label(r.rank for r in group)}\x1b[0m ({where}) {what}{_place(first)}"
    return "\n".join([title, *first.traceback])


def _place(report: Report) -> str:
    source = f": {report.source_line}" if report.source_line else ""
    return f"{_seen(report)} at line {report.line}{source}" if report.line else ""


def _seen(report: Report) -> str:
    # The stack of a crash, which has no source, is exact. Else the rank may have gone on since.
    return ", last seen" if report.etype == DEATH and report.source_line else ""


def _as_waiting(group: Sequence[Report]) -> str:
    return _in_a_line(group, "was waiting" if len(group) == 1 else "were waiting")


def _in_a_line(group: Sequence[Report], verb: str = "raised") -> str:
    first, ranks = group[0], label(r.rank for r in group)
    line = _place(first)
    if first.etype == DEATH:
        return f"{ranks} died{line}: {first.message}"
    if verb == "raised":
        return f"{ranks} raised {first.etype}{line}: {first.message}"
    # The list of places adds nothing if all ranks wait at the same line.
    why, listed, places = first.message.partition(f"\n{WAITING}\n")
    own = rf" *ranks? [\d–, ]+ at In\[\d+\]:{first.line}: {re.escape(first.source_line)}"
    message = why if listed and re.fullmatch(own, places) else first.message
    return f"{ranks} {verb}{line}\n  {message}"


def ending(code: int, reason: str = "", explain: bool = True) -> str:
    """Returns how a process ended, as ``was killed by signal 9 (SIGKILL)``. ``explain`` adds the
    ``reason`` of a signal, or what a SIGKILL mostly means.
    """
    if code >= 0:
        return f"ended with exit code {code}" + (f": {reason}" if reason else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = reason or ("often the system, out of memory" if name == "SIGKILL" else "")
    hint = f": {hint}" if hint and explain else ""
    return f"was killed by signal {-code} ({name}{hint})"


def stubborn(pending: Iterable[int]) -> str:
    """Returns why ranks are killed that did not react to an interrupt."""
    return f"interrupted twice: {label(pending)} did not stop"


#: True of a notebook's own ranks; a `Cluster` in Python is started again by its method.
NEXT_CELL = "The next cell starts a fresh cluster."


def ended(size: int, because: str = "") -> str:
    """Returns the message after all ranks were killed because some stayed in a cell. ``because``
    is the reason why not only these.
    """
    because = f", because {because}" if because else ""
    return f"all {size} ranks were killed and their variables are lost{because}. {NEXT_CELL}"


_OTHERS_SECONDS = 1.0
#: For the other ends, after the first death is known.
_KNOWN_SECONDS = 0.2
_TAIL_LINES = 12
#: The signals with which launchers end processes.
_OF_LAUNCHERS = (signal.SIGKILL, signal.SIGTERM)
_CRASH = "Fatal Python error: "
#: A frame of a cell in the stack that Python writes when it crashes.
IN_CELL = re.compile(rf'(?m)^  File "(?:In\[\d+\]|{FILE_OF_CELL})", line (\d+) in ')
#: PRRTE's warning about a process that was faster than itself.
_HARMLESS = "Warning: setpgid("
SHOWN_NBYTES = 16 * 1024


#: The events of ends that concern a cluster's ranks.
Ended = Exit | LauncherExit | AgentExit | HostLeft


@dataclass(frozen=True)
class ProcessExit:
    """The end of a rank, of the launcher (rank -1) or of the host agent (rank -2).

    ``host`` names the agent of several, ``why`` says how that host was lost. ``reason`` is a text
    about a lack of memory, for a rank that was killed, or says why a rank has ended by itself.
    """

    rank: int
    code: int = 0
    by_launcher: bool = False
    at: float = field(default_factory=time.monotonic)
    host: str = ""
    why: str = ""
    reason: str = ""
    pid: int = 0

    @classmethod
    def of(cls, event: Ended, host: str = "") -> ProcessExit:
        rank = -1 if isinstance(event, LauncherExit) else -2
        return cls(**{"rank": rank, **vars(event)}, host=host)

    def how(self, explain: bool = True) -> str:
        """Returns how it ended, as :func:`ending`, or with which host it was lost."""
        if self.why:
            return f"was lost with its host: {self.host} {self.why}"
        return ending(self.code, self.reason if explain else "", explain)


def death_lines(ends: Iterable[ProcessExit]) -> str:
    """Returns how ranks have died, those of a lost host together."""
    alone: list[str] = []
    of_hosts: dict[str, list[int]] = {}
    for end in ends:
        if end.why:
            of_hosts.setdefault(f"Host {end.host} {end.why}", []).append(end.rank)
        else:
            alone.append(f"rank {end.rank} {end.how()}")
    lost = [
        f"{host}; {label(ranks)} {'is' if len(ranks) == 1 else 'are'} lost with it"
        for host, ranks in of_hosts.items()
    ]
    return "; ".join([*lost, *alone])


def culprits(ends: Sequence[ProcessExit]) -> list[ProcessExit]:
    """Returns the rank that died first, and by itself; none if a host was lost before."""
    for end in ends:
        if end.why:
            return []
        if end.rank >= 0 and not end.by_launcher:
            return [end]
    return []


def all_over(ends: Sequence[ProcessExit], size: int) -> bool:
    """Whether no more ends are expected: all ranks have ended, or enough time has passed."""
    if not ends:
        return False
    ended = {end.rank for end in ends}
    patience = _KNOWN_SECONDS if culprits(ends) else _OTHERS_SECONDS
    return len(ended - {-1}) >= size or -2 in ended or time.monotonic() - ends[0].at > patience


def describe_exits(ends: Sequence[ProcessExit]) -> str:
    """Returns the first end in a sentence; "" without one."""
    for end in culprits(ends):
        return f"Rank {end.rank} {ending(end.code, end.reason)}."
    for end in sorted(ends, key=lambda end: not end.why):
        if end.why:
            return f"Host {end.host} {end.why}."
        what = {-1: "The launcher", -2: "The cluster's own process"}.get(
            end.rank, f"Rank {end.rank}"
        )
        return f"{what} {ending(end.code)}."
    return "No process has ended; the start took too long."


def last_lines(log_dir: str, ends: Sequence[ProcessExit], launcher_text: str) -> str:
    """Returns the last lines of the rank that died, else of the launcher and the host agent."""
    for end in culprits(ends):
        said = log_tail(os.path.join(log_dir, f"rank-{end.rank}.log"))
        if said:
            return f"Its last lines:\n{said}"
    lines = [line for line in launcher_text.strip().splitlines() if _HARMLESS not in line]
    said = "\n".join(lines[-_TAIL_LINES:])
    said = said or log_tail(os.path.join(log_dir, "host-agent.log"))
    return f"The launcher's last lines:\n{said}" if said else ""


def startup_places(log_dir: str, missing: Iterable[int]) -> str:
    """Returns where missing ranks stand in their start, from their logs; "" if no log has it."""
    lines = []
    for rank in missing:
        path = os.path.join(log_dir, f"rank-{rank}.log")
        # All threads of it, each with its innermost call on top; the main thread comes last.
        *_, last = log_end(path, 0).split("(most recent call first):\n")
        place = last.splitlines()[0].strip() if last.startswith("  File ") else ""
        if place:
            lines.append(f"Rank {rank} is at {place}")
        elif not log_length(path):
            lines.append(f"Rank {rank} has written nothing: its log is empty or missing")
    return "\n".join(lines[:_TAIL_LINES])


def loss_text(
    ends: Sequence[ProcessExit],
    hellos: Mapping[int, Hello],
    launcher_text: str,
    size: int,
    shown: bool,
    cause: str = "",
    not_replaced: str = "",
) -> str:
    """Returns what died, where, of what, its last lines unless shown, and what is lost with it.

    ``cause`` is the reason if the job of all ranks was ended, ``not_replaced`` the one why dead
    ranks are not replaced.
    """
    found = culprits(ends)
    log_dir = os.path.dirname(next(iter(hellos.values())).log)
    lost = f"the variables of all {size} ranks are" if size > 1 else "its variables are"
    said = ""
    if cause:
        what = f"{cause}; the ranks ended with it"
    elif found:
        what, alone = _own_ends(found[0], ends, hellos, size)
        others = [rank for rank in range(size) if rank not in alone]
        verb, them = "was" if len(others) == 1 else "were", "it" if len(alone) == 1 else "them"
        what += f"; {label(others)} {verb} killed with {them}" if others else ""
        said = "" if shown else last_lines(log_dir, ends, "")
    else:
        what = f"{describe_exits(ends).removesuffix('.')}; the ranks ended with it"
        said = last_lines(log_dir, ends, launcher_text)
    parts = [f"{what}, and {lost} lost.", said]
    if not_replaced:
        parts.append(f"Dead ranks are not replaced here: {not_replaced}.")
    parts.append(f"{NEXT_CELL} The logs are in {log_dir}")
    return "\n".join(filter(None, parts))


def _own_ends(
    first: ProcessExit, ends: Sequence[ProcessExit], hellos: Mapping[int, Hello], size: int
) -> tuple[str, list[int]]:
    """Returns how the ranks have ended that no launcher had let go before, those that ended in the
    same way together and those of the first end first; and these ranks.

    A rank that ended later, but like the first one and by no signal of launchers, is one of them.
    """
    like_first = -first.code not in _OF_LAUNCHERS
    alike: dict[int, dict[int, ProcessExit]] = {first.code: {first.rank: first}}
    for end in ends:
        own = not end.by_launcher or (like_first and end.code == first.code)
        if end.rank >= 0 and own:
            alike.setdefault(end.code, {}).setdefault(end.rank, end)
    alone = [rank for group in alike.values() for rank in group]
    said = [_how_all([*group.values()], size) for group in alike.values()]
    if len(alike[first.code]) == 1:
        hello = hellos[first.rank]
        where = f"rank {hello.rank} ({hello.host}, pid {hello.pid}, {hello.device})"
        said[0] = f"{where} {ending(first.code, first.reason)}"
    return "; ".join(said), alone


def _how_all(group: Sequence[ProcessExit], size: int) -> str:
    """Returns how these ranks ended, all with the same code."""
    explained = [end for end in group if end.reason]
    reason = explained[0].reason if explained else ""
    if any(end.reason != reason for end in group):
        reason = f"for rank {explained[0].rank}, {reason}"
    how = ending(group[0].code, reason)
    how = how.replace("was", "were", 1) if len(group) > 1 and group[0].code < 0 else how
    is_all = len(group) == size > 1
    return f"{f'all {size} ranks' if is_all else label(end.rank for end in group)} {how}"


def log_end(path: str, offset: int) -> str:
    # At most 16 KiB.
    try:
        return own_files.end_of(path, SHOWN_NBYTES, offset)
    except OSError:
        return ""  # the log is on another host


def log_length(path: str) -> int:
    # 0 if the log is on another host.
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def log_tail(path: str, offset: int = 0) -> str:
    lines = log_end(path, offset).strip().splitlines()
    crash = [at for at, line in enumerate(lines) if line.startswith(_CRASH)]
    in_cell = [at for at, line in enumerate(lines) if IN_CELL.match(line)]
    if crash and in_cell and in_cell[-1] > crash[-1]:
        # The innermost frames come first. Those behind the cell's are IPython's and ours.
        lines = lines[crash[-1] : in_cell[-1] + 1]
    return "\n".join(lines[-_TAIL_LINES:])


CellRecord = Output | Reply | Result | Telemetry


@dataclass(frozen=True)
class RankStatus:
    """One rank now."""

    rank: int
    host: str
    pid: int
    device: str
    rss_nbytes: int
    doing: Activity
    line: str

    @property
    def state(self) -> str:
        """What it does, as text."""
        return str(self.doing)


def read_status(hello: Hello, answer: dict[str, Any]) -> RankStatus:
    """Reads a rank's status from its answer; without one, from the operating system."""
    if answer:
        doing = Activity.read(answer["doing"])
        rss, line = int(answer["rss_nbytes"]), str(answer["line"])
    else:
        rss, doing, line = 0, SILENT, ""
        try:
            if hello.host != socket.gethostname():
                raise psutil.NoSuchProcess(hello.pid)
            process = psutil.Process(hello.pid)
            rss = process.memory_info().rss
            doing = STOPPED if process.status() == psutil.STATUS_STOPPED else SILENT
        except psutil.Error:
            pass  # on another host the number is another process's, or unused
    return RankStatus(hello.rank, hello.host, hello.pid, hello.device, rss, doing, line)


def read_statuses(
    hellos: Mapping[int, Hello],
    answers: Mapping[int, dict[str, Any]],
    dead: Mapping[int, ProcessExit] = MappingProxyType({}),
    left: Mapping[int, str] = MappingProxyType({}),
) -> list[RankStatus]:
    """Reads the status of all ranks; those without an answer are looked up. ``dead`` has the ends
    of ranks that can be replaced, ``left`` the status of the replies to a cell that still runs.
    """
    found = {rank: read_status(hello, answers.get(rank, {})) for rank, hello in hellos.items()}
    for rank in left.keys() & found.keys():
        if found[rank].doing == IDLE:
            found[rank] = replace(found[rank], doing=ENDINGS[left[rank]])
    for rank in dead.keys() & found.keys():
        found[rank] = replace(found[rank], rss_nbytes=0, doing=DEAD, line=dead[rank].how())
    return list(found.values())


def status_tree(statuses: Sequence[RankStatus], title: str) -> str:
    lines = [title]
    for host in dict.fromkeys(status.host for status in statuses):
        lines.append(f"└── {host}")
        here = [status for status in statuses if status.host == host]
        for status in here:
            branch = "└──" if status is here[-1] else "├──"
            memory = f"{status.rss_nbytes / 1e6:.0f} MB"
            at = f"  {status.line}" if status.line else ""
            lines.append(
                f"    {branch} rank {status.rank}  pid {status.pid}  {status.device}  {memory}  "
                f"{status.state}{at}"
            )
    return "\n".join(lines)
