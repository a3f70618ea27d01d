"""Checks how a student's function communicates, and grades notebooks with nbgrader.

`expect` runs in every rank. ``allranks.grading.nbgrader`` runs in the process of nbgrader. No other
package imports this one, so it can be deleted.
"""

from allranks.grading.expectation import ExpectationFailed, expect
from allranks.grading.patterns import collective, line, ring, tree
from allranks.grading.traffic import Traffic

__all__ = ["ExpectationFailed", "Traffic", "collective", "expect", "line", "ring", "tree"]
