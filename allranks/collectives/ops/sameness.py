"""Whether all ranks have the same numbers in arrays and models, and where they differ."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allranks.collectives.arrays.libraries import labels_of, to_numpy
from allranks.collectives.arrays.reductions import Array, Max, Min
from allranks.collectives.ops.operations import allgather_object
from allranks.collectives.ops.reducing import allreduce
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError
from allranks.records.ranks import label

_NAME = "same_on_all_ranks"
_SHOWN = 5
_EXTENDED = np.dtype(np.longdouble)
#: Of a number with 63 bits behind the first one, on x86, 16 bytes in memory have 10.
_USED_OF_EXTENDED = 10 if np.finfo(_EXTENDED).nmant == 63 else _EXTENDED.itemsize
#: Numbers and texts that are compared as they are.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Leaf(NamedTuple):
    """An array or a plain value: its place, what it is, and a checksum of all its bytes."""

    place: str
    kind: str
    checksum: bytes


def same_on_all_ranks(value: Any, *, process_set: ProcessSet | None = None) -> bool:
    """Returns whether all ranks have the same values, bit by bit; prints what differs, and where.

    Args:
        value: an array of any library, a table of pandas with its labels, a model or an optimizer
            with ``state_dict()``, a model of Keras, a number, a text, or a list or dictionary of
            these. Equal bits count as equal, also NaN.
        process_set: the ranks that take part; by default all.

    Returns:
        The same on every rank. The first rank prints the differences.

    Raises:
        UsageError: ``value`` has an object that cannot be compared.

    Collective over the process set.
    """
    found = differences(value, process_set)
    if found and group_of(process_set, _NAME).me == 0:
        sys.stdout.write("\n".join(found) + "\n")
    return not found


def differences(value: Any, process_set: ProcessSet | None = None) -> list[str]:
    """Returns a line for each of the first differences between ranks, the same on every rank.

    Collective over the process set.
    """
    arrays: dict[str, Any] = {}
    mine, problem = list[Leaf](), ""
    try:
        places = set[str]()
        for place, leaf in _leaves(value, ""):
            while place in places:  # as of the keys 1 and "1"
                place += "'"
            places.add(place)
            mine.append(_described(place, leaf, arrays))
    except UsageError as error:
        problem = str(error)
    except Exception as error:  # as of a method of the model
        problem = f"{_NAME} could not read the values: {type(error).__name__}: {error}"
    # A rank that raised before this call would leave the others waiting.
    brought = allgather_object((problem, mine), name=_NAME, process_set=process_set)
    if problem:
        raise UsageError(problem)
    ranks = group_of(process_set, _NAME).ranks
    refused = [rank for rank, (text, _) in zip(ranks, brought, strict=True) if text]
    if refused:
        raise UsageError(
            f"{_NAME} expected values that can be compared on every rank, found others on "
            f"{label(refused)}: {brought[ranks.index(refused[0])][0]}"
        )
    rows = [{leaf.place: leaf for leaf in leaves} for _, leaves in brought]
    every = dict.fromkeys(place for row in rows for place in row)
    differ = [place for place in every if len({row.get(place) for row in rows}) > 1]
    lines = []
    for place in differ[:_SHOWN]:
        found = [row.get(place) for row in rows]
        text = _text(place, ranks, found)
        if len({leaf.kind if leaf is not None else "" for leaf in found}) == 1:
            text += _distance(arrays.get(place), process_set)
        lines.append(text)
    if len(differ) > _SHOWN:
        lines.append(f"and {len(differ) - _SHOWN} more of {len(every)}")
    return lines


def _text(place: str, ranks: Sequence[int], found: Sequence[Leaf | None]) -> str:
    kinds = [leaf.kind if leaf is not None else "nothing" for leaf in found]
    groups: dict[tuple[str, bytes], list[int]] = {}
    for rank, leaf, kind in zip(ranks, found, kinds, strict=True):
        groups.setdefault((kind, leaf.checksum if leaf is not None else b""), []).append(rank)
    # The most ranks first: the others are the likely cause.
    order = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
    if len({*kinds}) > 1:
        said = ", ".join(f"{kind} on {label(members)}" for (kind, _), members in order)
    elif len(order) == len(ranks):
        said = "other values on every rank"
    else:
        said = "the same on " + ", other values on ".join(label(m) for _, m in order)
    return f"{place or 'it'}: {said}"


def _distance(array: Any, process_set: ProcessSet | None) -> str:
    """Returns the largest difference between floats of the same shape. Collective."""
    if array is None or array.dtype.kind != "f" or not array.size:
        return ""
    most, least = (allreduce(array, op, name=_NAME, process_set=process_set) for op in (Max, Min))
    with np.errstate(all="ignore"):
        return f", by at most {float(np.max(most.astype('f8') - least.astype('f8'))):.3g}"


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays and plain values in a value, with their places."""
    state: Callable[[], Any] | None = getattr(value, "state_dict", None)
    weights = getattr(value, "weights", None)
    if isinstance(value, dict | list | tuple) and not value:
        yield place, value
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            name = str(key) if isinstance(key, str | int) else repr(key)
            yield from _leaves(value[key], f"{place}.{name}" if place else name)
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{place}[{at}]")
    elif callable(state):
        yield from _leaves(dict(state()), place)
    elif isinstance(weights, list) and not weights and hasattr(value, "trainable_weights"):
        yield place, weights  # of Keras: a layer without any, or a model that is not built
    elif isinstance(weights, list) and weights and all(map(_is_variable, weights)):
        for at, one in enumerate(weights):
            name = getattr(one, "path", f"weights[{at}]")
            yield from _leaves(one, f"{place}.{name}" if place else name)
    else:
        yield place, value


def _is_variable(value: Any) -> bool:
    # Of Keras 3 or 2. A class of a cell may have a list of arrays as weights, and biases, too.
    return hasattr(value, "path") or hasattr(value, "assign")


def _described(place: str, leaf: Any, arrays: dict[str, Any]) -> Leaf:
    if isinstance(leaf, dict | list | tuple):
        return Leaf(place, f"an empty {'dictionary' if isinstance(leaf, dict) else 'list'}", b"")
    if isinstance(leaf, _PLAIN) and not isinstance(leaf, np.generic):
        text = repr(leaf)
        return Leaf(place, type(leaf).__name__, hashlib.blake2b(text.encode()).digest()[:16])
    # As of Keras, whose variables are no arrays themselves.
    leaf = getattr(leaf, "value", leaf) if hasattr(leaf, "path") else leaf
    try:
        array, _ = to_numpy(leaf)
    except Exception:
        raise UsageError(
            f"{_NAME} expected arrays, models, numbers, texts, or lists and dictionaries of these, "
            f"found {type(leaf).__name__}{f' at {place}' if place else ''}. "
            f"Pass for example the arrays in it"
        ) from None
    arrays[place] = array
    checksum = hashlib.blake2b(_bytes_of(array).data, digest_size=16).digest()
    kind = " ".join([f"{array.dtype} {array.shape}", *labels_of([leaf])])
    return Leaf(place, kind, checksum)


def _bytes_of(array: Array) -> Array:
    """The bytes of all values, without those that no value uses, which are what memory had."""
    if array.dtype.names:
        return np.concatenate([_bytes_of(array[name]) for name in array.dtype.names])
    found = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if array.dtype.char in "gG" and _EXTENDED.itemsize > _USED_OF_EXTENDED:
        found = found.reshape(-1, _EXTENDED.itemsize)[:, :_USED_OF_EXTENDED].reshape(-1)
    return found
