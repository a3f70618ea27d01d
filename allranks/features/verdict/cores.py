"""How many cores this process may use, and for how long these were idle. Runs in every rank.

Linux binds a process to cores, and a container limits the time on cores of a group of processes
(cgroup): its threads could run then, and have no core, while the host has idle ones.

Source: the kernel's Documentation, admin-guide/cgroup-v2 (cpu.max, cpu.stat) and scheduler/
sched-bwc (cpu.cfs_quota_us).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from math import inf, isnan, nan
from pathlib import Path
from typing import NamedTuple

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: The unit of /proc/stat, whose columns of a core are user, nice, system, idle, iowait, ….
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class CoreLimit(NamedTuple):
    """How many cores a group of processes may use, and what has counted their time in seconds."""

    cores: float
    group: Path | None = None

    def used_seconds(self) -> float:
        """Returns the time of the group's processes; NaN if it is not counted."""
        if self.group is not None:
            with suppress(OSError, StopIteration, ValueError):
                rows = map(str.split, (self.group / "cpu.stat").read_text().splitlines())
                return next(int(row[1]) for row in rows if row[0] == "usage_usec") / 1e6
            with suppress(OSError, ValueError):
                return int((self.group / "cpuacct.usage").read_text()) / 1e9
        return nan


def core_limit(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> CoreLimit:
    """Returns the least limit of the groups that this process is in."""
    found = [CoreLimit(inf)]
    with suppress(OSError, ValueError):
        for folder in _folders(groups, own.read_text()):
            with suppress(OSError, ValueError, ZeroDivisionError):
                found.append(CoreLimit(_cores_of(folder), folder))
    return min(found, key=lambda one: one.cores)


def _folders(groups: Path, own: str) -> Iterator[Path]:
    """Yields the folders of the process's groups that limit cores, and of those around them."""
    for line in own.splitlines():
        number, kinds, path = line.split(":", 2)
        if number != "0" and "cpu" not in kinds.split(","):
            continue
        # The folder may name them in another order, and has a link for each.
        top = groups / kinds if (groups / kinds).exists() else groups / "cpu"
        # In a container the path may be that of the host, and the top the container's own group.
        group = top / path.strip("/")
        yield from (group, *(one for one in group.parents if one == top or top in one.parents))


def _cores_of(folder: Path) -> float:
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    return inf if quota in ("max", "-1") else int(quota) / int(period)


def usable_cores() -> float:
    """Returns how many cores this process may use, also a part of one."""
    return min(len(_bound()), core_limit().cores)


def _bound() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return {*range(os.cpu_count() or 1)}


class IdleCores:
    """Adds up for how long the cores were idle that this process may use."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None
        self._seconds = 0.0

    def seconds_at(self, now: float) -> float:
        """Returns the sum over the cores since the first call; NaN if it is not known.

        Args:
            now: the seconds of a clock that goes on steadily.
        """
        limit = core_limit()
        idle = _idle_seconds()
        used = limit.used_seconds() if limit.cores < inf else 0.0
        if self._last is not None:
            before, idle_before, used_before = self._last
            left = idle - idle_before
            if limit.cores < inf and not isnan(left):
                # Of a limit nothing may be left, while the host's cores are idle.
                of_limit = limit.cores * (now - before) - (used - used_before)
                left = of_limit if isnan(of_limit) else min(left, of_limit)
            self._seconds += left if isnan(left) else max(0.0, left)
        self._last = now, idle, used
        return self._seconds


def _idle_seconds() -> float:
    """Returns for how long the cores had nothing to run; NaN if the system does not count it.

    This is also the time in which programs waited for a disk, which /proc/uptime leaves out.
    """
    bound = _bound()
    names = {"cpu"} if len(bound) == os.cpu_count() else {f"cpu{one}" for one in bound}
    rows = map(str.split, Path("/proc/stat").read_text().splitlines())
    idle = [int(row[4]) + int(row[5]) for row in rows if row and row[0] in names]
    return sum(idle) / _TICKS if idle else nan
