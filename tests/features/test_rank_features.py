"""Features of other distributions, on real ranks: hooks that raise fail their cell only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import allranks
from allranks import features
from allranks.errors import CellFailed, FeatureFailed
from allranks.notebook import load_features
from tests.distributions import install

DIARY = '''
"""Writes down which hooks are called, and fails where a cell asks for it."""
from allranks.engine.features import RankFeature


class Diary(RankFeature):
    def __init__(self):
        self.called = []

    def starting(self):
        self.called.append("starting")

    def started(self, rank):
        self.rank = rank
        self.called.append("started")
        rank.shell.user_ns["called"] = self.called

    def cell_started(self, cell):
        self.called.append("cell_started")
        self.fails = [word[6:] for word in cell.source.split() if word.startswith("fails:")]
        self.maybe_fail("cell_started")

    def cell_running(self):
        self.rank.shell.user_ns["looks"] = self.rank.shell.user_ns.get("looks", 0) + 1

    def maybe_fail(self, hook):
        if hook in self.fails and self.rank.rank == 1:
            raise ValueError(f"no {hook} today")

    def error_raised(self, error):
        return LookupError("it was a key") if type(error) is KeyError else error

    def cell_finished(self, error):
        self.called.append("cell_finished")
        self.maybe_fail("cell_finished")

    def cell_left(self, error):
        self.called.append("cell_left")
        self.maybe_fail("cell_left")

    def epoch_ended(self, epoch):
        self.called.append("epoch_ended")


FEATURE = Diary
'''
NOTEBOOK = '''
"""Writes down which hooks are called, and fails where a cell asks for it."""
from allranks.cluster.features import NotebookFeature

called = []


class NotebookDiary(NotebookFeature):
    commands = frozenset({"called"})

    def started(self, cluster):
        called.append(f"started with {cluster.size}")

    def cell_started(self):
        called.append(f"cell_started on {self.cell.ranks}")

    def cell_finished(self):
        called.append(f"cell_finished, pending {self.cell.pending()}")
        if "cell_finished" in fails:
            raise ValueError("no cell_finished today")

    def stopped(self):
        called.append("stopped")

    def command(self, name, *arguments):
        return list(called)


fails = set()
FEATURE = NotebookDiary
'''
HOST = """
from allranks.engine.host.features import HostFeature


class Host(HostFeature):
    def stopping(self):
        with open({path!r}, "w") as file:
            file.write("stopping")


FEATURE = Host
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host") / "stopped"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, stopped: Path) -> Path:
    site = tmp_path_factory.mktemp("site")
    (site / "allranks_diary").mkdir()
    (site / "allranks_diary" / "__init__.py").touch()
    (site / "allranks_diary" / "rank.py").write_text(DIARY)
    (site / "allranks_diary" / "notebook.py").write_text(NOTEBOOK)
    (site / "allranks_diary" / "host.py").write_text(HOST.format(path=str(stopped)))
    entries = {"diary": "allranks_diary", "lost": "allranks_lost"}
    install(site, "allranks-diary", group="allranks.features", entries=entries)
    return site


@pytest.fixture(scope="module")
def cluster(site: Path):
    def look_again() -> None:
        features._of_others.cache_clear()
        load_features.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        paths = [str(site), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        look_again()
        with pytest.warns(UserWarning, match="the feature allranks_lost to be importable"):
            load_features()
        with allranks.Cluster(2) as started:
            yield started
    look_again()
    load_features()


def test_hooks_are_called_in_their_order(cluster):
    cluster.run("called[:] = called[:2]")
    assert (
        cluster.run("list(called)")
        == [["starting", "started", "cell_finished", "cell_left", "cell_started"]] * 2
    )


def test_a_feature_is_called_again_and_again_while_a_cell_runs(cluster):
    source = """
import time
looks = 0
while looks < 3: time.sleep(0.01)
"""
    cluster.run(source, timeout=60)


def test_a_feature_replaces_an_error(cluster):
    with pytest.raises(CellFailed, match="LookupError: it was a key") as failed:
        cluster.run("{}['a']")
    assert "KeyError" not in str(failed.value)


@pytest.mark.parametrize("hook", ["cell_started", "cell_finished", "cell_left"])
def test_a_feature_that_raises_fails_its_cell_only(cluster, hook):
    cluster.run("kept = rank")
    with pytest.raises(CellFailed) as failed:
        cluster.run(f"kept  # fails:{hook}")
    assert (
        f"rank 1 of 2: FeatureFailed: expected the feature allranks_diary.rank to return from "
        f"{hook}, found ValueError: no {hook} today"
    ) in str(failed.value)
    assert cluster.run("kept") == [0, 1]


def test_ranks_that_wait_for_one_whose_feature_raised_are_released(cluster):
    with pytest.raises(CellFailed) as failed:
        cluster.run("allreduce(rank)  # fails:cell_started")
    assert "no cell_started today" in str(failed.value)
    assert "rank 0 was waiting" in failed.value.text
    assert cluster.run("allreduce(1)") == [1, 1]
    assert all("epoch_ended" in called for called in cluster.run("called"))


def test_the_notebook_calls_hooks_in_their_order(cluster):
    cluster.run("1")
    called = cluster.cells.hooks.command("called")
    assert called[:2] == ["started with 2", "cell_started on (0, 1)"]
    cluster.run("1", ranks=[1])
    added = cluster.cells.hooks.command("called")[len(called) :]
    assert added == ["cell_started on (1,)", "cell_finished, pending ()"]


def test_a_feature_that_raises_in_the_notebook_fails_its_cell_only(cluster, monkeypatch):
    from allranks_diary import notebook

    monkeypatch.setattr(notebook, "fails", {"cell_finished"})
    with pytest.raises(FeatureFailed) as failed:
        cluster.run("kept = rank")
    assert (
        "the feature allranks_diary.notebook to return from cell_finished, found ValueError: "
        "no cell_finished today"
    ) in str(failed.value)
    notebook.fails.clear()
    assert cluster.run("kept") == [0, 1]


def test_the_host_agent_calls_its_features_too(cluster, stopped):
    cluster.stop()
    assert stopped.read_text() == "stopping"
    assert cluster.cells.hooks.command("called")[-1] == "stopped"
