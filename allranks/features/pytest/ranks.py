"""In pytest's own process: the ranks that run the tests, one cluster after the other."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import warnings
from contextlib import suppress
from typing import Any

import pytest

import allranks
from allranks import launched
from allranks.cluster.cell_run import CapturedOutput
from allranks.cluster.failures import NEXT_CELL
from allranks.cluster.variables import OnRank
from allranks.errors import (
    AllranksError,
    CellFailed,
    CellInterrupted,
    CellTimeout,
    ClusterError,
    Report,
)
from allranks.features.pytest import merged
from allranks.features.pytest.records import RankOutcome, SessionStart, Warned
from allranks.records.requests import DEBUG

_SIDE = "allranks.features.pytest.on_ranks"
_BEGIN = OnRank(_SIDE, "begin_session")
_SO_FAR, _FINISH = OnRank(_SIDE, "reports_so_far"), OnRank(_SIDE, "finish_test")
_END = OnRank(_SIDE, "end_session")

#: Options that pytest's own process has applied, or that only it follows.
_NOT_FOR_RANKS = {
    "cacheclear": False,
    "collectonly": False,
    "cov_source": [],
    "deselect": None,
    "dist": "no",
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "log_file": None,
    "markexpr": "",
    "maxprocesses": None,
    "newfirst": False,
    "numprocesses": None,
    "report_log": None,
    "setupshow": False,
    "stepwise": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
_PRELOADED = ("pytest", _SIDE)


class PytestRanks:
    """Runs tests on ranks. Their number may change from one test to the next."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._cluster: allranks.Cluster | None = None
        #: The processes in which pytest's session has begun, by their ranks.
        self._begun: dict[int, int] = {}
        #: How many tests have been run.
        self._count = 0
        #: Ends the last ranks.
        self._stopping: threading.Thread | None = None
        self._capture = self._config.pluginmanager.getplugin("capturemanager")

    @property
    def size(self) -> int:
        """The number of ranks that run or start, 0 if none do."""
        return self._cluster.size if self._cluster is not None else 0

    def launch(self, size: int) -> None:
        """Begins to start ranks, for which the first test waits."""
        with suppress(AllranksError):  # the first test tries again, and reports it
            self._of_size(size).launch()

    def run(self, item: pytest.Item, size: int, nextid: str | None, limit: float | None) -> None:
        """Runs a test on ``size`` ranks, and logs its reports.

        ``nextid`` is the next test on these ranks, whose fixtures stay; if it is "", those of the
        session stay. ``limit`` is in seconds.

        Raises KeyboardInterrupt if the user has interrupted it.
        """
        self._count += 1
        try:
            cluster = self._started(size)
        except (ClusterError, AllranksError) as error:
            self._log(item, [merged.failed_at_start(item, str(error))], ())
            self._session.shouldfail = f"the {size} ranks did not start"
            return
        outcomes, failure = self._run_on(cluster, item, nextid, limit)
        test = merged.RanksOfTest(
            size, outcomes, _reports(failure), cluster.cells.failed_first, _text(failure), limit
        )
        if isinstance(failure, CellTimeout):
            test.timed_out = True
        reports = merged.reports(self._config, item, test)
        if failure is not None and all(report.passed for report in reports):
            # As a test that has caught its interrupt at the time limit.
            reports.append(merged.failed_at_end(item, test.text))
        warned = dict.fromkeys(one for outcome in outcomes.values() for one in outcome.warned)
        self._log(item, reports, tuple(warned))
        for outcome in outcomes.values():
            if outcome.exits is not None:
                pytest.exit(outcome.exits)
        if isinstance(failure, CellInterrupted):
            raise KeyboardInterrupt

    def _run_on(
        self, cluster: allranks.Cluster, item: pytest.Item, nextid: str | None, limit: float | None
    ) -> tuple[dict[int, RankOutcome], AllranksError | None]:
        run = OnRank(_SIDE, "run_test")
        run.__name__ = item.name  # in reports
        call = (item.nodeid, nextid, self._count)
        try:
            self._begin(cluster)
            values = cluster.call(run, call, timeout=limit, view=self._view())
            return dict(enumerate(values)), None
        except AllranksError as error:
            failure = error
        if cluster.state != "running":
            return {}, failure
        left = [rank for rank, pid in self._begun.items() if _pids(cluster).get(rank) == pid]
        if not left:
            return {}, failure
        first = cluster.cells.failed_first
        if self._config.option.usepdb and first in left and first in _reports(failure):
            self._debug(cluster, first)
        # After a death all fixtures are made again, because the new rank has none.
        last = len(left) < cluster.size
        try:
            values = cluster.call(_FINISH, (last,), ranks=left, view=self._view(), timeout=limit)
        except AllranksError as again:
            if isinstance(again, CellInterrupted):
                failure = again
            # A teardown has failed: the reports say so. Those of ranks that died in it are lost.
            values = self._again(cluster, left, last, limit)
        return dict(zip(left, values, strict=False)), failure

    def _again(
        self, cluster: allranks.Cluster, left: list[int], last: bool, limit: float | None
    ) -> list[RankOutcome]:
        try:
            return cluster.call(_FINISH, (last,), ranks=left, view=CapturedOutput(), timeout=limit)
        except AllranksError:
            return []

    def _view(self) -> Any:
        # With -s the output of ranks is shown as in a notebook.
        return None if self._config.option.capture == "no" else CapturedOutput()

    def _of_size(self, size: int) -> allranks.Cluster:
        if self._cluster is not None and self._cluster.size != size:
            self.close()
        if self._cluster is None:
            self._cluster = allranks.Cluster(size, preload=_PRELOADED)
            self._cluster.cells.expects_clients = False
        return self._cluster

    def _started(self, size: int) -> allranks.Cluster:
        cluster = self._of_size(size)
        if cluster.state != "running":
            self._begun = {}
            cluster.start()
            cluster.cells.news.clear()
        return cluster

    def _begin(self, cluster: allranks.Cluster) -> None:
        """Begins pytest's session on new ranks; the others tear down their fixtures."""
        cluster.cells.is_up()
        if self._begun == (pids := _pids(cluster)):
            return
        self._begun = {}
        cluster.call(_BEGIN, (self._start(),), view=CapturedOutput())
        self._begun = pids

    def _start(self) -> SessionStart:
        config: Any = self._config
        options = {**vars(config.option), **_NOT_FOR_RANKS}
        options["plugins"] = [*options.get("plugins", ()), "no:terminal"]
        if options["capture"] not in ("no", "sys"):
            # Descriptors belong to the rank's log, which has what C code writes.
            options["capture"] = "sys"
        folder = config._tmp_path_factory.mktemp(f"ranks{self._count}-", numbered=True)
        return SessionStart(
            options,
            list(map(str, config.args)),
            [os.path.abspath(entry) if entry == "" else entry for entry in sys.path],
            str(folder),
            _coverage(config),
        )

    def _debug(self, cluster: allranks.Cluster, rank: int) -> None:
        """Opens a debugger where a rank has failed unexpectedly, while the others wait."""
        (outcome,) = cluster.call(_SO_FAR, ranks=[rank], view=CapturedOutput())
        if any("wasxfail" in phase.report for phase in outcome.phases):
            return
        if self._capture is not None:
            self._capture.suspend(in_=True)
        try:
            cluster.run(DEBUG, ranks=[rank])
        except AllranksError as error:  # such as an error of a line that was typed
            warnings.warn(pytest.PytestWarning(f"the debugger has ended: {error}"), stacklevel=2)
        finally:
            if self._capture is not None:
                self._capture.resume()

    def _log(
        self, item: pytest.Item, reports: list[pytest.TestReport], warned: tuple[Warned, ...]
    ) -> None:
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        for one in warned:
            message = warnings.WarningMessage(
                one.text,
                _category(one.category),
                one.filename,
                one.lineno,
            )
            self._config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": message,
                    "when": one.when,
                    "nodeid": one.nodeid,
                    "location": None,
                }
            )

    def close(self) -> None:
        """Ends pytest's session on the ranks, and the ranks."""
        self.end()
        if self._stopping is not None:
            self._stopping.join()

    def remove_segments(self) -> None:
        """Removes MPI's shared memory of pytest's own process, where tests may have imported MPI.

        No launcher does so.
        """
        if not launched.size(os.environ)[1]:
            launched.remove_segments(launched.OPEN_MPI)

    def end(self) -> None:
        """Ends pytest's session on the ranks, and begins to end the ranks."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        try:
            if cluster.state == "running" and self._begun == _pids(cluster):
                cluster.call(_END, view=CapturedOutput())
        except AllranksError as error:
            self._session.testsfailed += 1  # no test is left that could fail
            warnings.warn(
                pytest.PytestWarning(f"the teardown of the last fixtures failed: {error}"),
                stacklevel=2,
            )
        finally:
            self._begun = {}
            self._stopping = threading.Thread(target=cluster.stop, name="allranks-stop")
            self._stopping.start()


def _pids(cluster: allranks.Cluster) -> dict[int, int]:
    return {rank: hello.pid for rank, hello in cluster.hellos.items()}


def _reports(failure: AllranksError | None) -> dict[int, Report]:
    return (
        {report.rank: report for report in failure.reports}
        if isinstance(failure, CellFailed)
        else {}
    )


def _text(failure: AllranksError | None) -> str:
    if failure is None:
        return ""
    return f"{type(failure).__name__}: {failure}".replace(f"{NEXT_CELL} ", "")


def _category(name: str) -> type[Warning]:
    found = getattr(builtins, name, None) or getattr(pytest, name, None)
    if isinstance(found, type) and issubclass(found, Warning):
        return found
    return UserWarning


def _coverage(config: Any) -> dict[str, Any] | None:
    """Returns with which arguments pytest-cov measures, if it does."""
    options = config.option
    if not getattr(options, "cov_source", None) or getattr(options, "no_cov", False):
        return None
    source = [entry for entry in options.cov_source if entry is not True]
    whole = len(source) < len(options.cov_source)
    return {
        "source": None if whole else source,
        "branch": options.cov_branch,
        "config_file": options.cov_config,
    }
