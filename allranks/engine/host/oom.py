"""Exit codes of child processes; for a killed one, whether memory was short and how much it had."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

_GROUPS = Path("/sys/fs/cgroup")
#: Of both versions of cgroups.
_LIMITS = "memory.max", "memory.limit_in_bytes"
_COUNTS = "memory.events", "memory.oom_control"
_ANY_NUMBER = 1 << 60
_LOOK_SECONDS, _RECENT_SECONDS = 0.4, 10.0
_KIB = 1024


@dataclass(frozen=True)
class ExitReport:
    """How a child ended; ``memory`` is a text about memory if it was killed."""

    pid: int
    code: int
    memory: str


@dataclass(frozen=True)
class _Counts:
    """How many processes the kernel has killed for lack of memory; None if it is unknown."""

    at: float
    system: int | None
    #: In the cgroup of this process.
    group: int | None


class ExitReports:
    """Reports the ends of this process's children, and counts the kernel's out-of-memory kills."""

    def __init__(self) -> None:
        self._group = _group_of(os.getpid())
        self._counts = deque([self._now()])

    def look(self) -> None:
        # Twice a second. A large process ends some time after its kill was counted.
        if time.monotonic() < self._counts[-1].at + _LOOK_SECONDS:
            return
        self._counts.append(self._now())
        while len(self._counts) > 1 and self._counts[1].at < time.monotonic() - _RECENT_SECONDS:
            self._counts.popleft()

    def _now(self) -> _Counts:
        group = None if self._group is None else _killings(self._group)
        return _Counts(time.monotonic(), _of_the_system(), group)

    def next(self) -> ExitReport | None:
        """Returns the report of the next child that has ended; None if there is none now."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            group = _group_of(found.si_pid)  # as long as it has not been reaped
            pid, status, used = os.wait4(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return None
        code = os.waitstatus_to_exitcode(status)
        memory = self._memory(group, used.ru_maxrss * _KIB) if code == -SIGKILL else ""
        return ExitReport(pid, code, memory)

    def _memory(self, group: Path | None, nbytes: int) -> str:
        """Returns a text about out-of-memory kills, and about the memory that a rank had."""
        had = f"its peak memory was {_amount(nbytes)}"
        before, now = self._counts[0], self._now()
        of_system = _more(before.system, now.system)
        of_group = False
        if group == self._group:
            of_group = _more(before.group, now.group)
        elif group is not None:  # a cgroup of its own, whose first count is unknown
            of_group = of_system and _more(0, _killings(group))
        if not (of_system or of_group):
            known = now.system is not None or now.group is not None
            return f"the kernel reports no out-of-memory kill; {had}" if known else had
        self._counts = deque([now])  # this kill has been reported
        if group is not None and of_group:
            limit = f"the limit of its cgroup {group.name} is {_amount(_limit(group))}"
            return f"out of memory: {limit}; {had}"
        seconds = now.at - before.at
        return f"out of memory: the kernel killed a process here within {seconds:.0f} s; {had}"


def _more(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _of_the_system() -> int | None:
    return _count(Path("/proc/vmstat"), "oom_kill")


def _killings(group: Path) -> int | None:
    found = [_count(group / name, "oom_kill") for name in _COUNTS]
    return next((count for count in found if count is not None), None)


def _count(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _group_of(pid: int) -> Path | None:
    """Returns the folder of a process's cgroup; None if none counts memory."""
    # With cgroups of version 1, that of an ended process is unknown: mostly it is the same as this
    # one's.
    for name in (str(pid), "self"):
        try:
            lines = Path(f"/proc/{name}/cgroup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            number, kinds, path = line.split(":", 2)
            group = _GROUPS / ("memory" if kinds else "") / path.strip("/")
            if (number == "0" or "memory" in kinds.split(",")) and _limit(group):
                return group
    return None


def _limit(group: Path) -> int:
    for name in _LIMITS:
        try:
            said = (group / name).read_text().strip()
        except OSError:
            continue
        return int(said) if said.isdigit() and int(said) < _ANY_NUMBER else 0
    return 0


def _amount(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
