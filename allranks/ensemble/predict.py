"""What the members of an ensemble predict together: mean, spread and vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allranks.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def gather(results: Sequence[tuple[int, Any]], name: str | None) -> NDArray[Any]:
    """Returns what every member predicts, one after the other.

    Args:
        results: the number and the result of every member.
        name: which entry of the result; None where the result itself is the prediction.

    Returns:
        (members, …): the members' arrays, which have one shape.

    Raises:
        UsageError: there is no member, one has no such entry, or their shapes differ.
    """
    import numpy as np

    if not results:
        raise UsageError(
            "expected at least one member that has finished, found none. See runs.failed"
        )
    arrays = {}
    for number, result in results:
        if name is not None:
            if not isinstance(result, dict) or name not in result:
                has = ", ".join(map(str, result)) if isinstance(result, dict) else repr(result)
                raise UsageError(
                    f"expected {name!r} in the result of every member, found in member {number}: "
                    f"{has[:200]}. Type one of those, or put it into the result: "
                    f"result = {{{name!r}: …}}"
                )
            result = result[name]
        arrays[number] = np.asarray(result)
    shapes = {number: array.shape for number, array in arrays.items()}
    first = next(iter(shapes))
    other = next((number for number in shapes if shapes[number] != shapes[first]), None)
    if other is not None:
        raise UsageError(
            f"expected predictions of one shape, found {shapes[first]} in member {first} and "
            f"{shapes[other]} in member {other}. Predict for the same inputs in every member."
        )
    return np.stack(list(arrays.values()))


def vote(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Returns the label that most members chose; of several, the least.

    Args:
        labels: (members, …) of whole numbers, text or booleans.

    Returns:
        (…) the labels, and (…) which share of the members chose them.

    Raises:
        UsageError: they are no labels.
    """
    import numpy as np

    if labels.dtype.kind not in "iubUSO":
        raise UsageError(
            f"a vote expected labels, found {labels.dtype} numbers. "
            "Leave labels in the result, as probabilities.argmax(axis=-1)."
        )
    kinds, codes = np.unique(labels, return_inverse=True)
    codes = codes.reshape(labels.shape)
    best = np.zeros(labels.shape[1:], int)
    most = np.zeros(labels.shape[1:], int)
    for code in range(len(kinds)):
        count = (codes == code).sum(axis=0)
        best = np.where(count > most, code, best)
        most = np.maximum(most, count)
    return kinds[best], most / len(labels)
