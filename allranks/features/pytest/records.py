"""Messages between pytest's own process and the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The name of the plugin that a rank registers in its own configuration.
ON_RANK = "allranks-on-rank"


@dataclass(frozen=True)
class SessionStart:
    """Begins pytest's session on a rank.

    ``options`` and ``arguments`` are those of pytest's own process, ``path`` its ``sys.path``.
    All ranks have their temporary folders in ``folder``. ``coverage`` has the arguments of
    ``coverage.Coverage``, if it measures.
    """

    options: dict[str, Any]
    arguments: list[str]
    path: list[str]
    folder: str
    coverage: dict[str, Any] | None


@dataclass(frozen=True)
class Phase:
    """The report of one rank on the setup, the call or the teardown of a test.

    ``report`` is in the form of pytest's own ``pytest_report_to_serializable``. ``waiting`` is
    whether the rank waited for another one when this phase ended.
    """

    report: dict[str, Any]
    waiting: bool


@dataclass(frozen=True)
class Warned:
    """A warning of a rank: the name of its class, its text, and its place."""

    category: str
    text: str
    filename: str
    lineno: int
    when: str
    nodeid: str


@dataclass(frozen=True)
class RankOutcome:
    """A test on one rank; ``exits`` is the reason of ``pytest.exit()`` if it was called."""

    phases: tuple[Phase, ...]
    warned: tuple[Warned, ...]
    exits: str | None
