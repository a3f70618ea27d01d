"""What the host agent does for notebooks that attach later."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.features.attach import attachment
from allranks.features.attach.host import HostAttach
from allranks.features.attach.records import Running, Stay
from allranks.records.agent import Event, Stop
from allranks.records.config import HostAgentConfig


class Agent:
    """A host agent that notes what the feature has it do."""

    def __init__(self, folder: str, **config: Any) -> None:
        self.config = HostAgentConfig(2, (), {}, folder, "", "", (), "", "", **config)
        self.running = memoryview(bytearray(8)).cast("i")
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.tell = self.events.append
        self.feature = HostAttach()
        self.feature.started(self)

    def call_when_readable(self, source: Any, call: Any) -> None:
        source.close()

    def notebook_came(self, greeting: Any) -> None:
        self.calls.append("notebook_came")

    def notebook_left(self) -> None:
        self.calls.append("notebook_left")

    def end(self) -> None:
        self.calls.append("end")


@pytest.fixture(autouse=True)
def numbers_of_files(monkeypatch):
    monkeypatch.setattr(attachment.os, "dup2", lambda *_: None)  # of standard input and output


@pytest.fixture
def agent(tmp_path):
    return Agent(str(tmp_path), interface="tcp://h1")


def test_ranks_stay_once_the_notebook_has_said_so(agent):
    assert not agent.feature.ranks_stay()
    assert agent.feature.command_received(Stay(60, {}))
    assert agent.feature.ranks_stay()
    assert not agent.feature.command_received(Stop())
    agent.feature.command_received(Stay(0, {}))
    assert not agent.feature.ranks_stay()


def test_the_cell_that_ranks_of_several_hosts_run_is_told_once(agent):
    agent.running[1] = 3
    agent.feature.poll()
    assert agent.events == []  # they end with their notebook, which knows it
    agent.feature.command_received(Stay(1, {}))
    agent.feature.poll()
    agent.feature.poll()
    agent.running[1] = 0
    agent.feature.poll()
    assert agent.events == [Running(3), Running(0)]


def test_ranks_end_if_no_notebook_has_come_in_time(tmp_path, monkeypatch):
    agent = Agent(str(tmp_path))
    agent.feature.command_received(Stay(60, {}))
    agent.feature.notebook_left()
    agent.feature.poll()
    assert agent.calls == []
    later = time.monotonic() + 61
    monkeypatch.setattr(attachment, "time", SimpleNamespace(monotonic=lambda: later))
    agent.feature.poll()
    assert agent.calls == ["end"]


def test_a_notebook_whose_process_is_gone_has_left_the_ranks(tmp_path, monkeypatch):
    agent = Agent(str(tmp_path))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    agent.feature.poll()
    assert agent.calls == ["notebook_left"]


def test_the_locks_of_kept_variables_stay_where_all_ranks_are_started_again(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    agent = Agent(str(tmp_path), interface="tcp://h1", kept_dirs=(str(kept),))
    agent.feature.command_received(Stay(1, {}))
    [held] = agent.feature._kept
    agent.feature.started(agent)
    agent.feature.command_received(Stay(1, {}))
    assert agent.feature._kept == [held]
    agent.feature.command_received(Stay(0, {}))
    assert agent.feature._kept == []
