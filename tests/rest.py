"""Runs what ``make test`` leaves out, as far as the time of CI allows, and repeats what fails.

python -m tests.rest --until 1700000000 [options of pytest]

It begins with another quarter of the tests each time. A test that fails is repeated once, after the
tests of its file that ran before it, because it may need what they made. If it passes then, it is
listed, and the run counts as passed. Faults of the tests that matter most are not forgiven: those
are in ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.gate import REPOSITORY, starts_alone

RESULTS = REPOSITORY / "test-results"
_PYTEST = (sys.executable, "-m", "pytest", "--override-ini=junit_family=xunit1")
TESTS_FAILED = 1
"""The exit status of pytest; higher ones say that it could not run them."""


def quarter_of(seconds: float) -> int:
    """Returns the quarter that a run at this time (since 1970) begins with."""
    days, hours = divmod(int(seconds) // 3600, 24)
    return (days + hours) % 4


def outcomes(report: Path) -> dict[str, str | None]:
    """Returns the tests that ran, in their order and with the names that pytest takes.

    With each one comes its failure's text, or None if it passed.
    """
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            texts = [one.text or "" for kind in ("failure", "error") for one in case.iter(kind)]
            found.setdefault(f"{case.get('file')}::{case.get('name')}", []).extend(texts)
    return {name: "\n".join(texts) if texts else None for name, texts in found.items()}


def repetitions(ran: Collection[str], failed: Collection[str]) -> Iterator[list[str]]:
    """Yields the tests of each process that repeats tests that have failed."""
    for alone in filter(starts_alone, failed):
        yield [alone]
    others = [test for test in failed if not starts_alone(test)]
    for file in dict.fromkeys(test.partition("::")[0] for test in others):
        of_file = [test for test in ran if test.partition("::")[0] == file]
        last = max(of_file.index(test) for test in others if test.partition("::")[0] == file)
        yield of_file[: last + 1]


def repeat(tests: Collection[str], report: Path, folder: Path = REPOSITORY) -> Mapping[str, object]:
    """Runs tests again, without the lanes, and returns their outcomes."""
    report.unlink(missing_ok=True)
    subprocess.run([*_PYTEST, "-q", f"--junitxml={report}", *tests], cwd=folder)
    return outcomes(report) if report.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970")
    until, options = parser.parse_known_args()
    report = RESULTS / "junit-rest.xml"
    report.unlink(missing_ok=True)
    part = ("--part=rest", f"--until={until.until}", f"--first-quarter={quarter_of(time.time())}")
    command = [*_PYTEST, *part, f"--junitxml={report}", *options]
    status = subprocess.run(command, cwd=REPOSITORY).returncode
    if status != TESTS_FAILED:
        return status
    ran = outcomes(report)
    failed = {test: text for test, text in ran.items() if text is not None}
    second: dict[str, object] = {}
    for tests in repetitions(ran, failed):
        # Those before it are there for what they make: their first outcome counts.
        again = repeat(tests, RESULTS / "junit-again.xml")
        second |= {test: again.get(test, "did not run") for test in tests if test in failed}
    for test, text in failed.items():
        if second[test] is None:
            print(f"── passed on the second try: {test}\n{text}\n")
    for test, text in second.items():
        print(f"{'passed on the second try' if text is None else 'failed twice'}: {test}")
    return status if not failed or any(text is not None for text in second.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
