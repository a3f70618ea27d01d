"""What the ranks bring to an allreduce that is explained."""

from __future__ import annotations

from typing import Any

from allranks.errors import UsageError

MOST_RANKS = 16
MOST_VALUES = 32
#: So many ranks can each have a digit of their own.
_DIGITS = 4

_EXPECTED = "expected one array of numbers a rank, all of one length"
_EXAMPLE = "Type for example: ring(values=[[1, 2], [10, 20]])"

Arrays = list[list[float]]


def made(ranks: int, size: int) -> Arrays:
    """Returns arrays whose sums show who has contributed: for up to four ranks a digit each.

    Args:
        ranks: how many arrays.
        size: how many values each has.

    Raises:
        UsageError: there are too many to be drawn.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(
            f"expected between 2 and {MOST_RANKS} ranks to be drawn, found {ranks}. "
            "Type for example: ring(ranks=4)"
        )
    if not 1 <= size <= MOST_VALUES:
        raise UsageError(
            f"expected between 1 and {MOST_VALUES} values a rank to be drawn, found {size}. "
            "Type for example: ring(size=8)"
        )
    weight = [10**rank if ranks <= _DIGITS else rank + 1 for rank in range(ranks)]
    return [[(place % 9 + 1) * one for place in range(size)] for one in weight]


def given(values: Any) -> Arrays:
    """Returns a reader's own arrays, one a rank: lists, or an array of shape (ranks, size).

    Raises:
        UsageError: they are no numbers, not of one length, or too many to be drawn.
    """
    rows = values.tolist() if hasattr(values, "tolist") else values
    try:
        arrays = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError:
        raise UsageError(f"{_EXPECTED}, found {values!r}. {_EXAMPLE}") from None
    every = [one for array in arrays for one in array]
    if not all(isinstance(one, int | float) for one in every):
        wrong = next(one for one in every if not isinstance(one, int | float))
        raise UsageError(f"{_EXPECTED}, found {wrong!r} among them. {_EXAMPLE}")
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1:
        raise UsageError(f"{_EXPECTED}, found arrays of {lengths} values. {_EXAMPLE}")
    made(len(arrays), lengths[0] if lengths else 0)
    return arrays
