"""Everything that ``allranks doctor`` and ``%distributed doctor`` look at, in order."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.cluster.doctor import machine, mpi, packages
from allranks.cluster.doctor.findings import WRONG, Finding, text


def examine() -> list[Finding]:
    """Returns what was found; takes a second or two, since two processes of MPI are started."""
    return [*packages.findings(), *mpi.findings(), *machine.findings()]


def report(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding, and one that counts what is wrong."""
    wrong = sum(one.state == WRONG for one in findings)
    end = (
        "No problems found." if not wrong else f"{wrong} of {len(findings)} checks found a problem."
    )
    return f"{text(findings)}\n{end}"
