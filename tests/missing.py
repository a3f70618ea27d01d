"""Skips what cannot run here, and lists at the end of a run what was skipped and what to type."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath
from typing import NoReturn

import pytest

from allranks import port_filter


def skip_missing(reason: str) -> NoReturn:
    """Skips a test that lacks what ``make test`` installs, or root; in CI that is a failure.

    Args:
        reason: what is missing, and what to type.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI may not skip what it can install, or run as root: {reason}", pytrace=False)
    pytest.skip(reason)


def skip_without_replacements() -> None:
    """Skips a test in which a dead rank is replaced, where the system does not allow that."""
    if not port_filter.is_supported():
        skip_missing(
            "dead ranks are not replaced: this system lets you attach no packet filter to a "
            "socket; most systems let every user, or try as root"
        )


def summary(skipped: Sequence[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Returns a line for each reason: how many tests of which suites it skipped, and itself."""
    suites: defaultdict[str, list[str]] = defaultdict(list)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        suite = PurePath(report.nodeid.partition("::")[0]).parent
        suites[reason.removeprefix("Skipped: ")].append(str(suite))
    return [
        f"{len(found)} of {', '.join(sorted(set(found)))}: {reason}"
        for reason, found in sorted(suites.items(), key=lambda item: -len(item[1]))
    ]
