"""How many cores a process may use, and for how long these were idle."""

from __future__ import annotations

from math import inf, isnan, nan
from pathlib import Path

import pytest

from allranks.features.verdict import cores
from allranks.features.verdict.cores import CoreLimit, IdleCores, core_limit


def files(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def limit_of(tmp_path: Path, own: str) -> CoreLimit:
    (tmp_path / "own").write_text(own + "\n")
    return core_limit(tmp_path / "groups", tmp_path / "own")


def test_the_least_limit_of_the_groups_around_a_process_counts(tmp_path):
    groups = tmp_path / "groups"
    files(groups / "slice" / "job" / "step", cpu__max="max 100000")
    files(groups / "slice" / "job", cpu__max="150000 100000", cpu__stat="usage_usec 2500000")
    files(groups / "slice", cpu__max="400000 100000")
    found = limit_of(tmp_path, "0::/slice/job/step")
    assert found.cores == 1.5
    assert found.used_seconds() == 2.5


def test_limits_of_the_first_version_are_read(tmp_path):
    # A container sees its own group at the top, and the host's path.
    group = tmp_path / "groups" / "cpu,cpuacct"
    files(group, cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000", cpuacct__usage="3000000")
    found = limit_of(tmp_path, "4:cpuset:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/docker/ab")
    assert found.cores == 0.5
    assert found.used_seconds() == 0.003


@pytest.mark.parametrize("quota", ["-1", "a text"])
def test_without_a_limit_all_cores_count(tmp_path, quota):
    files(tmp_path / "groups" / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert limit_of(tmp_path, "1:cpu:/") == CoreLimit(inf)
    assert limit_of(tmp_path / "groups", "0::/") == CoreLimit(inf)
    assert isnan(CoreLimit(1.0, tmp_path).used_seconds())


class Container:
    """A group of processes and its host, whose counters are set."""

    def __init__(self, limit: float) -> None:
        self.cores, self.used, self.idle = limit, 0.0, 100.0

    def used_seconds(self) -> float:
        return self.used


@pytest.mark.parametrize(
    ("limit", "used", "idle", "found"),
    [
        (inf, 0.0, 3.0, 3.0),
        # All of the limit is used, a part of it, and the host has less left than the limit.
        (0.5, 1.0, 60.0, 0.0),
        (0.5, 0.25, 60.0, 0.75),
        (2.0, 0.25, 0.5, 0.5),
        (0.5, nan, 60.0, nan),
        (0.5, 0.25, nan, nan),
        (inf, 0.0, nan, nan),
    ],
)
def test_what_is_left_of_a_limit_is_idle_at_most(monkeypatch, limit, used, idle, found):
    container, counted = Container(limit), IdleCores()
    monkeypatch.setattr(cores, "core_limit", lambda: container)
    monkeypatch.setattr(cores, "_idle_seconds", lambda: container.idle)
    assert counted.seconds_at(10.0) == 0.0
    container.used += used
    container.idle += idle
    assert counted.seconds_at(12.0) == pytest.approx(found, nan_ok=True)


def test_a_folder_may_name_the_kinds_of_a_group_in_another_order(tmp_path):
    # As CentOS 7 does; it has a link of each name.
    files(tmp_path / "groups" / "cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert limit_of(tmp_path, "4:cpuacct,cpu:/docker/ab").cores == 0.5


def test_cores_are_idle_while_programs_wait_for_a_disk(monkeypatch):
    text = "cpu  1 2 3 400 50 0 0 0\ncpu0 1 2 3 100 20 0 0 0\ncpu1 0 0 0 300 30 0 0 0\nintr 9\n"
    monkeypatch.setattr(cores, "_TICKS", 100)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    for bound, seconds in (({0, 1}, 4.5), ({0}, 1.2), ({1}, 3.3)):
        monkeypatch.setattr(cores, "_bound", lambda bound=bound: bound)
        assert cores._idle_seconds() == seconds
    # A system that shows a container other numbers.
    monkeypatch.setattr(cores, "_bound", lambda: {8})
    assert isnan(cores._idle_seconds())


def test_the_idle_time_is_that_of_the_cores_to_which_the_process_is_bound(monkeypatch):
    monkeypatch.setattr(cores, "_bound", lambda: {0})
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 2)
    if not Path("/proc/stat").exists():
        pytest.skip("this system has no /proc/stat")
    first = cores._idle_seconds()
    assert 0 < first <= cores._idle_seconds()
