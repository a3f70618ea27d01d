"""Runs modules of mpi4py's own tests on every rank of an mpiexec, and writes what became of each.

    mpiexec -n 2 python tests/mpi/mpi4py_own/run.py FOLDER guarded|plain REPORT MODULE ...

``guarded``: `MPI.COMM_WORLD` and its like are ours, as on a notebook's ranks. Each test is a scope,
as a cell is: one that fails on a rank does not strand the others.
"""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path

RANKS = Path(__file__).resolve().parents[1] / "ranks"


class Told(unittest.TestResult):
    """What became of each test, by its name: ok, skipped, or the end of a traceback."""

    def __init__(self, guarded: bool, report: Path) -> None:
        super().__init__()
        self.guarded, self.report = guarded, report
        self.told: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.told[test.id()] = "ok"
        if self.guarded:
            cells.enter()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        if self.guarded:
            cells.leave()
        self.report.write_text(json.dumps(self.told))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.told[test.id()] = f"skipped: {reason}"

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addFailure(test, err)  # type: ignore[arg-type]
        self._note(test, self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: object) -> None:
        super().addError(test, err)  # type: ignore[arg-type]
        self._note(test, self.errors[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: object, err: object) -> None:
        if err is not None:
            self._note(test, str(err[1]))  # type: ignore[index]

    def addExpectedFailure(self, test: unittest.TestCase, err: object) -> None:
        self.told[test.id()] = "ok"

    def _note(self, test: unittest.TestCase, text: str) -> None:
        self.told[test.id()] = text.strip()[-1500:]


class Cells:
    """Enters and leaves scopes, as the suites of the folder ``ranks`` do."""

    def __init__(self) -> None:
        sys.path.insert(0, str(RANKS))
        import conftest

        import allranks.collectives as c

        self._c, self._conftest = c, conftest

    def enter(self) -> None:
        self._conftest.enter()

    def leave(self) -> None:
        self._c.scope.leave("it ended")
        self._conftest.settle()


cells: Cells


def main() -> int:
    global cells
    folder, how, report, *modules = sys.argv[1:]
    sys.path.insert(0, folder)
    if how == "guarded":
        import allranks.collectives as c
        from allranks.collectives.start.under_mpi import guard_mpi4py
        from allranks.collectives.world import current

        c.init()
        guard_mpi4py(current())
        cells = Cells()
    from mpi4py import MPI

    result = Told(how == "guarded", Path(f"{report}.{MPI.COMM_WORLD.Get_rank()}"))
    unittest.defaultTestLoader.loadTestsFromNames(modules).run(result)
    if how == "guarded":
        from allranks.collectives.start.runtime import finish

        finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
