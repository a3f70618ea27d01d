"""The plugin that pytest loads: an option, a marker and three fixtures. It imports pytest only.

Everything else is imported when ranks start: with the option before pytest collects, else for the
first test on ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from allranks.features.pytest.records import ON_RANK

NRANKS = pytest.StashKey[int]()
_PARAMETER = "_nranks"
_MARKER = (
    "nranks(n, ...): run the test on n ranks of allranks at the same time, once for each number; "
    "with 0 it runs in pytest's own process"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("allranks").addoption(
        "--nranks",
        type=_numbers,
        default=(),
        metavar="N[,N…]",
        help="run each test on N ranks at the same time, once for each number",
    )


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"expected numbers of ranks, found {text!r}. Type for example: --nranks 4 or "
            "--nranks 2,4"
        )
    return tuple(dict.fromkeys(map(int, words)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if not config.pluginmanager.has_plugin(ON_RANK):
        config.pluginmanager.register(OwnProcess(), "allranks-own-process")


def _chosen(node: pytest.Item | Any, config: pytest.Config) -> tuple[int, ...]:
    """Returns the numbers of ranks of a test: those of its marker, else of the option."""
    marker = node.get_closest_marker("nranks")
    if marker is None:
        numbers: tuple[int, ...] = config.getoption("nranks")
        return numbers or (0,)
    numbers = marker.args
    if not numbers or marker.kwargs or not all(type(n) is int and n >= 0 for n in numbers):
        raise pytest.Collector.CollectError(
            f"expected numbers of ranks in the marker of {node.nodeid}, found "
            f"nranks{marker.args}. Type for example: @pytest.mark.nranks(2, 4)"
        )
    return tuple(dict.fromkeys(numbers))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    numbers = _chosen(metafunc.definition, metafunc.config)
    if len(numbers) > 1:
        metafunc.fixturenames.append(_PARAMETER)
        # Of a session, so that pytest keeps the tests with the same number together.
        metafunc.parametrize(_PARAMETER, numbers, ids=lambda n: f"{n}ranks", scope="session")


def nranks_of(item: pytest.Item) -> int:
    """Returns on how many ranks a test runs; 0 is in pytest's own process."""
    if NRANKS not in item.stash:
        spec = getattr(item, "callspec", None)
        own = spec.params.get(_PARAMETER) if spec is not None else None
        item.stash[NRANKS] = _chosen(item, item.config)[0] if own is None else own
    return item.stash[NRANKS]


class OwnProcess:
    """The hooks of pytest's own process, which starts the ranks."""

    def __init__(self) -> None:
        self._ranks: Any = None
        #: The time limit of pytest-timeout for a test, in seconds.
        self._limits: dict[pytest.Item, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        option = session.config.option
        sizes = [size for size in option.nranks if size]
        # With xdist, the processes that it starts run the tests.
        if sizes and not option.collectonly and getattr(option, "dist", "no") == "no":
            self._ranks_of(session).launch(min(sizes))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Each number of ranks is started once.
        items.sort(key=nranks_of)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        first = nranks_of(session.items[0]) if session.items else 0
        # No tests run in pytest's own process beside processes that they do not expect.
        if self._ranks is not None and self._ranks.size != first:
            self._ranks.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        if self._ranks is not None:  # they end while pytest writes its summary
            self._ranks.close()
            self._ranks.remove_segments()

    def _ranks_of(self, session: pytest.Session) -> Any:
        if self._ranks is None:
            from allranks.features.pytest.ranks import PytestRanks

            self._ranks = PytestRanks(session)
        return self._ranks

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov combines what ranks measured
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        try:
            return (yield)
        finally:
            if self._ranks is not None:
                self._ranks.end()
                if session.config.pluginmanager.has_plugin("_cov"):
                    self._ranks.close()  # some may write what they measured at their exit

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if not nranks_of(item):
            return None
        ranks = self._ranks_of(item.session)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        nextid = None if nextitem is None else nextitem.nodeid
        if nextitem is not None and nranks_of(nextitem) != nranks_of(item):
            nextid = ""
        ranks.run(item, nranks_of(item), nextid, self._limits.pop(item, None))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Any:
        if not nranks_of(item):
            return None
        self._limits[item] = settings.timeout
        return True  # in place of pytest-timeout's own timer, which cannot interrupt ranks

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> Any:
        return True if nranks_of(item) else None


def _on_rank(request: pytest.FixtureRequest) -> Any:
    if not request.config.pluginmanager.has_plugin(ON_RANK):
        pytest.fail(
            f"expected the fixture {request.fixturename!r} in a test on ranks, found it in "
            "pytest's own process. Type: pytest --nranks 4, or mark the test: "
            "@pytest.mark.nranks(4)",
            pytrace=False,
        )
    from allranks import collectives

    return collectives


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """The number of this rank, from 0."""
    number: int = _on_rank(request).rank()
    return number


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run the test."""
    number: int = _on_rank(request).size()
    return number


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> Any:
    """An mpi4py communicator of all ranks, the same as ``MPI.COMM_WORLD``."""
    return _on_rank(request).comm
