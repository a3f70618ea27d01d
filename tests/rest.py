"""Runs what ``make test`` leaves out, as far as the time of CI allows, and repeats what fails.

python -m tests.rest --until 1700000000 [options of pytest]

It begins with another quarter of the tests each time. A test that fails is repeated once, alone: if
it passes then, it is listed, and the run counts as passed. Faults of the tests that matter most are
not forgiven: those are in ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
REPORT = REPOSITORY / "test-results" / "junit-rest.xml"
TESTS_FAILED = 1
"""The exit status of pytest; higher ones say that it could not run them."""


def quarter_of(seconds: float) -> int:
    """Returns the quarter that a run at this time (since 1970) begins with."""
    days, hours = divmod(int(seconds) // 3600, 24)
    return (days + hours) % 4


def failures(report: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each test that failed, as pytest takes it, and the failure's text."""
    for case in ElementTree.parse(report).iter("testcase"):
        texts = [found.text or "" for kind in ("failure", "error") for found in case.iter(kind)]
        if texts:
            yield f"{case.get('file')}::{case.get('name')}", "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970")
    until, options = parser.parse_known_args()
    pytest = [sys.executable, "-m", "pytest"]
    first = [
        *("--part=rest", f"--until={until.until}", f"--first-quarter={quarter_of(time.time())}"),
        *(f"--junitxml={REPORT}", "--override-ini=junit_family=xunit1"),
    ]
    REPORT.unlink(missing_ok=True)
    status = subprocess.run([*pytest, *first, *options], cwd=REPOSITORY).returncode
    if status != TESTS_FAILED:
        return status
    failed = dict(failures(REPORT))
    again = {
        test: subprocess.run([*pytest, "-q", test], cwd=REPOSITORY).returncode for test in failed
    }
    for test, text in failed.items():
        if again[test] == 0:
            print(f"── passed on the second try: {test}\n{text}\n")
    for test, second in again.items():
        print(f"{'failed twice' if second else 'passed on the second try'}: {test}")
    return max(again.values(), default=status)


if __name__ == "__main__":
    sys.exit(main())
