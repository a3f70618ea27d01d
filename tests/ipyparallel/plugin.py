"""pytest plugin: ranks in place of the controller and the engines of ipyparallel's own tests.

As a program, it holds the ranks. It answers each line of its standard input, ``ready`` or
``restart``, with a line of JSON: where clients connect to ranks that are all alive.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ipyparallel.suite import reason

SIZE = 4
#: They end ranks, some of them later than the test.
END_RANKS = ("test_cellpx_keyboard_interrupt_signal_9", "test_cellpx_keyboard_interrupt_SIGKILL")


def hold() -> None:
    import allranks
    from allranks.errors import RankDied

    with allranks.Cluster(SIZE, show_output=False) as cluster:
        for line in sys.stdin:
            if line == "restart\n":
                cluster.restart()
            with suppress(RankDied):  # a test has just ended it
                cluster.run("None")
            cluster.run("%colors nocolor")  # the new ranks too
            cluster.client().wait_for_engines(SIZE, interactive=False)
            print(json.dumps(cluster.connection_information()), flush=True)


class Ranks:
    """The process that holds the ranks, once it is asked for them."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[str] | None = None

    def ask(self, what: str) -> dict[str, Any]:
        if self._holder is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, "-m", "tests.ipyparallel.plugin"]
            self._holder = subprocess.Popen(command, text=True, **pipes)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        print(what, file=self._holder.stdin, flush=True)
        told: dict[str, Any] = json.loads(self._holder.stdout.readline())
        return told

    def end(self) -> None:
        if self._holder is not None:
            self._holder.communicate()


ranks = Ranks()


def setup() -> None:
    from IPython.paths import get_ipython_dir

    place = Path(get_ipython_dir(), "profile_iptest", "security", "ipcontroller-client.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(ranks.ask("ready")))


def add_engines(n: int = 1, profile: str = "iptest", total: bool = False) -> list[Any]:
    """Adds none: there are enough, and each test begins with all of them."""
    setup()
    return []


def pytest_configure() -> None:
    # Before the tests and their conftest.py import these names.
    from ipyparallel import tests

    tests.setup, tests.teardown, tests.add_engines = setup, lambda: None, add_engines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if reason(".".join(item.nodeid.split("::")[1:]))]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(trylast=True)  # after the test's own, whose client needs the controller
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.name in END_RANKS:
        ranks.ask("restart")


def pytest_sessionfinish() -> None:
    ranks.end()


if __name__ == "__main__":
    hold()
