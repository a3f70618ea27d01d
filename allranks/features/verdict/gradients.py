"""Whether a cell computes gradients with jax, whose optimizers are not followed. Runs in a rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

_GRADIENTS = frozenset({"grad", "value_and_grad"})
_WORDS = re.compile(r"[^\W\d]\w*")
#: More functions are not looked at.
_MOST_NAMES = 1000
#: These move data that allranks does not see.
_OTHER_COLLECTIVES = ("mpi4jax",)


def computes_gradients(source: str, variables: Mapping[str, Any]) -> bool:
    """Whether the source, or functions of the user that it calls, name jax's gradients.

    It does not count if ranks may exchange them in another way than by collectives of allranks.
    """
    if "jax" not in sys.modules or any(name in sys.modules for name in _OTHER_COLLECTIVES):
        return False
    distributed = sys.modules.get("jax._src.distributed")
    if getattr(getattr(distributed, "global_state", None), "client", None) is not None:
        return False
    seen = set(_WORDS.findall(source))
    names = list(seen)
    while names and len(seen) < _MOST_NAMES:
        name = names.pop()
        value = variables.get(name)
        if type(value).__module__.partition(".")[0] == "mpi4py":
            return False
        # A function that jax has compiled wraps the user's.
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        if isinstance(code, CodeType):
            more = {*_names(code)} - seen
            seen |= more
            names += more
    # Arrays of torch have an attribute of that name.
    imported = [variables.get(name) for name in _GRADIENTS & seen]
    of_jax = any(str(getattr(one, "__module__", "")).startswith("jax") for one in imported)
    return of_jax or ("jax" in seen and not seen.isdisjoint(_GRADIENTS))


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
