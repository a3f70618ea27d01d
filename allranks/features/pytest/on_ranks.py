"""On each rank: pytest's session, which lasts from the first test to the last one.

The functions at the end are called by pytest's own process, each as a cell of all ranks. A test
that passes is one cell. A test that fails ends its cell with its exception, so that other ranks do
not wait for this one; the teardown and the reports follow in a second cell.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import pytest

from allranks.collectives.calls.sites import OURS, USER, kind_of
from allranks.engine.exceptions import without_own_frames
from allranks.errors import AllranksError, RankLeft
from allranks.features.pytest.records import ON_RANK, Phase, RankOutcome, SessionStart, Warned

_PHASES = ("setup", "call", "teardown")


class RankSession:
    """pytest's session of this rank, with the tests that it has collected."""

    def __init__(self, start: SessionStart) -> None:
        sys.path[:] = [*start.path, *(entry for entry in sys.path if entry not in start.path)]
        self._coverage: Any = None
        if start.coverage is not None:
            import coverage

            self._coverage = coverage.Coverage(data_suffix=True, **start.coverage)
        self._folder = Path(start.folder)
        self._folders = Counter[str]()
        self._number = 0
        self._item: Any = None
        self._next: pytest.Item | pytest.Session | None = None
        self._phases: list[Phase] = []
        self._warned: list[Warned] = []
        self._error: BaseException | None = None
        self._exits: str | None = None
        self.problems: list[str] = []
        with self._measuring():
            self._config = pytest.Config.fromdictargs(dict(start.options), list(start.arguments))
            self._config.pluginmanager.register(self, ON_RANK)
            self._config._do_configure()
            self._share_folders()
            self._session = pytest.Session.from_config(self._config)
            hook = self._config.hook
            hook.pytest_sessionstart(session=self._session)
            hook.pytest_collection(session=self._session)
        self._items = {item.nodeid: item for item in self._session.items}

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        if self._coverage is not None:
            self._coverage.start()
        try:
            yield
        finally:
            if self._coverage is not None:
                self._coverage.stop()
            config = getattr(self, "_config", None)  # None: it could not be made
            capture = config and config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                # pytest leaves standard input replaced between two phases of a test.
                capture.suspend_global_capture(in_=True)

    def _share_folders(self) -> None:
        """Gives all ranks the same temporary folders, which pytest's own process removes."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp, factory._retention_policy = self._folder, "all"
        factory.mktemp = self._mktemp

    def _mktemp(self, basename: str, numbered: bool = True) -> Path:
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        name = factory._ensure_relative_to_basetemp(basename)
        if numbered:
            # The number of the test, because a new rank has not counted the folders before.
            again = f"-{self._folders[name]}" if self._folders[name] else ""
            self._folders[name] += 1
            name = f"{name}{self._number}{again}"
        path: Path = self._folder / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._run_phases()
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        warned = warning_message
        self._warned.append(
            Warned(
                warned.category.__name__,
                str(warned.message),
                warned.filename,
                warned.lineno,
                when,
                nodeid,
            )
        )

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        # pytest's own process has the timer, unless it is for the test function only.
        return None if settings.func_only else True

    @property
    def code(self) -> CodeType | None:
        """The code of the test that runs, by which other ranks name its line."""
        return getattr(getattr(self._item, "function", None), "__code__", None)

    def run(self, nodeid: str, nextid: str | None, number: int) -> RankOutcome:
        """Runs a test; if it fails, without what follows the phase that failed.

        ``number`` counts the tests of the whole session.
        """
        self._phases, self._warned, self._error, self._exits = [], [], None, None
        self._number = number
        self._folders.clear()
        self._item = self._items.get(nodeid)
        if self._item is None:
            raise _missing(nodeid, self.problems)
        self._next = self._session if nextid == "" else self._items.get(nextid or "")
        self._run_item()
        if self._error is not None:
            raise _as_raised(self._error)
        return self.outcome()

    def finish(self, last: bool) -> RankOutcome:
        """Ends a test that has failed on some rank; the ``last`` one with all fixtures."""
        if last:
            self._next = None
        if self._item is not None:
            self._run_item()
        self._error = None
        if last:
            self.reset()
        outcome, self._warned = self.outcome(), []
        return outcome

    def reset(self) -> None:
        """Tears down the fixtures of all scopes."""
        with self._measuring():
            self._session._setupstate.teardown_exact(None)

    def end(self) -> None:
        """Ends the session."""
        self.reset()
        if self._coverage is not None:
            self._coverage.save()

    def outcome(self) -> RankOutcome:
        return RankOutcome(tuple(self._phases), tuple(self._warned), self._exits)

    def _run_item(self) -> None:
        with self._measuring(), _outside_of_loop():
            # Other plugins wrap this hook: for the comparisons of assert, and for warnings.
            self._item.ihook.pytest_runtest_protocol(item=self._item, nextitem=self._next)

    def _run_phases(self) -> None:
        """Runs the phases that have not run; ends after one that fails."""
        item, done = self._item, [phase.report["when"] for phase in self._phases]
        failed = self._error is not None
        self._error = None
        for when in _PHASES:
            if when in done or (when == "call" and (failed or item.config.option.setuponly)):
                continue
            more = {"nextitem": self._next} if when == "teardown" else {}
            hook = getattr(item.ihook, f"pytest_runtest_{when}")
            call = pytest.CallInfo.from_call(lambda: hook(item=item, **more), when=when)  # type: ignore[arg-type]  # noqa: B023
            error = call.excinfo.value if call.excinfo is not None else None
            waiting = error is not None and _waited(error)
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            self._phases.append(Phase(data, waiting))
            if isinstance(error, pytest.exit.Exception):
                self._exits = str(error)
            failed = not report.passed
            if error is not None and (report.failed or hasattr(report, "wasxfail")):
                self._error = error
                break
        if when == "teardown":
            self._forget()

    def _forget(self) -> None:
        # As pytest's own runner does, to free the values of fixtures.
        if hasattr(self._item, "_request"):
            self._item._request, self._item.funcargs = False, None
        if self._error is None:
            self._item = None


@contextmanager
def _outside_of_loop() -> Iterator[None]:
    """Lets tests run loops of their own: a rank calls its cells from one that runs."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)


