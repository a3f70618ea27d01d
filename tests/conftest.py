"""What every suite may ask for."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kernel import Kernel
from tests.missing import skip_without_replacements, summary

# How long an example takes is no property of what it tests.
settings.register_profile("allranks", deadline=None)
settings.load_profile("allranks")

# A shell ignores interrupts in what it runs in the background, and so would all that this starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Says which tests share a process where several share the work."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        """From the third on, lanes take first what waits most of its time, and the others last.

        Before all else come scopes of several files, which take long.
        """

        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            waiting = int(node.gateway.id.removeprefix("gw")) > 1
            first = min(self.workqueue, key=lambda scope: (_waits(scope) != waiting, "/" in scope))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log)


#: For leases of hosts, queues and ssh; for time-outs, and for what does not answer or has to end.
WAITING = (
    "tests/hosts/",
    "tests/hub/",
    "tests/fuzz/",
    "tests/faults/test_attach.py",
    "tests/faults/test_interrupt.py",
    "tests/faults/test_leaks.py",
    "tests/faults/test_replacements.py",
    "tests/grading/test_nbgrader.py",
)


def _waits(scope: str) -> bool:
    return scope.startswith(WAITING)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if "_lab" in Path(file).name:
        return "labs"  # each runs once, for all that look at it
    if Path(file).parent.name == "torch":
        return "torch"  # one notebook for all: to import torch takes longer than most tests
    # Launches of mpiexec share nothing; other tests share their file's fixtures.
    launches = Path(file).parent.name == "mpi" or Path(file).name == "test_under_mpiexec.py"
    return nodeid if launches else file


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("replaces"):
        skip_without_replacements()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists what was skipped, and why, below all else."""
    lines = summary(terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("skipped")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def new_kernel(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Starts kernels, ``new_kernel(env={…})``, that end with the test."""
    with ExitStack() as stack:

        def start(env: dict[str, str | None] | None = None, python: str = sys.executable) -> Kernel:
            cwd = tmp_path / f"kernel{len(list(tmp_path.glob('kernel*')))}"
            cwd.mkdir()
            return stack.enter_context(Kernel(cwd, env, python))

        yield start


@pytest.fixture
def kernel(new_kernel: Callable[..., Kernel]) -> Kernel:
    return new_kernel()


@pytest.fixture(scope="module")
def own_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has loaded allranks, for all tests of a file."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run("%load_ext allranks").ok()
        yield kernel
