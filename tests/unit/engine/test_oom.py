"""What is said of memory where a rank was killed: what the kernel has counted, no more."""

import math

import pytest

from allranks.engine import processes

HAD = "its peak memory was 64 MiB"
NONE = f"the kernel reports no out-of-memory kill; {HAD}"


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A cgroup of 1 GiB in which a process has been killed before, and a system with others."""
    monkeypatch.setattr(processes, "_of_the_system", lambda: 7)
    monkeypatch.setattr(processes, "_group_of", lambda pid: tmp_path)
    (tmp_path / "memory.max").write_text(str(1 << 30))
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 3\n")
    return tmp_path


def said(deaths, group):
    return deaths._memory(group, 64 << 20)


def test_a_kill_is_told_once_and_none_from_before_the_ranks(group):
    assert said(processes.ExitReports(), group) == NONE
    deaths = processes.ExitReports()
    (group / "memory.events").write_text("oom_kill 4\n")
    limit = f"the limit of its cgroup {group.name} is 1.0 GiB"
    assert said(deaths, group) == f"out of memory: {limit}; {HAD}"
    assert said(deaths, group) == NONE


def test_a_kill_of_long_ago_is_nobodys(group, monkeypatch):
    deaths = processes.ExitReports()
    monkeypatch.setattr(processes, "_of_the_system", lambda: 8)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.0)
    deaths.look()
    assert said(deaths, group).startswith("out of memory: the kernel killed a process here within")
    monkeypatch.setattr(processes, "_of_the_system", lambda: 9)
    monkeypatch.setattr(processes, "_RECENT_SECONDS", 0.0)
    deaths.look()
    deaths.look()
    assert said(deaths, group) == NONE


def test_where_nothing_is_counted_nothing_is_said_of_it(group, monkeypatch):
    monkeypatch.setattr(processes, "_of_the_system", lambda: math.nan)
    (group / "memory.events").unlink()
    assert said(processes.ExitReports(), group) == HAD