def _missing(nodeid: str, problems: list[str]) -> BaseException:
    found = "\n".join(problems) or "other tests, so its module depends on the rank"
    return pytest.UsageError(
        f"expected each rank to collect {nodeid}, found {found}. Give all ranks the same "
        "parameters, and use the fixtures rank and size in the test."
    )


def _waited(error: BaseException) -> bool:
    """Whether a phase ended in a wait for another rank. Cuts the frames of allranks off."""
    interrupted = isinstance(error, KeyboardInterrupt)
    in_call = interrupted and _innermost(error.__traceback__) == OURS
    if interrupted or isinstance(error, AllranksError):
        without_own_frames(error.__traceback__)
    return in_call or isinstance(error, RankLeft)


def _innermost(traceback: TracebackType | None) -> int:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return USER if traceback is None else kind_of(traceback.tb_frame.f_code.co_filename)


def _as_raised(error: BaseException) -> BaseException:
    """Returns the error for the end of the cell, without the frames of pytest."""
    if isinstance(error, SystemExit):  # it would end the cell, or be its success
        error = pytest.fail.Exception(f"SystemExit: {error.code}").with_traceback(
            error.__traceback__
        )
    traceback = error.__traceback__
    while traceback is not None and kind_of(traceback.tb_frame.f_code.co_filename) != USER:
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


_session: RankSession | None = None


def _running() -> RankSession:
    assert _session is not None, "pytest's own process begins the session first"
    return _session


def begin_session(start: SessionStart) -> None:
    """Collects the tests, or, where that was done, tears down all fixtures."""
    global _session
    if _session is None:
        _session = RankSession(start)
    else:
        _session.reset()


class RunTest:
    """A function that runs a test, and has the test's name and code in reports."""

    #: The number of frames of a traceback above the test's.
    own_frames = 1

    @property
    def __code__(self) -> CodeType:
        return _running().code or type(self).__call__.__code__

    def __call__(self, nodeid: str, nextid: str | None, number: int) -> RankOutcome:
        return _running().run(nodeid, nextid, number)


run_test = RunTest()


def reports_so_far() -> RankOutcome:
    """Returns the reports of a test before its teardown."""
    return _running().outcome()


def finish_test(last: bool) -> RankOutcome:
    """Tears down a test that has failed on some rank, and returns its reports."""
    return _running().finish(last)


def end_session() -> None:
    """Tears down what is left, and writes what coverage has measured."""
    _running().end()
