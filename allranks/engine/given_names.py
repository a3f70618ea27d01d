"""The names that each rank has in its cells, and the cells that have replaced some of them."""

from __future__ import annotations

import dis
from collections.abc import Mapping, Sequence
from operator import is_
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

from allranks.collectives.calls.sites import shown_name
from allranks.engine.namespace import OPERATIONS, PLACE
from allranks.engine.saved_names import is_same

#: Not ``device``, a name that programs give themselves.
_OF_ALL = (*PLACE, "comm")
_WATCHED = (*_OF_ALL, "log", *OPERATIONS)
_MISSING = object()
#: What loads a name that is not a function's own.
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL")
#: A notice lists at most this many names.
_NAMED = 5


class GivenNames:
    """Which of a rank's own names its cells have replaced.

    ``names`` are the variables of the cells, as a fresh rank has them.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._given = {name: names[name] for name in _WATCHED if name in names}
        self._before: Sequence[Any] = ()
        #: The values and the cells, by name.
        self._replaced: dict[str, tuple[Any, str]] = {}

    def begin(self) -> None:
        # Values that were pushed between two cells are no cell's doing.
        self._before = [*map(self._names.get, self._given)]

    def end(self, file: str) -> list[str]:
        """Returns the names that a cell has replaced; ``file`` is the file name of its code."""
        after = [*map(self._names.get, self._given)]
        if all(map(is_, after, self._before)):  # as after nearly every cell
            return []
        found = []
        for name, before, value in zip(self._given, self._before, after, strict=False):
            if value is before or name not in self._names:
                continue
            if not _is_ours(name, value, self._given[name]):
                self._replaced[name] = value, shown_name(file)
                found.append(name)
        return found

    def names_in(self, tb: TracebackType | None) -> dict[str, str]:
        """Returns the replaced names in the expression that failed, and the cells that did it."""
        replaced = {
            name: cell
            for name, (value, cell) in self._replaced.items()
            if self._names.get(name, _MISSING) is value
        }
        if not replaced:
            return {}
        code, at, local = None, 0, set[str]()
        while tb is not None:
            frame = tb.tb_frame
            if frame.f_globals is self._names:
                code, at = frame.f_code, tb.tb_lasti
                local = set() if frame.f_locals is frame.f_globals else {*frame.f_locals}
            tb = tb.tb_next
        used = _names_at(code, at) - local if code is not None else set()
        return {name: cell for name, cell in replaced.items() if name in used}


def notice(names: Sequence[str]) -> str:
    """Returns the line below the cell that has replaced these names."""
    return f"this cell replaced {several(names)}, which each rank has. {restore(names)}"


def hint(replaced: Mapping[str, str]) -> str:
    """Returns what an error adds about the names, and the cells that have replaced them."""
    cells = dict.fromkeys(replaced.values())
    found = {cell: [name for name in replaced if replaced[name] == cell] for cell in cells}
    said = " and ".join(f"{cell} has replaced {several(names)}" for cell, names in found.items())
    return f"{said}, which each rank has. {restore([*replaced])}"


def restore(names: Sequence[str]) -> str:
    again = ", ".join(names) if len(names) <= _NAMED else "*"
    it = "it" if len(names) == 1 else "them"
    return f"To have {it} again: from allranks.batch import {again}"


def several(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")


def _is_ours(name: str, value: Any, given: Any) -> bool:
    # ``rank = comm.Get_rank()`` changes nothing, and a function of hvd does the same as ours.
    if is_same(value, given):
        return True
    if name in _OF_ALL:
        return False
    made = value if type(value) in (FunctionType, MethodType) else type(value)
    try:
        return bool(made.__module__.startswith("allranks."))
    except Exception:  # a class may have a ``__module__`` of its own
        return False


def _names_at(code: CodeType, at: int) -> set[str]:
    """Returns the global names in the expression of an instruction.

    A local name, and one in a lambda or a comprehension within the expression, is none of them.
    """
    try:
        steps = [(step, step.positions) for step in dis.get_instructions(code)]
        (whole,) = [place for step, place in steps if step.offset == at]
        return {
            step.argval
            for step, place in steps
            if step.opname in _LOADS and _is_within(place, whole)
        }
    except Exception:  # it has no places, or a cell has replaced functions of Python
        return set()


def _is_within(place: Any, whole: Any) -> bool:
    first, last, begin, end = whole
    return (first, begin) <= (place.lineno, place.col_offset) and (
        place.end_lineno,
        place.end_col_offset,
    ) <= (last, end)
