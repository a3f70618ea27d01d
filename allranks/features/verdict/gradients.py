"""Gradients that a cell computes with jax, and what it updates with them. Runs in a rank.

jax has no optimizer that could be followed. Its weights are variables of the cell that each step of
a loop replaces: ``params = update(params, grads)``, where ``grads`` have been reduced.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from textwrap import dedent
from types import CodeType
from typing import Any

from allranks.features.verdict.records import Model

_GRADIENTS = frozenset({"grad", "value_and_grad"})
_WORDS = re.compile(r"[^\W\d]\w*")
#: More functions are not looked at.
_MOST_NAMES = 1000
#: What reduces gradients.
_REDUCTIONS = frozenset({"allreduce", "grouped_allreduce"})
_SAMPLED, _MOST_ARRAYS = 64, 256
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
    words = set(_WORDS.findall(source))
    seen = words | _names_below(words, variables)
    kinds = (type(variables.get(name)).__module__ for name in seen)
    if any(kind.partition(".")[0] == "mpi4py" for kind in kinds):
        return False
    # Arrays of torch have an attribute of that name.
    imported = [variables.get(name) for name in _GRADIENTS & seen]
    of_jax = any(str(getattr(one, "__module__", "")).startswith("jax") for one in imported)
    return of_jax or ("jax" in seen and not seen.isdisjoint(_GRADIENTS))


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def updated_models(source: str, variables: Mapping[str, Any]) -> list[Model]:
    """Returns the arrays of the variables that the cell updates, with some of their numbers."""
    tree: Any = sys.modules.get("jax.tree_util")
    found = []
    for name in sorted(updated_names(source, variables)) if tree is not None else ():
        with suppress(Exception):  # as of arrays that jax has deleted
            rows = [
                (name + tree.keystr(path), array)
                for path, array in tree.tree_flatten_with_path(variables[name])[0][:_MOST_ARRAYS]
                if getattr(getattr(array, "dtype", None), "kind", "") == "f" and array.size
            ]
            # The thread that is asked would wait for the GPU, which may wait for another rank.
            if rows and all(_is_on_host(array) for _, array in rows):
                names, arrays = zip(*rows, strict=True)
                found.append(
                    Model(
                        names=names,
                        nbytes=[array.nbytes for array in arrays],
                        steps=0,
                        sampled=0,
                        checksums={},
                        numbers=[_some(array) for array in arrays],
                    )
                )
    return found


def updated_names(source: str, variables: Mapping[str, Any]) -> set[str]:
    """Returns the variables that a loop of the cell replaces by themselves and reduced numbers.

    Gradients are computed from each of them: a local sum, which may differ, is none.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics of IPython
        return set()
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For | ast.While)]
    pairs = [pair for loop in loops for pair in _assigned(loop)]
    called = {name: _names_below([name], variables) for _, read in pairs for name in read}

    def using(names: frozenset[str]) -> set[str]:
        return {*names, *(name for name, below in called.items() if not names.isdisjoint(below))}

    # Functions that are made once, before the loop.
    before = [pair for one in tree.body if isinstance(one, ast.Assign) for pair in _assigned(one)]
    made = {name for name, read in before if not _GRADIENTS.isdisjoint(read)}
    differentiate = using(_GRADIENTS) | made
    inputs = {name for _, read in pairs if not differentiate.isdisjoint(read) for name in read}
    reduce = using(_REDUCTIONS)
    reduced = reduce | {name for name, read in pairs if not reduce.isdisjoint(read)}
    reduced |= {name for name, read in pairs if not reduced.isdisjoint(read)}
    functions = _Functions(tree, variables, differentiate)
    averaged = {name for loop in loops for name in functions.averaged(loop)}
    return {
        name
        for name, read in pairs
        if name in (read & inputs) - averaged
        and name in variables
        and not reduced.isdisjoint(read - {name})
    }


