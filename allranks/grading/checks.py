"""The checks of an exercise, which show a coloured box in place of a traceback."""

from __future__ import annotations

import sys

from allranks.errors import RIGHT, CheckFailed, coloured_box


def check(condition: object, message: str) -> None:
    """Fails the cell with a box that has the message, unless the condition holds.

    A message that begins with ``not yet`` is for an exercise that has not been begun.

    Example:
        ``check(found is not None, "not yet: my_sum still returns None")``

    Raises:
        CheckFailed: the condition does not hold. Neither its traceback nor the source of the check,
            which may have the answer, is shown.
    """
    if not condition:
        raise CheckFailed(message)


def passed(*said: object) -> None:
    """Prints ``right:`` and the values, in a green box."""
    sys.stdout.write(coloured_box(" ".join(map(str, ("right:", *said))), RIGHT) + "\n")
