"""What every suite may ask for."""

from __future__ import annotations

import math
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import gate
from tests.kernel import Kernel
from tests.missing import skip_without_replacements, summary

# How long an example takes is no property of what it tests.
settings.register_profile("allranks", deadline=None)
settings.load_profile("allranks")

# A shell ignores interrupts in what it runs in the background, and so would all that this starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent

#: The paths that have changed; None if they are not known. Only the first process asks git.
CHANGED = pytest.StashKey["list[str] | None"]()
#: A line for each reason for which tests were left out.
LEFT_OUT = pytest.StashKey[list[str]]()
QUARTERS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("allranks")
    group.addoption(
        "--part",
        choices=("core", "gate", "rest"),
        help="of tests/gate.py: CORE; that and what the change can reach; or all others",
    )
    group.addoption(
        "--first-quarter",
        type=int,
        default=0,
        metavar="N",
        help="the quarter of the tests that several processes run first: 0 to 3",
    )
    group.addoption(
        "--until",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="skip the tests that begin after this time (since 1970)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = []
    started_by = getattr(config, "workerinput", None)
    if started_by is not None:
        config.stash[CHANGED] = started_by["changed"]
    elif config.getoption("part"):
        changed = gate.changes()
        config.stash[CHANGED] = None if changed is None else sorted(changed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["changed"] = node.config.stash.get(CHANGED, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("part")
    if not part:
        return
    changed = [] if part == "core" else config.stash[CHANGED]
    tests = [item.nodeid for item in items]
    left = gate.choose(tests, gate.reached(changed), changed or ())
    config.stash[LEFT_OUT] = gate.summary(left) if part == "gate" else []
    chosen = set(gate.rest(tests, left)) if part == "rest" else {*tests} - left.keys()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out = getattr(node, "workeroutput", {}).get("left_out")
    if left_out:
        node.config.stash[LEFT_OUT] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Says which tests share a process where several share the work."""
    from xdist.scheduler import LoadScopeScheduling

    first_quarter = config.getoption("first_quarter")
    quarters = QUARTERS if config.getoption("part") == "rest" else 1

    class Lanes(LoadScopeScheduling):
        """From the third on, lanes take first what waits most of its time, and the others last.

        Before that come scopes of several files, which take long; and before all else the tests of
        the first quarter.
        """

        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            waiting = int(node.gateway.id.removeprefix("gw")) > 1

            def order(scope: str) -> tuple[int, bool, bool]:
                later = (zlib.crc32(scope.encode()) - first_quarter) % quarters
                return later, _waits(scope) != waiting, "/" in scope

            first = min(self.workqueue, key=order)
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log)


#: For leases of hosts, queues and ssh; for time-outs, and for what does not answer or has to end.
WAITING = (
    "tests/hosts/",
    "tests/hub/",
    "tests/fuzz/",
    "tests/ipyparallel/",
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
    return nodeid if gate.starts_alone(nodeid) else file


@pytest.hookimpl(tryfirst=True)  # before fixtures start what the test would need
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("until"):
        pytest.skip("not run, because the time was over")
    if item.get_closest_marker("replaces"):
        skip_without_replacements()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists below all else how long each suite took, and what was skipped or left out, and why."""
    sections = {
        "minutes": _minutes(terminalreporter.stats),
        "skipped": summary(terminalreporter.stats.get("skipped", [])),
        "left out: run by make test-all": terminalreporter.config.stash[LEFT_OUT],
    }
    for title, lines in sections.items():
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


def _minutes(stats: dict[str, list[Any]]) -> list[str]:
    """Returns a line for each suite, the longest first; none for a run of less than a minute."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (report for reports in stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    if sum(seconds.values()) < 60:
        return []
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return [f"{spent / 60:5.1f}  {suite}" for suite, spent in longest]


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