class _Functions:
    """The user's functions that a cell calls, in the cell or before it."""

    def __init__(
        self, cell: ast.Module, variables: Mapping[str, Any], differentiate: set[str]
    ) -> None:
        self._variables, self._differentiate = variables, differentiate
        self._of_cell = {one.name: one for one in cell.body if isinstance(one, ast.FunctionDef)}
        #: The places of the parameters that a function averages itself, by their names.
        self._found: dict[str, dict[str, int]] = {}

    def averaged(self, tree: ast.AST) -> Iterator[str]:
        """Yields the names of what is reduced itself, as weights that ranks train apart."""
        for one in ast.walk(tree):
            if not isinstance(one, ast.Call):
                continue
            # As `allreduce(w)`, and as `jax.tree.map(allreduce, w)`.
            functions = [arg for arg in one.args if isinstance(arg, ast.Name)]
            given = {name for arg in one.args for name in _whole(arg)}
            if any(not _REDUCTIONS.isdisjoint(_read(part)) for part in (one.func, *functions)):
                yield from given if given.isdisjoint(self._differentiate) else ()
                continue
            for read in map(set, map(_whole, self._reduced_arguments(one))):
                yield from read if read.isdisjoint(self._differentiate) else ()

    def _reduced_arguments(self, call: ast.Call) -> Iterator[ast.expr]:
        """Yields the arguments that a function of the user reduces."""
        for at, function in enumerate(call.args):
            # As `jax.tree.map(lambda one: allreduce(one), w)`.
            if isinstance(function, ast.Lambda):
                places = self._reduced_parameters(function).values()
                yield from (one for n, one in enumerate(call.args[at + 1 :]) if n in places)
        if isinstance(call.func, ast.Name):
            found = self._parameters(call.func.id)
            yield from (one for at, one in enumerate(call.args) if at in found.values())
            yield from (option.value for option in call.keywords if option.arg in found)

    def _parameters(self, function: str) -> dict[str, int]:
        if function not in self._found:
            self._found[function] = {}  # also while it is looked at: it may call itself
            definition = self._of_cell.get(function) or self._defined_before(function)
            if definition is not None:
                self._found[function] = self._reduced_parameters(definition)
        return self._found[function]

    def _reduced_parameters(self, definition: ast.FunctionDef | ast.Lambda) -> dict[str, int]:
        names = [*definition.args.posonlyargs, *definition.args.args]
        places = {one.arg: at for at, one in enumerate(names)}
        origins = {name: {name} for name in places}
        for name, read in _parts(definition):
            found = set[str]().union(*(origins.get(one, ()) for one in read))
            origins[name] = origins.get(name, set()) | found
        whole = set[str]().union(*(origins.get(name, ()) for name in self.averaged(definition)))
        return {name: places[name] for name in whole}

    def _defined_before(self, function: str) -> ast.FunctionDef | None:
        value = self._variables.get(function)
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        if not isinstance(code, CodeType) or len(self._found) > _MOST_NAMES:
            return None
        try:
            (found,) = ast.parse(dedent(inspect.getsource(code))).body
        except (OSError, SyntaxError, TypeError, ValueError):  # a lambda, or no source
            return None
        return found if isinstance(found, ast.FunctionDef) else None


def _parts(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yields the names of parts of other names, as an array of a model, without calls."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign) and not _calls(one.value):
            for target in one.targets:
                yield from _split(target, one.value)
        elif isinstance(one, ast.For | ast.comprehension):
            yield from _split(one.target, one.iter)


def _split(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, set[str]]]:
    """Yields the names of a target, each with what its part of the value is made of.

    That of ``p`` in ``for p, g in zip(model, gradients)`` is the model alone.
    """
    parts: list[ast.expr] = []
    if isinstance(value, ast.Tuple | ast.List):
        parts = value.elts
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "zip":
            parts = value.args
        elif value.func.id == "enumerate":
            parts = [ast.Constant(0), *value.args[:1]]
    if isinstance(target, ast.Tuple | ast.List) and len(target.elts) == len(parts):
        for inner, part in zip(target.elts, parts, strict=True):
            yield from _split(inner, part)
    else:
        for name in _whole(target):
            yield name, {*_whole(value)}


def _whole(value: ast.AST) -> Iterator[str]:
    """Yields the names that a value is made of, without those that only choose a part."""
    if isinstance(value, ast.Subscript):
        yield from _whole(value.value)
        return
    yield from _named(value)
    for inner in ast.iter_child_nodes(value):
        yield from _whole(inner)


def _calls(value: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) for one in ast.walk(value))


def _assigned(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yields the names that are assigned, each with those that its value is made of."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign | ast.AugAssign):
            read = {*_read(one.value)}
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            if isinstance(one, ast.AugAssign):
                read |= {*_read(one.target)}
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, read


def _read(value: ast.AST) -> Iterator[str]:
    for one in ast.walk(value):
        yield from _named(one)


def _named(value: ast.AST) -> Iterator[str]:
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Attribute) and value.attr in _GRADIENTS | _REDUCTIONS:
        yield value.attr


def _names_below(names: Iterable[str], variables: Mapping[str, Any]) -> set[str]:
    """Returns the names in functions of the user, and in those that these call."""
    seen, left = set[str](), list(names)
    while left and len(seen) < _MOST_NAMES:
        value = variables.get(left.pop())
        # A function that jax has compiled wraps the user's.
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        if isinstance(code, CodeType):
            more = {*_names(code)} - seen
            seen |= more
            left += more
    return seen


def _is_on_host(array: Any) -> bool:
    devices = getattr(array, "devices", None)
    return devices is None or all(one.platform == "cpu" for one in devices())


def _some(array: Any) -> list[float]:
    import numpy as np

    flat = np.asarray(array).reshape(-1)
    return [float(number) for number in flat[:: -(-flat.size // _SAMPLED)]]
