"""Checks how a student's function communicates, and grades notebooks with nbgrader.

`expect` runs in every rank. ``allranks.grading.nbgrader`` runs in the process of nbgrader. No other
package imports this one, so it can be deleted.
"""

from allranks.errors import CheckFailed
from allranks.grading.checks import check, passed
from allranks.grading.expectation import ExpectationFailed, expect
from allranks.grading.patterns import collective, line, ring, tree
from allranks.grading.traffic import Traffic

__all__ = [
    "CheckFailed",
    "ExpectationFailed",
    "Traffic",
    "check",
    "collective",
    "expect",
    "line",
    "passed",
    "ring",
    "tree",
]
